"""Attacks by what outlives its check: bodies, answers, followers, names of watches, and entries of caches."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import grpc
import grpc.aio
import httpx
from grpc_health.v1 import health_pb2

from pagoda.v1 import inference_pb2, types_pb2
from tests.process.hostile.attack import HANG_S, Attack, Outcome, Post, in_parallel, judged, post, posts, send_posts
from tests.process.hostile.attack_bodies import CHAT, COMPLETIONS, HELLO, LONG, MESSAGES, RESPONSES, chat, complete
from tests.process.hostile.attack_streams import WATCH, note, ports_of
from tests.process.stack import Stack

MANY = 60
"""Tokens of a long answer."""


def _junk(number: int, size: int) -> str:
    return f"{number} " + "j" * size


def _outliving(number: int) -> list[Post]:
    """Bodies of megabytes of which the prompt has nothing."""
    junk = _junk(number, 3_000_000)
    tool = {"type": "function", "function": {"name": "look", "description": junk, "parameters": {"type": "object"}}}
    told = {"name": "look", "description": junk, "input_schema": {"type": "object"}}
    items = [{"type": "function", "name": "look", "description": junk, "parameters": {"type": "object"}}]
    unread = [{"role": "user", "content": [{"type": "text", "text": "Hi", "junk": junk}]}]
    kept = {"ignore_eos": True, "stream": True}
    return [
        chat(tools=[tool], tool_choice="none", max_tokens=MANY, **kept),
        post(CHAT, {"messages": unread, "max_tokens": MANY, **kept}),
        post(CHAT, {"messages": [{**HELLO[0], "junk": junk}], "max_tokens": MANY, **kept}),
        complete(suffix=junk, junk=junk, max_tokens=MANY, **kept),
        post(RESPONSES, {"input": "Hi", "tools": items, "tool_choice": "none", "max_output_tokens": MANY}),
        post(RESPONSES, {"input": "Hi", "safety_identifier": junk, "prompt_cache_key": junk, "background": True}),
        post(MESSAGES, {"messages": HELLO, "tools": [told], "tool_choice": {"type": "none"}, "max_tokens": MANY}),
        chat(response_format={"type": "text", "junk": junk}, max_tokens=MANY, **kept),
        chat(chat_template_kwargs={"a": "b"}, documents=[{"title": "a", "text": junk}], max_tokens=MANY, **kept),
    ]


async def _outliving_bodies(stack: Stack, outcome: Outcome, share: float) -> None:
    """Two of each in the short form; no more are made than are sent, for each is of megabytes."""
    rounds = range(max(2, round(60 * share)))
    bodies = await asyncio.to_thread(lambda: [body for number in rounds for body in _outliving(number)])
    await send_posts(stack, outcome, bodies, share=share, concurrency=200)


async def _background(stack: Stack, outcome: Outcome, share: float) -> None:
    """Answers in the background, each followed by many who do not read."""
    items = [{"type": "function", "name": "look", "description": "d" * 1_000_000, "parameters": {"type": "object"}}]
    body = {"input": "Hi", "tools": items, "tool_choice": "none", "max_output_tokens": MANY, "background": True}
    ids: list[str] = []
    limits = httpx.Limits(max_connections=200)
    async with httpx.AsyncClient(base_url=stack.url, timeout=HANG_S, limits=limits) as http:

        async def begin(number: int) -> None:
            is_followed = number % 3 == 0
            content = json.dumps({**body, "stream": is_followed, "top_logprobs": 20, "metadata": {"n": str(number)}})
            headers = {"Content-Type": "application/json"}
            async with http.stream("POST", RESPONSES, content=content, headers=headers) as response:
                if is_followed and response.status_code == 200:
                    text = await anext(aiter(response.aiter_text()))
                    ids.append(text.partition('"id":"')[2].partition('"')[0])
                    outcome.add("200")
                    return
                content_read = await response.aread()
            outcome.add(judged(response.status_code, response.headers, content_read, Post(RESPONSES, b"")))

        number = max(20, round(1000 * share))
        await in_parallel([lambda one=one: begin(one) for one in range(number)], concurrency=64)
        writers = []
        for place in range(max(20, round(500 * share))):
            _, writer = await asyncio.open_connection("127.0.0.1", stack.port, limit=2)
            one = ids[place % len(ids)] if ids else "none"
            writer.write(f"GET {RESPONSES}/{one}?stream=true HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            writers.append(writer)
        await asyncio.sleep(20 * share)
        for writer in writers:
            writer.transport.abort()
        await in_parallel(
            [lambda one=one: _cancel(http, one, outcome) for one in ids],  # type: ignore[misc]
            concurrency=32,
        )


async def _cancel(http: httpx.AsyncClient, response_id: str, outcome: Outcome) -> None:
    answer = await http.post(f"{RESPONSES}/{response_id}/cancel")
    outcome.add(judged(answer.status_code, answer.headers, answer.content, Post(f"{RESPONSES}/cancel", b"")))


def _resuming() -> Iterable[Post]:
    for number in range(200):
        for value in (
            f"chatcmpl-{number}:1",
            "x" * 100_000,
            "resp_1:" + "9" * 5000,
            "chatcmpl-a:" + "1," * 20_000,
            "a:0.0:1",
            "\x7f" * 100,
            f"resp_{number}",
        ):
            yield Post(CHAT, chat(stream=True).content, (("Last-Event-ID", value),))
            yield Post(RESPONSES, b"{}", (("Last-Event-ID", value),))
            yield Post(f"{RESPONSES}/resp_{number}?stream=true", b"", (("Last-Event-ID", value),), "GET")


def long_headers() -> Iterable[Post]:
    """Values of headers that are looked at."""
    content = complete(max_tokens=1).content
    for value in (
        "9" * 500_000,
        "a," * 250_000,
        "00-" + "f" * 400_000,
        '"' * 300_000,
        "bytes=" + "0-," * 90_000,
        "nan",
    ):
        for name in (
            *("Authorization", "X-Request-Id", "X-Request-Timeout", "X-Vllm-Priority", "traceparent", "tracestate"),
            *("baggage", "Cookie", "Accept", "Accept-Encoding", "X-Forwarded-For", "Forwarded", "X-Tenant-Id", "Range"),
            *("X-Correlation-Id", "If-None-Match", "Connection", "X-Session-Id", "x-api-key", "anthropic-version"),
        ):
            yield Post(COMPLETIONS, content, ((name, value),))
            yield Post("/metrics", b"", ((name, value),), "GET")
    for value in ("0", "-1", "1e-300", "1e308", "inf", "nan", "0x10", "1_0", "٣"):
        for name in ("X-Request-Timeout", "X-Vllm-Priority"):
            yield Post(COMPLETIONS, content, ((name, value.encode().decode("latin-1")),))


def pages() -> Iterable[Post]:
    """What everyone may read, over and over."""
    for _ in range(60):
        for path in (
            *("/metrics", "/openapi.json", "/", "/docs", "/v1/models", "/version", "/load", "/ready", "/ping"),
            *(
                "/status.json",
                "/status",
                "/redoc",
                "/v1/models/" + "a" * 5000,
                "/v1/models/%2e%2e%2f%2e%2e%2fetc/passwd",
            ),
            f"/metrics?{'name[]=a&' * 3000}",
            f"/v1/responses/{'%41' * 5000}/input_items?limit={'9' * 400}&order=x&after={'b' * 5000}",
            f"/v1/responses/resp_1?stream=true&starting_after={'9' * 4000}",
        ):
            yield Post(path, b"", (), "GET")


def short_timeouts() -> Iterable[Post]:
    for number in range(600):
        yield complete(timeout=(1e-9, 0.001, 0.01, 1e300)[number % 4], max_tokens=MANY, n=8)
        yield chat(timeout=0.02, max_tokens=MANY, stream=True)


def many_tenants() -> Iterable[Post]:
    for number in range(6000):
        headers = (("X-Tenant-Id", f"tenant-{number}" + "t" * 900),)
        yield Post(COMPLETIONS, complete(max_tokens=1, cache_salt=f"{number}" + "s" * 900).content, headers)


def many_constraints() -> Iterable[Post]:
    """Each another one, so that no cache has it."""
    for number in range(700):
        yield complete(structured_outputs={"regex": f"x{number}[a-z]{{1,{number % 90 + 1}}}"}, max_tokens=4)
        schema = {"type": "object", "properties": {f"p{number}": {"type": "string"}, "b": {"enum": [number]}}}
        yield complete(structured_outputs={"json": schema}, max_tokens=4)
        tool = {"type": "function", "function": {"name": f"look_{number}", "parameters": schema}}
        yield chat(tools=[tool], tool_choice="required", max_tokens=4)


def long_outputs() -> Iterable[Post]:
    """Answers of which little is asked and much is kept."""
    yield complete(prompt=["a"] * 1024, n=16, max_tokens=300, ignore_eos=True)
    yield complete(prompt=["a"] * 512, n=8, max_tokens=200, ignore_eos=True, return_token_ids=True)
    yield chat(n=128, max_tokens=MANY, ignore_eos=True, return_token_ids=True)
    yield complete(prompt=[LONG] * 1024, n=1, max_tokens=1, echo=True, return_token_ids=True)


async def _large_names(stack: Stack, outcome: Outcome, share: float) -> None:
    """Calls that need no key, with names of megabytes that the service may keep."""
    ports = await asyncio.to_thread(ports_of, stack)
    message = health_pb2.HealthCheckRequest(service="n" * 3_900_000).SerializeToString()
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)]

    async def watch(port: int) -> None:
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options)
        calls: list[Any] = []
        for number in range(max(10, round(300 * share))):
            calls.append(channel.unary_stream(WATCH, bytes, bytes)(b"%s" % message))
            if number % 10 == 0:
                await asyncio.sleep(0.1)
        await asyncio.sleep(min(10.0, 3 + 10 * share))
        outcome.counts["watches"] += len(calls)
        outcome.counts["open"] += sum(not one.done() for one in calls)
        for one in calls:
            one.cancel()
        await channel.close()

    await asyncio.gather(*map(watch, ports))


async def _arrays(stack: Stack, outcome: Outcome, share: float) -> None:
    """Answers over gRPC that are arrays, or have as many log probabilities as they may; their client does not read."""
    embed = inference_pb2.EmbedRequest(inputs=[{"text": "a"}] * 2048).SerializeToString()
    pool = inference_pb2.PoolRequest(inputs=[{"text": "a " * 200}] * 1024).SerializeToString()
    asked = types_pb2.SamplingParams(max_tokens=MANY, ignore_eos=True, n=128, logprobs=20)
    generate = inference_pb2.GenerateRequest(text="Once", sampling_params=asked).SerializeToString()
    talk = inference_pb2.ChatRequest(messages=[{"role": "user", "content": "Hi"}], sampling_params=asked)
    contents = {"Embed": embed, "Pool": pool, "GenerateUnary": generate, "ChatUnary": talk.SerializeToString()}
    options = [("grpc.max_receive_message_length", -1)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{stack.grpc_port}", options=options) as channel:

        async def send(name: str, content: bytes) -> None:
            call: Any = channel.unary_unary(f"/pagoda.v1.Inference/{name}", bytes, bytes)
            try:
                await call(content, timeout=max(5.0, 120 * share))
                outcome.add("gRPC OK")
            except grpc.aio.AioRpcError as error:
                note(outcome, error, name)

        works: list[Callable[[], Awaitable[None]]] = [
            lambda name=name, content=content: send(name, content)  # type: ignore[misc]  # its defaults
            for _ in range(max(1, round(12 * share)))
            for name, content in contents.items()
        ]
        await in_parallel(works, concurrency=24)


async def _resumed_calls(stack: Stack, outcome: Outcome, share: float) -> None:
    """Streams over gRPC that are resumed at places that never were."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{stack.grpc_port}") as channel:

        async def resume(number: int) -> None:
            received = [{"num_tokens": 2**31 - 1 if number % 2 else number}] * (number % 5 * 4000)
            place = {"request_id": f"gen-{number}", "received": received}
            request = inference_pb2.GenerateRequest(resume_from=place).SerializeToString()
            call: Any = channel.unary_stream("/pagoda.v1.Inference/Generate", bytes, bytes)(request, timeout=HANG_S)
            try:
                async for _ in call:
                    pass
                outcome.add("gRPC OK")
            except grpc.aio.AioRpcError as error:
                note(outcome, error, "a resumption")

        number = max(20, round(500 * share))
        await in_parallel([lambda one=one: resume(one) for one in range(number)], concurrency=32)  # type: ignore[misc]


ATTACKS: tuple[Attack, ...] = (
    Attack("bodies that outlive their check", _outliving_bodies),
    Attack("answers in the background", _background),
    posts("places that never were", _resuming, concurrency=64),
    posts("long headers", long_headers, concurrency=32),
    posts("pages", pages, concurrency=128),
    posts("short timeouts", short_timeouts, concurrency=200),
    posts("thousands of tenants", many_tenants, concurrency=64),
    posts("constraints that differ", many_constraints, concurrency=32),
    posts("long outputs", long_outputs, repeat=3, concurrency=12),
    Attack("names of watches", _large_names),
    Attack("arrays over gRPC", _arrays),
    Attack("resumed calls", _resumed_calls),
)
