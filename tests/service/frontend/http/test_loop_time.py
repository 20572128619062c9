"""The event loop is never held for long, whatever comes within the bounds and beyond them.

What counts is the processor time of the loop's thread between two of its turns, so that a busy machine changes nothing.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest
import pytest_asyncio

from pagoda.v1 import inference_pb2
from pagoda_frontend.budget.fields import BOUNDS, MAX_PARTS
from pagoda_frontend.budget.json_scan import MAX_TEXTS, MAX_VALUES
from tests.service.frontend.harness import MODEL, Running, running_frontend

pytestmark = pytest.mark.asyncio(loop_scope="module")
MAX_TURN_S = 0.05
FACTOR = 4
"""What is allowed beyond it, for slow processors."""

USER = [{"role": "user", "content": "Hi"}]
MESSAGES = BOUNDS["messages"].max_items
TOOLS = BOUNDS["tools"].max_items
CHAT, COMPLETION, RESPONSES, ANTHROPIC = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
KEYS = {f"k{number}": {"type": "string", "description": "x"} for number in range(10)}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": KEYS}}}
TEXT = {"type": "text", "text": "x"}
ENUM = ["x" * 20 + str(number) for number in range(9000)]


def tools(number: int) -> list[dict[str, Any]]:
    return [{**TOOL, "function": {**TOOL["function"], "name": f"f{place}"}} for place in range(number)]  # type: ignore[dict-item]


BODIES: dict[str, tuple[str, Any]] = {
    "wrong messages": ("/tokenize", {"messages": [1] * MESSAGES}),
    "too many wrong messages": ("/tokenize", {"messages": [1] * MAX_VALUES}),
    "messages": (CHAT, {"messages": USER * MESSAGES, "max_tokens": 1, "stream": True}),
    "counted messages": ("/tokenize", {"messages": USER * MESSAGES}),
    "parts": (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * MAX_PARTS}]}),
    "calls": (
        CHAT,
        {
            "messages": [
                *USER,
                {
                    "role": "assistant",
                    "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "{}"}}] * 8000,
                },
            ]
        },
    ),
    "tools": (CHAT, {"messages": USER, "tools": tools(TOOLS), "max_tokens": 1}),
    "required tools": (CHAT, {"messages": USER, "tools": tools(200), "tool_choice": "required", "max_tokens": 1}),
    "template variables": (CHAT, {"messages": USER, "chat_template_kwargs": {"a": [0] * 15_000}, "max_tokens": 1}),
    "long message": (CHAT, {"messages": [{"role": "user", "content": "hello wor " * 400_000}]}),
    "truncated text": (COMPLETION, {"prompt": "hello wor " * 1_000_000, "truncate_prompt_tokens": 5, "max_tokens": 1}),
    "bad words": (COMPLETION, {"prompt": [5], "bad_words": ["hello wor " * 400] * 128, "max_tokens": 1}),
    "prompts": (COMPLETION, {"prompt": ["hello there"] * 1024, "max_tokens": 1}),
    "a prompt of ids": (COMPLETION, {"prompt": [5] * (MAX_VALUES - 10), "max_tokens": 1}),
    "prompts of ids": (COMPLETION, {"prompt": [[5] * 500] * 1000, "max_tokens": 1}),
    "arguments": (COMPLETION, {"prompt": [5], "vllm_xargs": {"a": [1] * 4000}, "n": 50, "max_tokens": 1}),
    "biases": (COMPLETION, {"prompt": [5], "logit_bias": {str(number): 1 for number in range(1024)}, "n": 50}),
    "items": (RESPONSES, {"input": [{"role": "user", "content": "x"}] * MESSAGES, "max_output_tokens": 1}),
    "blocks": (
        ANTHROPIC,
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 8000}], "max_tokens": 1},
    ),
    "counted text": ("/tokenize", {"prompt": "hello wor " * 100_000, "return_token_strs": True}),
    "ids to text": ("/detokenize", {"tokens": [300] * (MAX_VALUES - 10)}),
    "unknown fields": (COMPLETION, {"prompt": [5], "max_tokens": 1, "x": ["y"] * (MAX_TEXTS - 100)}),
    "a large schema": (
        COMPLETION,
        {
            "prompt": [5],
            "max_tokens": 1,
            "structured_outputs": {"json": {"enum": ["x" * 20 + str(n) for n in range(9000)]}},
        },
    ),
    "inputs": ("/v1/embeddings", {"input": ["a"] * 2048}),
}


MESSAGE = inference_pb2.ChatMessage(role="user", content="x")
REFUSALS = (
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.UNIMPLEMENTED,
)


class Turns:
    """Measures the turns of this thread's loop."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._task = asyncio.create_task(self._measure())

    async def _measure(self) -> None:
        before = time.thread_time()
        while True:
            await asyncio.sleep(0)
            now = time.thread_time()
            self.longest_s, before = max(self.longest_s, now - before), now

    def end(self) -> float:
        self._task.cancel()
        return self.longest_s


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def frontend() -> AsyncIterator[Running]:
    async with running_frontend() as running:
        await running.post(COMPLETION, {"prompt": [5], "max_tokens": 1})
        yield running


async def post_raw(running: Running, path: str, body: bytes) -> bytes:
    """The answer's first bytes; nothing here takes long on the loop that is measured."""
    reader, writer = await asyncio.open_connection("127.0.0.1", running.server.port)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode())
    for start in range(0, len(body), 65536):
        writer.write(body[start : start + 65536])
        await writer.drain()
    async with asyncio.timeout(240):
        answer = await reader.read(4096)
    writer.close()
    return answer


@pytest.mark.parametrize("name", BODIES)
async def test_no_body_holds_the_loop(frontend: Running, name: str) -> None:
    path, body = BODIES[name]
    raw = json.dumps({"model": MODEL, **body}).encode()
    turns = Turns()
    answer = await post_raw(frontend, path, raw)
    longest_s = turns.end()
    assert answer.startswith(b"HTTP/1.1 ")
    assert not answer.startswith(b"HTTP/1.1 500"), answer
    assert longest_s < FACTOR * MAX_TURN_S


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("Detokenize", inference_pb2.DetokenizeRequest(token_ids=[300] * 524_288)),
        ("Detokenize", inference_pb2.DetokenizeRequest(token_ids=[300] * 1_000_000)),
        ("Tokenize", inference_pb2.TokenizeRequest(text="hello wor " * 100_000, return_token_strs=True)),
        ("Tokenize", inference_pb2.TokenizeRequest(messages=[MESSAGE] * MESSAGES)),
        ("Abort", inference_pb2.AbortGenerationRequest(request_ids=["x"] * 4096)),
        ("Abort", inference_pb2.AbortGenerationRequest(request_ids=["x"] * 1_000_000)),
        ("ChatUnary", inference_pb2.ChatRequest(messages=[MESSAGE] * MESSAGES)),
        ("ChatUnary", inference_pb2.ChatRequest(messages=[MESSAGE] * 200_000)),
        ("Embed", inference_pb2.EmbedRequest(inputs=[inference_pb2.EmbedInput(text="x")] * 2048)),
    ],
    ids=["ids", "many ids", "text", "messages", "aborts", "many aborts", "chat", "many messages", "inputs"],
)
async def test_no_message_holds_the_loop(frontend: Running, method: str, message: Any) -> None:
    content = message.SerializeToString()  # as bytes: the client works on the same loop
    call = frontend.channel.unary_unary(f"/pagoda.v1.Inference/{method}", _same, _same)
    turns = Turns()
    code = grpc.StatusCode.OK
    try:
        await call(content, timeout=240)
    except grpc.aio.AioRpcError as error:
        code = error.code()
    assert turns.end() < FACTOR * MAX_TURN_S
    assert code in REFUSALS


def _same(content: bytes) -> bytes:
    return content
