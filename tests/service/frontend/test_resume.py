"""A frontend is gone in the middle of a stream: another one of the same scheduler goes on, with nothing lost."""

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from pagoda.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from pagoda_common.config import CacheConfig, EngineConfig, SchedulerConfig
from tests.fakes.fake_scheduler import FakeScheduler
from tests.fakes.fake_worker import FakeWorker
from tests.harness.scheduler import RunningScheduler, running_scheduler
from tests.service.frontend.harness import Running, frontend_at, until

NUM_TOKENS = 60
PARAMS = types_pb2.SamplingParams(max_tokens=NUM_TOKENS, n=2, ignore_eos=True, seed=4)


@pytest.fixture
async def scheduler() -> AsyncIterator[RunningScheduler]:
    config = EngineConfig(cache=CacheConfig(block_size=4), scheduler=SchedulerConfig(orphan_lease_s=20.0))
    async with running_scheduler(config) as running:
        worker = FakeWorker(vocab_size=3072)
        worker.delay_s = 0.003
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
    await frontend.server.serving.engine.close()


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
    frontends: tuple[Running, Running], scheduler: RunningScheduler, method: str
) -> None:
    one, two = frontends
    undisturbed = RpcReader(method, RPCS[method])
    await undisturbed.read(two)
    reader = RpcReader(method, RPCS[method])
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await reader.read(one, until_tokens=10)
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
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
