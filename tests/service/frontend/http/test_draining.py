"""SIGTERM, step by step: what was taken in is answered, and what cannot be is refused so that others can serve it."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import grpc
import httpx
import pytest

from pagoda.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from pagoda_frontend.requests.grammar_checks import GrammarChecks
from tests.service.frontend.harness import MODEL, Running, until

CONSTRAINED = {"model": MODEL, "prompt": [5], "max_tokens": 3, "structured_outputs": {"choice": ["a", "b"]}}
CHAT = {**CONSTRAINED, "messages": [{"role": "user", "content": "Hi"}]}


class SlowChecks:
    """Answers of the process that compiles constraints, which come when the test says so."""

    def __init__(self) -> None:
        self.is_asked = False
        self.answers = asyncio.Event()

    async def __call__(self, *_: Any) -> str | None:
        self.is_asked = True
        await self.answers.wait()
        return None


@pytest.fixture
async def slow(monkeypatch: pytest.MonkeyPatch) -> SlowChecks:
    checks = SlowChecks()
    monkeypatch.setattr(GrammarChecks, "_ask", checks)
    return checks


def generate(frontend: Running) -> Coroutine[Any, Any, inference_pb2.GenerateUnaryResponse]:
    stub = inference_pb2_grpc.InferenceStub(frontend.channel)
    choice = types_pb2.StructuredOutput(choice=types_pb2.StringChoices(texts=["a", "b"]))
    params = types_pb2.SamplingParams(max_tokens=3, structured_output=choice)

    async def call() -> inference_pb2.GenerateUnaryResponse:
        response: inference_pb2.GenerateUnaryResponse = await stub.GenerateUnary(
            inference_pb2.GenerateRequest(text="Hi", sampling_params=params)
        )
        return response

    return call()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_call_on_its_way_to_the_engine_is_answered(frontend: Running, slow: SlowChecks, path: str) -> None:
    asked = asyncio.create_task(frontend.post(path, CHAT if "chat" in path else CONSTRAINED))
    await until(lambda: slow.is_asked)
    draining = asyncio.create_task(frontend.server.drain(20))
    await asyncio.sleep(0.05)
    assert not draining.done()
    assert frontend.fake.submits == []
    slow.answers.set()
    answer = await asked
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 3
    await draining


async def test_so_is_one_over_grpc(frontend: Running, slow: SlowChecks) -> None:
    asked = asyncio.create_task(generate(frontend))
    await until(lambda: slow.is_asked)
    draining = asyncio.create_task(frontend.server.drain(20))
    await asyncio.sleep(0.05)
    assert not draining.done()
    slow.answers.set()
    assert (await asked).outputs[0].finish_reason == types_pb2.FINISH_REASON_LENGTH
    await draining
    assert frontend.server.serving.num_calls == 0


async def test_one_that_takes_too_long_is_refused_as_a_new_one_is(frontend: Running, slow: SlowChecks) -> None:
    over_http, over_grpc = asyncio.create_task(frontend.post("/v1/completions", CONSTRAINED)), generate(frontend)
    await until(lambda: slow.is_asked)
    asked = asyncio.create_task(over_grpc)
    await until(lambda: frontend.server.serving.num_calls == 2)
    await frontend.server.drain(0.05)
    answer = await over_http
    assert answer.status_code == 503
    assert "shutting down" in answer.json()["error"]["message"]
    assert answer.headers["retry-after"] == "1"
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await asked
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_so_is_one_whose_body_does_not_come(frontend: Running) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", frontend.server.port)
    head = (
        b"POST /v1/completions HTTP/1.1\r\nhost: [::1]\r\ncontent-type:application/json\r\ncontent-length: 99\r\n\r\n{"
    )
    writer.write(head)
    await until(lambda: frontend.server.serving.num_calls == 1)
    await frontend.server.drain(0.05)
    answer = (await reader.read()).decode()
    writer.close()
    assert answer.startswith("HTTP/1.1 503 "), answer
    assert "the frontend is shutting down" in answer


async def test_one_that_waits_for_a_lost_engine_is_told_when_the_wait_is_over(frontend: Running) -> None:
    frontend.fake.set_ready(False, "the worker is lost")
    await until(lambda: not frontend.server.engine.is_ready)
    asked = asyncio.create_task(frontend.post("/v1/completions", {"model": MODEL, "prompt": [5]}))
    await until(lambda: frontend.server.serving.num_open == 1)
    await frontend.server.drain(0.05)
    answer = await asked
    assert answer.status_code == 503
    assert "shutting down" in answer.json()["error"]["message"]


async def test_nothing_is_waited_for_when_nothing_is_under_way(frontend: Running) -> None:
    await frontend.complete(max_tokens=2)
    assert frontend.server.serving.is_idle
    async with asyncio.timeout(240):
        await frontend.server.drain(3600)
    with pytest.raises(httpx.ConnectError):
        await frontend.http.get("/health")
