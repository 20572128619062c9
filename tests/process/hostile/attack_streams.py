"""Attacks by gRPC: halves of calls, streams that no one reads, storms of cancellations, at all three services."""

import asyncio
from typing import Any

import grpc
import grpc.aio
import psutil
from grpc_health.v1 import health_pb2

from pagoda.v1 import inference_pb2, scheduler_pb2, types_pb2, worker_pb2
from tests.process.hostile.attack import HANG_S, Attack, Outcome, in_parallel
from tests.process.stack import MODULES, Stack

NOTHING_WRONG = (
    *("OK", "CANCELLED", "UNAUTHENTICATED", "INVALID_ARGUMENT", "NOT_FOUND", "RESOURCE_EXHAUSTED", "UNAVAILABLE"),
    *("UNIMPLEMENTED", "ALREADY_EXISTS", "DEADLINE_EXCEEDED", "FAILED_PRECONDITION"),
)
WATCH = "/grpc.health.v1.Health/Watch"
SERVICES = (
    inference_pb2.DESCRIPTOR.services_by_name["Inference"],
    scheduler_pb2.DESCRIPTOR.services_by_name["Scheduler"],
    worker_pb2.DESCRIPTOR.services_by_name["Worker"],
)


def ports_of(stack: Stack) -> list[int]:
    """Every port of gRPC that the services listen at."""
    found = {stack.grpc_port}
    for name in MODULES:
        for connection in stack.service(name).net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port != stack.port:
                found.add(connection.laddr.port)
    return sorted(found)


def generate(number: int, **params: Any) -> bytes:
    """A GenerateRequest."""
    given = types_pb2.SamplingParams(max_tokens=900, ignore_eos=True, **params)
    request_id = "same" if number % 3 == 0 else ""
    return inference_pb2.GenerateRequest(text="Once", request_id=request_id, sampling_params=given).SerializeToString()


def note(outcome: Outcome, error: grpc.aio.AioRpcError, what: str) -> None:
    """Count how a call ended."""
    name = error.code().name
    is_wrong = name not in NOTHING_WRONG and "deserializing" not in (error.details() or "")
    outcome.add(f"wrong: gRPC {name} {(error.details() or '')[:200]} of {what}" if is_wrong else f"gRPC {name}")


async def _half_calls(stack: Stack, outcome: Outcome, share: float) -> None:
    """Calls of every method of every service at every port, of which the message does not come."""
    for port in await asyncio.to_thread(ports_of, stack):
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            methods = [f"/{service.full_name}/{method.name}" for service in SERVICES for method in service.methods]
            methods += [WATCH, "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", "/none/None"]
            calls: list[Any] = [
                channel.stream_stream(path, bytes, bytes)()
                for path in methods
                for _ in range(max(2, round(60 * share)))
            ]
            await asyncio.sleep(10 * share)
            for call in calls:
                if call.done():
                    outcome.add(f"gRPC {(await call.code()).name}")
                else:
                    call.cancel()
                    outcome.add("half")


async def _unread_streams(stack: Stack, outcome: Outcome, share: float) -> None:
    """Generations whose client reads nothing."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{stack.grpc_port}") as channel:
        calls: list[Any] = []
        for number in range(max(20, round(400 * share))):
            calls.append(
                channel.unary_stream("/pagoda.v1.Inference/Generate", bytes, bytes)(
                    generate(number, n=4, temperature=1)
                )
            )
            if number % 20 == 0:
                await asyncio.sleep(0)
        await asyncio.sleep(20 * share)
        for call in calls:
            call.cancel()
        outcome.counts["unread"] += len(calls)


async def _cancelled_calls(stack: Stack, outcome: Outcome, share: float) -> None:
    """A storm of calls that are given up at once, at every port."""
    ports = await asyncio.to_thread(ports_of, stack)
    empty = {service.full_name: service for service in SERVICES}
    async with _Channels(ports) as channels:

        async def call_and_cancel(number: int) -> None:
            service = SERVICES[number % len(SERVICES)]
            method = empty[service.full_name].methods[number % len(service.methods)]
            channel = channels[number % len(channels)]
            content = generate(number) if method.name == "Generate" else b""
            call: Any = channel.stream_stream(f"/{service.full_name}/{method.name}", bytes, bytes)(_once(content))
            await asyncio.sleep(0.001 * (number % 10))
            call.cancel()
            outcome.add("cancelled")

        await in_parallel(
            [lambda number=number: call_and_cancel(number) for number in range(max(100, round(6000 * share)))],
            concurrency=100,
        )


async def _many_watches(stack: Stack, outcome: Outcome, share: float) -> None:
    """Thousands of streams that need no key, on a few connections of each port."""
    ports = await asyncio.to_thread(ports_of, stack)
    message = health_pb2.HealthCheckRequest().SerializeToString()
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with _Channels([port for port in ports for _ in range(2)], options) as channels:
        calls: list[Any] = [
            channel.unary_stream(WATCH, bytes, bytes)(message)
            for channel in channels
            for _ in range(max(20, round(1500 * share)))
        ]
        await asyncio.sleep(15 * share)
        outcome.counts["watches"] += len(calls)
        for call in calls:
            call.cancel()


async def _large_messages(stack: Stack, outcome: Outcome, share: float) -> None:
    """Messages at and beyond their bound, with much in them or nothing that anyone knows."""
    tokens = inference_pb2.DetokenizeRequest(token_ids=[300] * 900_000).SerializeToString()
    contents = {
        "Detokenize": (tokens, b"\x00" * 5_000_000),
        "GenerateUnary": (b"\xaa\x3f\x04aaaa" * 500_000, generate(1)[:-1] + b"\xff" * 10),
        "Embed": (inference_pb2.EmbedRequest(inputs=[{"text": "a " * 50}] * 2048).SerializeToString(),),
        "Tokenize": (inference_pb2.TokenizeRequest(text="a" * 3_900_000).SerializeToString(),),
        "Abort": (inference_pb2.AbortGenerationRequest(request_ids=["x" * 100] * 35_000).SerializeToString(),),
        "ChatUnary": (
            inference_pb2.ChatRequest(messages=[{"role": "user", "content": "a"}] * 100_000).SerializeToString(),
        ),
    }
    async with grpc.aio.insecure_channel(f"127.0.0.1:{stack.grpc_port}") as channel:

        async def send(name: str, content: bytes) -> None:
            call: Any = channel.unary_unary(f"/pagoda.v1.Inference/{name}", bytes, bytes)
            try:
                await call(content, timeout=HANG_S)
                outcome.add("gRPC OK")
            except grpc.aio.AioRpcError as error:
                note(outcome, error, name)

        works = [
            lambda name=name, content=content: send(name, content)
            for _ in range(max(1, round(10 * share)))
            for name, each in contents.items()
            for content in each
        ]
        await in_parallel(works, concurrency=12)


async def _once(content: bytes) -> Any:
    yield content


class _Channels:
    """A channel to each of some ports."""

    def __init__(self, ports: list[int], options: list[tuple[str, int]] | None = None) -> None:
        self._channels = [grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) for port in ports]

    async def __aenter__(self) -> list[grpc.aio.Channel]:
        return self._channels

    async def __aexit__(self, *_: object) -> None:
        for channel in self._channels:
            await channel.close()


ATTACKS: tuple[Attack, ...] = (
    Attack("half calls", _half_calls),
    Attack("streams that no one reads", _unread_streams),
    Attack("a storm of cancellations", _cancelled_calls),
    Attack("thousands of watches", _many_watches),
    Attack("large messages", _large_messages),
)
