"""A frontend is gone in the middle of a stream: another one of the same scheduler goes on, with nothing lost."""

from collections.abc import AsyncIterator
from typing import Any

import grpc
import orjson
import pytest

from pagoda.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from pagoda_common.config.engine_config import CacheConfig, EngineConfig, SchedulerConfig
from tests.fakes.fake_scheduler import FakeScheduler
from tests.fakes.fake_worker import FakeWorker
from tests.harness.scheduler import RunningScheduler, running_scheduler
from tests.service.frontend.harness import Running, frontend_at, until

NUM_TOKENS = 60
PARAMS = types_pb2.SamplingParams(max_tokens=NUM_TOKENS, n=2, ignore_eos=True, seed=4)


FAST_S = 0.002
SLOW_S = 0.02
"""A step while a stream is to be cut: no client lags so many steps behind that nothing is left to cut."""


@pytest.fixture
async def worker() -> FakeWorker:
    worker = FakeWorker(vocab_size=3072)
    worker.delay_s = FAST_S
    return worker


@pytest.fixture
async def scheduler(worker: FakeWorker) -> AsyncIterator[RunningScheduler]:
    config = EngineConfig(cache=CacheConfig(block_size=4), scheduler=SchedulerConfig(orphan_lease_s=20.0))
    async with running_scheduler(config) as running:
        await worker.start(running.address)
        await running.until_ready()
        yield running
        await worker.stop()


@pytest.fixture
async def frontends(scheduler: RunningScheduler) -> AsyncIterator[tuple[Running, Running]]:
    fake = FakeScheduler()
    async with frontend_at(scheduler.address, fake) as one, frontend_at(scheduler.address, fake) as two:
        for frontend in (one, two):
            await until(lambda frontend=frontend: frontend.server.serving.is_ready)
        yield one, two


async def lose(frontend: Running) -> None:
    """As good as dead: it says no more to the scheduler."""
    await frontend.server.engine.close()


class RpcReader:
    """Reads a stream over gRPC, and remembers where it is."""

    def __init__(self, method: str, request: Any) -> None:
        self._method = method
        self._request = request
        self.request_id = ""
        self.num_tokens = [0, 0]
        self.texts = ["", ""]
        self.ends: list[int] = []

    async def read(self, frontend: Running, *, until_tokens: int | None = None) -> None:
        call = getattr(inference_pb2_grpc.InferenceStub(frontend.channel), self._method)(self._next_request())
        async for response in call:
            index = response.index
            self.request_id = response.request_id
            if response.token_ids:
                assert response.offset == self.num_tokens[index]
            self.num_tokens[index] += len(response.token_ids)
            self.texts[index] += response.text if self._method == "Generate" else response.content
            if response.finish_reason:
                self.ends.append(index)
                assert response.usage.num_output_tokens == self.num_tokens[index]
            if until_tokens is not None and self.num_tokens[0] >= until_tokens:
                await lose(frontend)
                until_tokens = None

    def _next_request(self) -> Any:
        if not self.request_id:
            return self._request
        received = [
            inference_pb2.ReceivedSequence(num_tokens=count, is_finished=index in self.ends)
            for index, count in enumerate(self.num_tokens)
        ]
        return type(self._request)(resume_from=inference_pb2.ResumeFrom(request_id=self.request_id, received=received))


RPCS = {
    "Generate": inference_pb2.GenerateRequest(text="Once upon a time", sampling_params=PARAMS),
    "Chat": inference_pb2.ChatRequest(
        messages=[inference_pb2.ChatMessage(role="user", content="hi")], sampling_params=PARAMS
    ),
}


@pytest.mark.parametrize("method", RPCS)
async def test_a_stream_over_grpc_goes_on(
    frontends: tuple[Running, Running], scheduler: RunningScheduler, worker: FakeWorker, method: str
) -> None:
    one, two = frontends
    undisturbed = RpcReader(method, RPCS[method])
    await undisturbed.read(two)
    worker.delay_s = SLOW_S
    reader = RpcReader(method, RPCS[method])
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await reader.read(one, until_tokens=10)
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
    worker.delay_s = FAST_S
    assert reader.num_tokens[0] < NUM_TOKENS
    await reader.read(two)
    assert reader.texts == undisturbed.texts
    assert reader.num_tokens == [NUM_TOKENS] * 2
    assert sorted(reader.ends) == [0, 1]
    await scheduler.until(lambda: not scheduler.engine.requests)  # nothing is kept for anyone


async def test_a_place_that_leads_nowhere_is_an_error_that_names_it(frontends: tuple[Running, Running]) -> None:
    one, two = frontends
    stub = inference_pb2_grpc.InferenceStub(two.channel)
    call = inference_pb2_grpc.InferenceStub(one.channel).Generate(RPCS["Generate"])
    request_id = (await call.read()).request_id
    received = [inference_pb2.ReceivedSequence()] * 2
    place = inference_pb2.ResumeFrom(request_id=request_id, received=received)
    short = inference_pb2.ResumeFrom(request_id=request_id, received=received[:1])
    unknown = inference_pb2.ResumeFrom(request_id="unknown", received=received)
    not_found, invalid = grpc.StatusCode.NOT_FOUND, grpc.StatusCode.INVALID_ARGUMENT
    for method, asked, metadata, code in (
        (stub.Generate, unknown, (), not_found),
        (stub.Generate, short, (), not_found),
        (stub.Generate, place, (("x-tenant-id", "another"),), not_found),
        (stub.Chat, place, (), invalid),
        (stub.GenerateUnary, place, (), invalid),
    ):
        kind = inference_pb2.ChatRequest if method is stub.Chat else inference_pb2.GenerateRequest
        call_again = method(kind(resume_from=asked), metadata=metadata)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await (call_again if method is stub.GenerateUnary else call_again.read())
        assert caught.value.code() == code, asked
        assert "resume_from" in str(caught.value.details())
    call.cancel()


class HttpReader:
    """Reads events over HTTP, and remembers the id of the last one that had one; those after it are taken back."""

    def __init__(self, path: str, body: dict[str, Any]) -> None:
        self.path = path
        self._body = body
        self.last_id = ""
        self.events: list[dict[str, Any]] = []
        self._num_sure = 0

    async def read(self, frontend: Running, *, until_events: int | None = None, method: str = "POST") -> None:
        headers = {"Last-Event-ID": self.last_id} if self.last_id else {}
        body = {} if method == "GET" else {"json": self._body}
        event_id = ""
        async with frontend.http.stream(method, self.path, headers=headers, **body) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                if line.startswith("id: "):
                    event_id = line.removeprefix("id: ")
                elif line.startswith("data: ") and not line.endswith("[DONE]"):
                    self.events.append(orjson.loads(line.removeprefix("data: ")))
                    if event_id:
                        self.last_id, event_id, self._num_sure = event_id, "", len(self.events)
                if until_events is not None and self._num_sure >= until_events:
                    await lose(frontend)
                    until_events = None

    def forget_the_unsure(self) -> None:
        """The connection is broken: what came after the last id comes again."""
        del self.events[self._num_sure :]


def texts(events: list[dict[str, Any]]) -> list[str]:
    """The text of each choice that events of any API bring."""
    found: dict[int, str] = {}
    for event in events:
        delta = event.get("delta", "")
        for choice in event.get("choices", [{"index": 0, "text": delta}]):
            text = choice["text"]
            text = text if isinstance(text, str) else text.get("text", "")
            found[choice["index"]] = found.get(choice["index"], "") + text
    return [found[index] for index in sorted(found)]


MESSAGES = [{"role": "user", "content": "hi"}]
ASKED = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "seed": 4, "stream": True}
ASKED_RESPONSE = {"input": "hi", "stream": True, "max_output_tokens": NUM_TOKENS, "ignore_eos": True, "seed": 4}
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "messages": ("/v1/messages", {"messages": MESSAGES, **ASKED}),
    "responses": ("/v1/responses", ASKED_RESPONSE),
    "background": ("/v1/responses", {**ASKED_RESPONSE, "background": True}),
    "prompts": ("/v1/completions", {"prompt": ["Once upon", "A dog"], "n": 2, **ASKED}),
}


@pytest.mark.parametrize("name", BODIES)
async def test_a_stream_over_http_goes_on(
    frontends: tuple[Running, Running], scheduler: RunningScheduler, worker: FakeWorker, name: str
) -> None:
    one, two = frontends
    path, body = BODIES[name]
    undisturbed = HttpReader(path, body)
    await undisturbed.read(two)
    reader = HttpReader(path, body)
    worker.delay_s = SLOW_S
    await reader.read(one, until_events=12)
    worker.delay_s = FAST_S
    reader.forget_the_unsure()
    num_before = len(reader.events)
    await reader.read(two)
    assert len(reader.events) > num_before
    assert all(texts(reader.events))
    assert texts(reader.events) == texts(undisturbed.events)
    if name == "messages":
        kinds, expected = (
            [event["type"] for event in one.events if event["type"] != "content_block_delta"]
            for one in (reader, undisturbed)
        )
        assert kinds == expected
        assert reader.events[-2]["usage"]["output_tokens"] == NUM_TOKENS
    elif name != "prompts":
        assert [event["sequence_number"] for event in reader.events] == list(range(len(reader.events)))
        response, first = reader.events[-1]["response"], reader.events[0]["response"]
        assert response["status"] == "incomplete"
        assert (response["id"], response["created_at"]) == (first["id"], first["created_at"])
        assert [response["output"][0]["content"][0]["text"]] == texts(reader.events)
        assert {e["item_id"] for e in reader.events if "item_id" in e} == {response["output"][0]["id"]}
        kept = await two.http.get(f"/v1/responses/{response['id']}")
        assert kept.json()["output"] == response["output"]
        items = await two.http.get(f"/v1/responses/{response['id']}/input_items")
        assert items.json()["data"][0]["content"] == [{"type": "input_text", "text": "hi"}]
    await scheduler.until(lambda: not scheduler.engine.requests)


@pytest.mark.parametrize("num_known", [0, 1, 2])
async def test_a_stream_resumes_after_exactly_the_tokens_that_the_client_has(
    frontends: tuple[Running, Running], worker: FakeWorker, num_known: int
) -> None:
    one, two = frontends
    body = {"prompt": "Once upon", "return_token_ids": True, **ASKED}

    def token_ids(reader: HttpReader) -> list[int]:
        return [token for event in reader.events for token in event["choices"][0]["token_ids"] or ()]

    undisturbed = HttpReader("/v1/completions", body)
    await undisturbed.read(two)
    worker.delay_s = SLOW_S
    first = HttpReader("/v1/completions", body)
    await first.read(one, until_events=3)
    worker.delay_s = FAST_S
    resumed = HttpReader("/v1/completions", body)
    resumed.last_id = f"{first.last_id.rpartition(':')[0]}:{num_known}"
    await resumed.read(two)
    assert len(token_ids(undisturbed)) == NUM_TOKENS
    assert token_ids(resumed) == token_ids(undisturbed)[num_known:]


async def test_a_background_response_is_followed_at_another_frontend(
    frontends: tuple[Running, Running], worker: FakeWorker
) -> None:
    one, two = frontends
    reader = HttpReader(*BODIES["background"])
    worker.delay_s = SLOW_S
    await reader.read(one, until_events=8)
    worker.delay_s = FAST_S
    reader.forget_the_unsure()
    response_id, num_before = reader.events[0]["response"]["id"], len(reader.events)
    unknown = await two.http.get(f"/v1/responses/{response_id}?stream=true&starting_after=3")
    assert unknown.status_code == 404
    assert "this frontend" in unknown.json()["error"]["message"]
    reader.path = f"/v1/responses/{response_id}?stream=true"
    await reader.read(two, method="GET")
    assert [event["sequence_number"] for event in reader.events] == list(range(len(reader.events)))
    again = HttpReader(f"/v1/responses/{response_id}?stream=true&starting_after={num_before}", {})
    await again.read(two, method="GET")
    assert again.events == reader.events[num_before + 1 :]
    early = await two.http.get(f"/v1/responses/{response_id}?stream=true&starting_after=1")
    assert early.status_code == 400
    assert early.json()["error"]["param"] == "starting_after"


async def read_all(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


async def test_a_client_whose_connection_hangs_goes_on_at_the_same_frontend(
    frontends: tuple[Running, Running], worker: FakeWorker
) -> None:
    one, _ = frontends
    worker.delay_s = SLOW_S
    first = inference_pb2_grpc.InferenceStub(one.channel).Generate(RPCS["Generate"])
    reader = RpcReader("Generate", RPCS["Generate"])
    reader.request_id = (await first.read()).request_id  # and then it hears nothing more
    await reader.read(one)
    assert reader.num_tokens == [NUM_TOKENS] * 2
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read_all(first)
    assert caught.value.code() == grpc.StatusCode.ABORTED
