"""Requests that another client had open: what has ended needs no engine; who read it before gets an error."""

import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from pagoda_common.engine import client as engine_client
from pagoda_common.engine.client import EngineClient, EngineRequest
from pagoda_common.engine.stream import AdoptedRequest, AdoptedSequence
from pagoda_common.errors import Superseded
from pagoda_common.params.sampling_params import SamplingParams
from tests.fakes.fake_scheduler import FakeScheduler, serve_fake_scheduler


def adopting(sequence: AdoptedSequence) -> EngineRequest:
    adopted = AdoptedRequest(
        request_id="a",
        attempt=3,
        prompt_token_ids=[1, 2, 3],
        seed=9,
        arrival_time_ns=time.time_ns(),
        timeout_s=0.0,
        sequences=[sequence],
        note=b"",
    )
    params = SamplingParams(max_tokens=4, seed=9)
    return EngineRequest(request_id="a", prompt_token_ids=[1, 2, 3], sampling_params=params, adopted=adopted)


@pytest.fixture
def fake() -> FakeScheduler:
    return FakeScheduler()


@pytest_asyncio.fixture
async def client(fake: FakeScheduler) -> AsyncIterator[EngineClient]:
    async with serve_fake_scheduler(fake) as address:
        client = EngineClient(address=address)
        await client.start()
        await client.wait_until_ready(240)
        yield client
        await client.close()


async def test_one_that_has_ended_is_read_without_the_engine(fake: FakeScheduler, client: EngineClient) -> None:
    stream = client.submit(adopting(AdoptedSequence(token_ids=[7, 8], finish_reason="stop", stop_token_id=8)))
    assert client.num_open_requests == 0
    (output,) = await stream.get()
    assert (output.token_ids, output.finish_reason, output.stop_token_id) == ([7, 8], "stop", 8)
    assert stream.is_finished
    plain = EngineRequest(request_id="b", prompt_token_ids=[1], sampling_params=SamplingParams(max_tokens=1))
    await client.submit(plain).get()
    assert [submit.request_id for submit in fake.submits] == ["b"]


async def test_who_reads_one_that_is_adopted_elsewhere_is_told(fake: FakeScheduler, client: EngineClient) -> None:
    fake.step_s = 0.01
    params = SamplingParams(max_tokens=4, seed=9)
    request = EngineRequest(request_id="a", prompt_token_ids=[1, 2, 3], sampling_params=params, resume_key="k")
    old = client.submit(request)
    client.submit(adopting(AdoptedSequence(token_ids=[])))
    assert old.is_done, "it has heard of it"
    with pytest.raises(Superseded, match="request a continues elsewhere"):
        await old.get()
    assert client.num_open_requests == 1


async def test_closing_ends_the_connection_to_every_address(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []

    class Noting(engine_client.Connection):
        def __init__(self, address: str, **more: Any) -> None:
            super().__init__(address, **more)

        async def close(self) -> None:
            closed.append(self.address)
            await super().close()

    monkeypatch.setattr(engine_client, "Connection", Noting)
    client = EngineClient(address="127.0.0.1:1, 127.0.0.1:2")
    await client.close()
    assert sorted(closed) == ["127.0.0.1:1", "127.0.0.1:2"]
