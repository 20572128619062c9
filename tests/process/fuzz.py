"""Fuzz a real stack: thousands of damaged requests over HTTP and gRPC, and what must hold after them.

python -m tests.process.fuzz --requests 10000 --seed 1

No answer is a 5xx (but 504 for a time limit of the client's own), none hangs, every refusal has the form of an error;
after it all, the engine answers as before, no request is left, and no process has grown by more than 5 % since the
warm-up (the first third of the requests).
"""

import argparse
import asyncio
import collections
import json
import random
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
import httpx

from pagoda.v1 import inference_pb2, types_pb2
from tests.process.hostile.fuzz_cases import FLAGS, NUMBERS, TEXTS, Case, broken_frames, broken_http, make_case
from tests.process.stack import MODULES, Stack, ask

CONCURRENCY = 24
HANG_S = 120.0
"""An answer that takes longer is taken for a hang; an honest one of a full context takes seconds."""
MAX_GROWTH = 0.05
SHOWN_CHARS = 600

GRPC_METHODS = {method.name: method for method in inference_pb2.DESCRIPTOR.services_by_name["Inference"].methods}
REFUSALS = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.DEADLINE_EXCEEDED,  # the client's own
}


@dataclass(slots=True)
class Report:
    """What a run has seen."""

    counts: collections.Counter[str] = field(default_factory=collections.Counter)
    """Answers by their status."""
    violations: list[str] = field(default_factory=list)
    sizes: list[dict[str, int]] = field(default_factory=list)
    """Resident bytes of each process: after the warm-up, and at the end."""

    @property
    def growth(self) -> dict[str, float]:
        """Share by which each process has grown since the warm-up."""
        before, after = self.sizes[0], self.sizes[-1]
        return {name: after[name] / before[name] - 1 for name in before}


async def fuzz(stack: Stack, *, num_requests: int, seed: int, grpc_share: float = 0.15) -> Report:
    """Send `num_requests` to a ready stack; HTTP and gRPC, damaged sockets among them."""
    report = Report()
    pids = {name: stack.service(name).pid for name in MODULES}
    before = await asyncio.to_thread(ask, stack.url)
    warm_up = num_requests // 3
    limits = httpx.Limits(max_connections=CONCURRENCY)
    async with (
        httpx.AsyncClient(base_url=stack.url, timeout=HANG_S, limits=limits) as http,
        grpc.aio.insecure_channel(f"127.0.0.1:{stack.grpc_port}") as channel,
    ):

        async def send(number: int) -> None:
            draw = random.Random(f"{seed}:{number}")
            kind = draw.random()
            if kind < 0.03:
                outcome = await send_bytes(stack.port, broken_http(draw))
            elif kind < 0.06:
                outcome = await send_bytes(stack.grpc_port, broken_frames(draw))
            elif kind < 0.06 + grpc_share:
                outcome = await send_message(channel, draw, report)
            else:
                outcome = await send_case(http, make_case(seed, number), report)
            report.counts[outcome] += 1

        for numbers in (range(warm_up), range(warm_up, num_requests)):
            await in_parallel(send, numbers)
            await settled(stack, report)
            report.sizes.append({name: stack.service(name).memory_info().rss for name in MODULES})
    if {name: stack.service(name).pid for name in MODULES} != pids:
        report.violations.append("a process was replaced")
    if await asyncio.to_thread(ask, stack.url) != before:
        report.violations.append("a greedy answer has changed")
    return report


async def in_parallel(send: Callable[[int], Awaitable[None]], numbers: range) -> None:
    """Each number once, CONCURRENCY at a time."""
    left = iter(numbers)

    async def work() -> None:
        for number in left:
            await send(number)

    async with asyncio.TaskGroup() as group:
        for _ in range(CONCURRENCY):
            group.create_task(work())


async def send_case(http: httpx.AsyncClient, case: Case, report: Report) -> str:
    """One request over HTTP; what came of it."""

    def violate(what: str) -> None:
        shown = case.content[:SHOWN_CHARS]
        report.violations.append(f"{what}: {case.method} {case.path} {case.headers} {shown!r}")

    try:
        async with (
            asyncio.timeout(HANG_S),
            http.stream(case.method, case.path, content=case.content, headers=case.headers) as response,
        ):
            if case.hangs_up:
                await anext(aiter(response.aiter_raw()), b"")
                return "hung up"
            content = await response.aread()
    except (TimeoutError, httpx.TimeoutException):
        violate("hang")
        return "hang"
    except httpx.HTTPError as error:
        violate(f"broken connection ({error!r})")
        return "broken"
    text = content.decode()
    is_own_limit = response.status_code == 504 and (b'"timeout"' in case.content or "X-Request-Timeout" in case.headers)
    if response.status_code >= 500 and not is_own_limit:
        violate(f"{response.status_code} {text[:SHOWN_CHARS]}")
    elif response.status_code >= 400 and case.method != "HEAD":
        if not is_error(text):
            violate(f"{response.status_code} without an error object, {text[:SHOWN_CHARS]}")
    elif response.headers.get("content-type", "").startswith("text/event-stream") and '"code":5' in text:
        violate(f"failed stream {text[-SHOWN_CHARS:]}")
    return str(response.status_code)


def is_error(text: str) -> bool:
    """Whether `text` is an error object with a message."""
    try:
        return bool(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return False


async def send_bytes(port: int, content: bytes) -> str:
    """Bytes that are no request; the server may say what it likes or nothing, but no 5xx."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(content)
        await writer.drain()
        async with asyncio.timeout(0.3):
            answer = await reader.read(65536)
    except TimeoutError:
        return "bytes: it waits for more"
    except OSError:
        return "bytes: closed"
    finally:
        writer.close()
    status = re.match(rb"HTTP/1\.1 (\d)", answer)
    return f"bytes: {status[1].decode()}xx" if status else "bytes: closed or frames"


async def send_message(channel: grpc.aio.Channel, draw: random.Random, report: Report) -> str:
    """A call of the public service whose message is odd, or none at all."""
    name = draw.choice(list(GRPC_METHODS))
    is_stream = GRPC_METHODS[name].server_streaming
    if name.startswith("Generate"):
        content = odd_request(draw).SerializeToString()
    elif name.startswith("Chat"):
        content = odd_chat(draw).SerializeToString()
    else:
        content = draw.choice([b"", b"\n\x03abc", b"\n\x02\x05\x06", draw.randbytes(20)])
    if content and draw.random() < 0.3:
        position = draw.randrange(len(content))
        content = content[:position] + draw.randbytes(draw.randrange(9)) + content[position + draw.randrange(9) :]
    path = f"/pagoda.v1.Inference/{name}"
    try:
        async with asyncio.timeout(HANG_S):
            if is_stream:
                call: Any = channel.unary_stream(path, bytes, bytes)(content)
                number = 0
                async for _ in call:
                    number += 1
                    if number == 50:  # a long one is given up
                        call.cancel()
                        break
            else:
                await channel.unary_unary(path, bytes, bytes)(content)
    except TimeoutError:
        report.violations.append(f"hang: gRPC {name} {content!r}")
        return "gRPC hang"
    except grpc.aio.AioRpcError as error:
        # grpcio itself answers INTERNAL to bytes that are no message.
        is_fine = error.code() in REFUSALS or "deserializing" in (error.details() or "")
        if not is_fine:
            report.violations.append(f"gRPC {name} {error.code()} {error.details()!r} {content!r}")
        return f"gRPC {error.code().name}"
    return "gRPC OK"


def odd_request(draw: random.Random) -> inference_pb2.GenerateRequest:
    """A GenerateRequest whose fields fit their types and little else."""
    request = inference_pb2.GenerateRequest(
        text=draw.choice(["Once", *TEXTS]), sampling_params=types_pb2.SamplingParams(max_tokens=4, temperature=1)
    )
    if draw.random() < 0.3:
        request.token_ids.ids.extend(draw.choice([[5], [2**32 - 1], []]))
    make_odd(draw, request.sampling_params)
    if draw.random() < 0.3:
        request.stop.extend(draw.choice([["a"], [""], ["a"] * 9, ["\x00"]]))
    if draw.random() < 0.2:
        request.model = draw.choice(["nobody", "pagoda-tiny", ""])
    if draw.random() < 0.2:
        request.request_id = draw.choice(["", "x" * 500, "same"])
    return request


def odd_chat(draw: random.Random) -> inference_pb2.ChatRequest:
    """A ChatRequest of the same kind."""
    request = inference_pb2.ChatRequest(sampling_params=types_pb2.SamplingParams(max_tokens=9, temperature=1))
    for _ in range(draw.choice([0, 1, 1, 1, 3])):
        role = draw.choice(["user", "user", "system", "tool", "nobody", ""])
        request.messages.add(role=role, content=draw.choice(["Hello!", *TEXTS]))
    if draw.random() < 0.4:
        schema = draw.choice(["", "{}", "{", "[]", '{"type": "nothing"}', '{"type": "object", "properties": {}}'])
        request.tools.add(name=draw.choice(["look", "", "a b"]), parameters_json=schema)
    if draw.random() < 0.3:
        request.tool_choice = draw.choice([0, 1, 2, 3, 99])  # type: ignore[assignment]
    elif draw.random() < 0.2:
        request.tool_choice_function = draw.choice(["look", "nobody", ""])
    if draw.random() < 0.2:
        request.response_format_json = draw.choice(["{", '{"type": "json_object"}', '{"type": "poem"}', "5"])
    if draw.random() < 0.2:
        request.chat_template_kwargs_json = draw.choice(["{", '{"a": 1}', "[]", '{"messages": 5}'])
    request.continue_final_message = draw.random() < 0.1
    if draw.random() < 0.4:
        make_odd(draw, request.sampling_params)
    return request


def make_odd(draw: random.Random, params: types_pb2.SamplingParams) -> None:
    """Give some of the fields a value that fits their type."""
    fields: list[Any] = list(params.DESCRIPTOR.fields)
    for chosen in draw.sample(fields, draw.choice([0, 1, 1, 2])):
        number = draw.choice([number for number in NUMBERS if isinstance(number, int)])
        for given in (number, float(draw.choice([-1.0, 0.0, 0.5, 1e30, float("nan"), float("inf")])), "x", True):
            try:
                setattr(params, chosen.name, given)
            except (TypeError, ValueError, AttributeError, OverflowError):
                continue
            break
    # What is valid stays small, so that a run ends.
    if params.n > 16:
        params.n = 2**31


async def settled(stack: Stack, report: Report) -> None:
    """Wait until no request is left in the engine."""
    deadline = time.monotonic() + HANG_S
    async with httpx.AsyncClient(timeout=60) as http:
        while True:
            text = (await http.get(f"{stack.url}/metrics")).text
            names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
            left = {name: re.findall(rf"^vllm:{name}{{[^}}]*}} (\S+)$", text, re.MULTILINE) for name in names}
            if all(float(value) == 0 for values in left.values() for value in values):
                return
            if time.monotonic() > deadline:
                report.violations.append(f"requests are left: {left}")
                return
            await asyncio.sleep(0.2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("flags", nargs="*", help="further flags of `pagoda serve`, after --")
    args = parser.parse_args()
    stack = Stack("--disable-uvicorn-access-log", *FLAGS, *args.flags)
    try:
        stack.wait_ready()
        started = time.monotonic()
        report = asyncio.run(fuzz(stack, num_requests=args.requests, seed=args.seed))
        print(f"{args.requests} requests in {time.monotonic() - started:.0f} s")
        print(dict(sorted(report.counts.items())))
        for name, share in report.growth.items():
            first, last = report.sizes[0][name], report.sizes[-1][name]
            print(f"{name}: {first / 1e6:.1f} MB after the warm-up, {last / 1e6:.1f} MB at the end, {share:+.1%}")
            if share > MAX_GROWTH:
                report.violations.append(f"{name} has grown by {share:.1%}")
        for line in stack.log.splitlines():
            if "Traceback" in line or " ERROR " in line:
                report.violations.append(f"log: {line}")
    finally:
        stack.end()
    print(f"{len(report.violations)} violations")
    for violation in report.violations[:50]:
        print(violation)
    raise SystemExit(1 if report.violations else 0)


if __name__ == "__main__":
    main()
