"""A frontend that stops reading: its requests wait for it, others run, and it continues without a gap."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import numpy as np
import pytest

from pagoda.v1 import scheduler_pb2, scheduler_pb2_grpc, types_pb2
from pagoda_common.engine.client import EngineClient, EngineRequest
from pagoda_common.engine.convert import token_ids_to_bytes
from pagoda_common.params.sampling_params import SamplingParams
from pagoda_scheduler.rpc import outbox
from tests.fakes.fake_worker import FakeWorker
from tests.harness.scheduler import RunningScheduler
from tests.service.scheduler.test_faults import generate

NUM_TOKENS = 1500
NUM_REQUESTS = 8
"""All slots of the worker."""
SMALL_WINDOW = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]
"""The connection takes little that no one reads."""


@pytest.fixture
async def worker(scheduler: RunningScheduler) -> AsyncIterator[FakeWorker]:
    worker = FakeWorker()
    await worker.start(scheduler.address)
    await scheduler.until_ready()
    yield worker
    await worker.stop()


class Frontend:
    """A session in raw messages, which reads only when it is told to."""

    def __init__(self, scheduler: RunningScheduler, *, acknowledges: bool = True, every: int = 0) -> None:
        self._channel = grpc.aio.insecure_channel(scheduler.address, options=SMALL_WINDOW)
        self._call = scheduler_pb2_grpc.SchedulerStub(self._channel).Session()
        self._hello = scheduler_pb2.FrontendHello(frontend_id="slow", acknowledges=acknowledges)
        self._hello.acknowledges_every = every
        self.num_taken = 0
        self.tokens: dict[int, list[int]] = {}
        self.num_finished = 0

    async def submit(self) -> None:
        """As many requests as the worker has slots."""
        await self._call.write(scheduler_pb2.FrontendMessage(hello=self._hello))
        for number in range(NUM_REQUESTS):
            params = types_pb2.SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
            prompt = token_ids_to_bytes([10_000 * (number + 1)])
            submit = scheduler_pb2.SubmitRequest(
                request_id=f"slow-{number}", attempt=1, slots=[number], prompt_token_ids=prompt, sampling_params=params
            )
            await self._call.write(scheduler_pb2.FrontendMessage(submit=submit))
            self.tokens[number] = []

    async def read(self) -> None:
        """Take one message; tokens must be the next ones."""
        message: Any = await self._call.read()
        self.num_taken += 1
        columns = [np.frombuffer(part, "<u4").tolist() for part in (message.slots, message.offsets, message.token_ids)]
        for slot, offset, token in zip(*columns, strict=True):
            assert offset == len(self.tokens[slot])
            self.tokens[slot].append(token)
        self.num_finished += len(message.finished)

    async def read_all(self, *, acknowledge_every: int = 0) -> None:
        """Take messages until every request has ended."""
        while self.num_finished < NUM_REQUESTS:
            await self.read()
            if acknowledge_every and self.num_taken % acknowledge_every == 0:
                await self.acknowledge()

    async def acknowledge(self) -> None:
        """Say what was taken."""
        taken = scheduler_pb2.Acknowledgement(num_messages=self.num_taken)
        await self._call.write(scheduler_pb2.FrontendMessage(acknowledgement=taken))

    def check(self) -> None:
        """Every token has come."""
        assert self.tokens == {
            number: list(range(10_000 * (number + 1) + 1, 10_000 * (number + 1) + 1 + NUM_TOKENS))
            for number in range(NUM_REQUESTS)
        }

    async def close(self) -> None:
        await self._channel.close()


def parked(scheduler: RunningScheduler) -> int:
    return sum(len(core.scheduler.parked) for core in scheduler.engine.cores)


async def test_the_requests_of_a_frontend_that_does_not_acknowledge_wait_and_others_run(
    scheduler: RunningScheduler, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox, "MAX_UNTAKEN", 50)
    frontend = Frontend(scheduler)
    await frontend.submit()
    await scheduler.until(lambda: parked(scheduler) == NUM_REQUESTS)
    load = scheduler.engine.load()
    assert (load.num_running_reqs, load.num_waiting_reqs, load.num_used_blocks) == (0, NUM_REQUESTS, 0)
    assert await asyncio.wait_for(generate(scheduler, "other", [5], 30), 240) == list(range(6, 36))
    undelivered = [
        len(open_request.sequences[0].output_token_ids) for open_request in scheduler.engine.requests.values()
    ]
    assert max(undelivered) <= 60
    await asyncio.wait_for(frontend.read_all(acknowledge_every=7), 240)
    frontend.check()
    await frontend.close()


async def test_steps_for_a_frontend_that_is_behind_are_joined_and_no_token_is_lost(
    scheduler: RunningScheduler, worker: FakeWorker
) -> None:
    frontend = Frontend(scheduler, every=8)
    await frontend.submit()
    await scheduler.until(lambda: parked(scheduler) == NUM_REQUESTS)
    await asyncio.wait_for(frontend.read_all(acknowledge_every=8), 240)
    frontend.check()
    assert frontend.num_taken < NUM_TOKENS, "a message each would have been more"
    await frontend.close()


async def test_a_frontend_of_the_previous_version_is_parked_by_what_its_connection_does_not_take(
    scheduler: RunningScheduler, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox, "MAX_UNTAKEN", 50)
    frontend = Frontend(scheduler, acknowledges=False)
    await frontend.submit()
    await scheduler.until(lambda: parked(scheduler) == NUM_REQUESTS)
    assert await asyncio.wait_for(generate(scheduler, "other", [5], 30), 240) == list(range(6, 36))
    await asyncio.wait_for(frontend.read_all(), 240)
    frontend.check()
    await frontend.close()


async def test_parked_requests_outlive_their_worker_and_end_with_their_frontend(
    scheduler: RunningScheduler, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox, "MAX_UNTAKEN", 50)
    frontend = Frontend(scheduler)
    await frontend.submit()
    await scheduler.until(lambda: parked(scheduler) == NUM_REQUESTS)
    core = scheduler.engine.cores[0]
    worker.fail_at_step = 1
    assert await asyncio.wait_for(generate(scheduler, "other", [5], 30), 240) == list(range(6, 36))
    assert scheduler.engine.cores != [core]
    assert parked(scheduler) == NUM_REQUESTS
    await scheduler.stub.Abort(scheduler_pb2.AbortRequest(request_ids=["slow-3"]))
    assert parked(scheduler) == NUM_REQUESTS - 1
    await frontend.close()
    await scheduler.until(lambda: not scheduler.engine.requests)
    assert (parked(scheduler), scheduler.engine.load().num_used_blocks) == (0, 0)


async def test_news_that_a_parked_frontend_has_missed_reach_it_when_it_reads(
    scheduler: RunningScheduler, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox, "MAX_UNTAKEN", 50)
    frontend = Frontend(scheduler)
    await frontend.submit()
    await scheduler.until(lambda: parked(scheduler) == NUM_REQUESTS)
    sink = next(iter(scheduler.engine.sinks))
    num_messages = len(sink.outbox._untaken)  # type: ignore[attr-defined]
    for _ in range(100):
        scheduler.engine._readers.announce_now()
    assert len(sink.outbox._untaken) == num_messages  # type: ignore[attr-defined]
    await asyncio.wait_for(frontend.read_all(acknowledge_every=7), 240)
    frontend.check()
    await frontend.close()


async def test_todays_frontend_acknowledges_and_is_never_parked(
    scheduler: RunningScheduler, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox, "MAX_UNTAKEN", 400)
    client = EngineClient(address=scheduler.address)
    await client.start()
    await client.wait_until_ready(240)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    stream = client.submit(EngineRequest(request_id="a", prompt_token_ids=[7], sampling_params=params))
    tokens: list[int] = []
    async with asyncio.timeout(240):
        while not stream.is_finished:
            for output in await stream.get():
                tokens += output.token_ids
    assert tokens == list(range(8, 8 + NUM_TOKENS))
    sink = next(iter(scheduler.engine.sinks))
    assert sink.outbox.is_acknowledged  # type: ignore[attr-defined]
    await scheduler.until(lambda: not sink.outbox._untaken)  # type: ignore[attr-defined]  # the last ones as well
    await client.close()
