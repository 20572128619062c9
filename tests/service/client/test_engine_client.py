"""EngineClient against a scheduler that drops, repeats and leaves out: the tokens are the same."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable

import pytest
import pytest_asyncio

from pagoda_common.engine.client import EngineClient, EngineRequest, EngineStream
from pagoda_common.errors import InvalidRequest, NotReady, PagodaError, QueueFull
from pagoda_common.params.outputs import EngineOutput
from pagoda_common.params.sampling_params import SamplingParams
from tests.fakes.fake_scheduler import FakeScheduler, serve_fake_scheduler

PROMPT = [10, 20, 30]


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
    assert fake.errors == []


def request(request_id: str = "a", **params: object) -> EngineRequest:
    options = {"max_tokens": 20, **params}
    return EngineRequest(request_id=request_id, prompt_token_ids=PROMPT, sampling_params=SamplingParams(**options))


async def collect(stream: EngineStream) -> dict[int, EngineOutput]:
    """All outputs of each sequence as one; fails on a token that is not at its place."""
    whole: dict[int, EngineOutput] = {}
    while not stream.is_finished:
        for output in await stream.get():
            known = whole.setdefault(output.index, EngineOutput(index=output.index, offset=0, token_ids=[]))
            assert output.offset == len(known.token_ids)
            assert known.finish_reason is None
            known.token_ids += output.token_ids
            if output.logprobs is not None:
                known.logprobs = [*(known.logprobs or []), *output.logprobs]
            known.finish_reason, known.stop_token_id = output.finish_reason, output.stop_token_id
            known.num_cached_tokens, known.error = output.num_cached_tokens, output.error
    return whole


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(240):
        while not condition():  # noqa: ASYNC110 (the fake has no events)
            await asyncio.sleep(0.002)


async def test_tokens_arrive_in_order_with_their_end(fake: FakeScheduler, client: EngineClient) -> None:
    fake.num_cached_tokens = 2
    output = (await collect(client.submit(request())))[0]
    assert output.token_ids == fake.tokens(PROMPT, 20)
    assert output.finish_reason == "length"
    assert output.num_cached_tokens == 2
    assert client.num_open_requests == 0


async def test_load_and_model_are_known(fake: FakeScheduler, client: EngineClient) -> None:
    assert client.is_ready
    assert client.not_ready_reason == ""
    assert client.model_info is not None
    assert client.model_info.vocab_size == 3072
    fake.set_ready(False, "no worker")
    await eventually(lambda: not client.is_ready)
    assert client.not_ready_reason == "no worker"
    with pytest.raises(NotReady, match="no worker"):
        await client.wait_until_ready(0.01)


async def test_several_sequences_share_a_request(fake: FakeScheduler, client: EngineClient) -> None:
    outputs = await collect(client.submit(request(n=3)))
    assert {index: output.token_ids for index, output in outputs.items()} == {
        index: fake.tokens(PROMPT, 20, index) for index in range(3)
    }


async def test_a_stop_token_is_reported(fake: FakeScheduler, client: EngineClient) -> None:
    stop = fake.token(PROMPT, 4)
    output = (await collect(client.submit(request(stop_token_ids=[stop]))))[0]
    assert (output.finish_reason, output.stop_token_id, len(output.token_ids)) == ("stop", stop, 5)


@pytest.mark.parametrize("tokens_per_step", [1, 3])
async def test_logprobs_stand_beside_their_tokens(
    fake: FakeScheduler, client: EngineClient, tokens_per_step: int
) -> None:
    fake.tokens_per_step = tokens_per_step
    plain, with_logprobs = client.submit(request("a")), client.submit(request("b", logprobs=2))
    assert (await collect(plain))[0].logprobs is None
    output = (await collect(with_logprobs))[0]
    assert output.logprobs is not None
    assert [entry.token_ids[0] for entry in output.logprobs] == output.token_ids
    assert list(output.logprobs[0].logprobs) == [-0.5, -0.5, -1.5]
    assert output.logprobs[0].sampled_rank == 1


async def test_a_seed_is_drawn_once_and_sent_again(fake: FakeScheduler, client: EngineClient) -> None:
    fake.step_s, fake.drop_after = 0.001, 3
    params = SamplingParams(max_tokens=20)
    await collect(client.submit(EngineRequest(request_id="a", prompt_token_ids=PROMPT, sampling_params=params)))
    seeds = {submit.sampling_params.seed for submit in fake.submits}
    assert len(fake.submits) == 2
    assert len(seeds) == 1
    assert params.seed is None


@pytest.mark.parametrize("tokens_per_step", [1, 4])
async def test_a_broken_stream_is_only_a_pause(fake: FakeScheduler, client: EngineClient, tokens_per_step: int) -> None:
    fake.step_s, fake.tokens_per_step, fake.drop_after = 0.001, tokens_per_step, 2
    streams = [client.submit(request(f"r{i}", n=2, logprobs=1)) for i in range(3)]
    results = await asyncio.gather(*map(collect, streams))
    for result in results:
        assert {index: output.token_ids for index, output in result.items()} == {
            0: fake.tokens(PROMPT, 20),
            1: fake.tokens(PROMPT, 20, 1),
        }
        assert [len(output.logprobs or ()) for output in result.values()] == [20, 20]
    assert [submit.attempt for submit in fake.submits] == [1, 1, 1, 2, 2, 2]
    assert len(fake.hellos) == 2
    assert len({hello.frontend_id for hello in fake.hellos}) == 1


async def test_a_restarted_scheduler_gets_the_open_requests(fake: FakeScheduler) -> None:
    fake.step_s = 0.002
    async with serve_fake_scheduler(fake) as address:
        client = EngineClient(address=address)
        await client.start()
        await client.wait_until_ready(240)
        stream = client.submit(request(max_tokens=100))
        first = await stream.get()
    assert not stream.is_finished
    await eventually(lambda: not client.is_ready)
    assert "no connection" in client.not_ready_reason
    late = client.submit(request("late"))  # taken along with the others
    successor = FakeScheduler()
    successor.epoch = 2
    async with serve_fake_scheduler(successor, port=int(address.rpartition(":")[2])):
        rest: list[int] = []
        while not stream.is_finished:
            rest += [token for output in await stream.get() for token in output.token_ids]
        assert [token for output in first for token in output.token_ids] + rest == fake.tokens(PROMPT, 100)
        assert (await collect(late))[0].token_ids == fake.tokens(PROMPT, 20)
        await client.close()


@pytest.mark.parametrize("seed", range(5))
async def test_any_mix_of_faults_gives_the_same_tokens(
    fake: FakeScheduler, client: EngineClient, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagoda_common.engine.client.MAX_BACKOFF_S", 0.01)
    draw = random.Random(seed)
    fake.step_s = 0.001

    async def misbehave() -> None:
        for _ in range(20):
            await asyncio.sleep(draw.uniform(0.005, 0.03))
            fake.is_duplicating = draw.random() < 0.5
            fake.tokens_per_step = draw.randint(1, 3)
            match draw.randrange(4):
                case 0:
                    fake.gap_at = draw.randrange(200)
                case 1:
                    fake.drop_after = 3
                case 2:
                    fake.restart()

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(misbehave())
        streams = [client.submit(request(f"r{i}", n=1 + i % 3, max_tokens=200, ignore_eos=True)) for i in range(6)]
        results = await asyncio.gather(*map(collect, streams))
    for result in results:
        for index, output in result.items():
            assert output.token_ids == fake.tokens(PROMPT, 200, index)
            assert output.finish_reason == "length"
    assert len(fake.hellos) > 1


async def test_repeated_tokens_are_dropped(fake: FakeScheduler, client: EngineClient) -> None:
    fake.is_duplicating = True
    output = (await collect(client.submit(request(logprobs=0))))[0]
    assert output.token_ids == fake.tokens(PROMPT, 20)
    assert len(output.logprobs or ()) == 20
    assert len(fake.submits) == 1


@pytest.mark.parametrize("gap_at", [0, 7, 19])
async def test_a_gap_is_asked_for_again(fake: FakeScheduler, client: EngineClient, gap_at: int) -> None:
    fake.gap_at, fake.step_s = gap_at, 0.001
    output = (await collect(client.submit(request())))[0]
    assert output.token_ids == fake.tokens(PROMPT, 20)
    assert output.finish_reason == "length"
    assert [submit.attempt for submit in fake.submits] == [1, 2]
    assert not set(fake.submits[0].slots) & set(fake.submits[1].slots) or gap_at == 19


async def test_messages_of_an_older_scheduler_are_ignored(fake: FakeScheduler, client: EngineClient) -> None:
    fake.is_paused = True
    stream = client.submit(request())
    await eventually(lambda: fake.num_open_sequences == 1)
    fake.epoch, fake.is_paused = 0, False
    await eventually(lambda: fake.num_open_sequences == 0)
    fake.epoch = 1
    fake.restart()
    assert (await collect(stream))[0].token_ids == fake.tokens(PROMPT, 20)
    assert fake.submits[1].resume.sequences[0].output_token_ids == b""


async def test_a_rejected_request_raises(fake: FakeScheduler, client: EngineClient) -> None:
    fake.reject["a"] = InvalidRequest("logprobs is 30, max_logprobs is 20", field="logprobs")
    stream = client.submit(request())
    with pytest.raises(InvalidRequest, match="max_logprobs is 20") as caught:
        await stream.get()
    assert caught.value.field == "logprobs"
    assert stream.is_finished
    assert client.num_open_requests == 0


async def test_a_full_queue_is_hidden_from_a_request_that_was_running(
    fake: FakeScheduler, client: EngineClient
) -> None:
    fake.step_s = 0.002
    stream = client.submit(request())
    await stream.get()
    fake.reject["*"] = QueueFull("full", retry_after_s=0.05)
    fake.restart()
    await eventually(lambda: len(fake.submits) == 2)
    fake.reject.clear()
    tokens: list[int] = []
    while not stream.is_finished:
        tokens += [token for output in await stream.get() for token in output.token_ids]
    assert tokens[-1] == fake.token(PROMPT, 19)


async def test_a_failed_sequence_ends_with_its_error(fake: FakeScheduler, client: EngineClient) -> None:
    fake.fail_at["a"] = 3
    output = (await collect(client.submit(request())))[0]
    assert output.finish_reason == "error"
    assert isinstance(output.error, PagodaError)
    assert len(output.token_ids) == 3


async def test_an_abort_ends_the_stream_at_once(fake: FakeScheduler, client: EngineClient) -> None:
    fake.step_s = 0.002
    stream = client.submit(request(max_tokens=400, n=2))
    await stream.get()
    client.abort("a")
    outputs = await stream.get()
    assert {output.finish_reason for output in outputs} == {"abort"}
    assert stream.is_finished
    await eventually(lambda: fake.aborted == ["a"])
    client.abort("a")
    client.abort("unknown")
    assert (await collect(client.submit(request("b"))))[0].token_ids == fake.tokens(PROMPT, 20)
    assert fake.aborted == ["a"]


async def test_a_stopped_sequence_leaves_the_others_alone(fake: FakeScheduler, client: EngineClient) -> None:
    fake.step_s = 0.002
    stream = client.submit(request(n=2, max_tokens=60))
    await stream.get()
    stream.stop(0)
    outputs = await collect_rest(stream)
    assert set(outputs) == {1}
    assert outputs[1][-1] == fake.token(PROMPT, 59, 1)
    assert fake.stopped == [("a", 0)]
    assert fake.aborted == []


async def collect_rest(stream: EngineStream) -> dict[int, list[int]]:
    tokens: dict[int, list[int]] = {}
    while not stream.is_finished:
        for output in await stream.get():
            tokens.setdefault(output.index, []).extend(output.token_ids)
    return tokens


async def test_requests_that_wait_together_travel_together(fake: FakeScheduler, client: EngineClient) -> None:
    streams = [client.submit(request(f"r{i}")) for i in range(100)]
    await asyncio.gather(*map(collect, streams))
    assert sum(fake.batch_sizes) >= 98
    assert len(fake.batch_sizes) <= 3


async def test_slots_are_used_again_after_the_end(fake: FakeScheduler, client: EngineClient) -> None:
    for i in range(5):
        await collect(client.submit(request(f"r{i}", n=2)))
    assert {slot for submit in fake.submits for slot in submit.slots} == {0, 1}


async def test_a_request_id_is_open_once(fake: FakeScheduler, client: EngineClient) -> None:
    fake.is_paused = True
    client.submit(request())
    with pytest.raises(InvalidRequest, match="in use"):
        client.submit(request())


async def test_without_a_scheduler_nothing_is_accepted() -> None:
    client = EngineClient(address="127.0.0.1:1")
    await client.start()
    with pytest.raises(NotReady, match=r"127\.0\.0\.1:1"):
        await client.wait_until_ready(0.2)
    with pytest.raises(NotReady):
        client.submit(request())
    await client.close()


async def test_closing_fails_what_is_open(fake: FakeScheduler, client: EngineClient) -> None:
    fake.is_paused = True
    stream = client.submit(request())
    await client.close()
    with pytest.raises(NotReady):
        await stream.get()


async def test_a_closed_client_takes_nothing_and_nobody_waits_for_it(client: EngineClient) -> None:
    await client.close("enough")
    for refused in (client.wait_until_ready(), client.wait_until_ready(60)):
        with pytest.raises(NotReady, match="enough"):
            await refused
    with pytest.raises(NotReady, match="enough"):
        client.submit(request())


async def test_those_who_wait_are_told_that_it_was_closed() -> None:
    client = EngineClient(address="127.0.0.1:1")
    await client.start()
    waiting = asyncio.create_task(client.wait_until_ready())
    await asyncio.sleep(0)
    await client.close("enough")
    with pytest.raises(NotReady, match="enough"):
        await waiting


async def test_a_client_that_is_started_again_serves(client: EngineClient) -> None:
    await client.close()
    await client.start()
    await client.wait_until_ready(240)
    assert len((await collect(client.submit(request())))[0].token_ids) == 20
