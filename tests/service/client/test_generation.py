"""Tokens of a scheduler become text: stop strings end sequences, closing aborts, errors are raised."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest
import pytest_asyncio

from pagoda_common.config.engine_config import EMBEDDED_MODEL
from pagoda_common.engine.client import EngineClient, EngineRequest
from pagoda_common.engine.generation import generate_text
from pagoda_common.errors import PagodaError
from pagoda_common.params.outputs import SequenceDelta
from pagoda_common.params.sampling_params import SamplingParams
from pagoda_common.text.tokenizer import Tokenizer
from tests.fakes.fake_scheduler import FakeScheduler, serve_fake_scheduler

TOKENIZER = Tokenizer.load(EMBEDDED_MODEL)
TEXT = "Once upon a time 👋 there was a house."


@pytest.fixture(params=[1, 4], ids=["one token a step", "four tokens a step"])
def fake(request: pytest.FixtureRequest) -> FakeScheduler:
    fake = FakeScheduler(tokens_per_step=request.param, step_s=0.0005)
    fake.script = TOKENIZER.encode(TEXT)
    return fake


@pytest_asyncio.fixture
async def engine(fake: FakeScheduler) -> AsyncIterator[EngineClient]:
    async with serve_fake_scheduler(fake) as address:
        engine = EngineClient(address=address)
        await engine.start()
        await engine.wait_until_ready(240)
        yield engine
        await engine.close()
    assert fake.errors == []


def request(**params: object) -> EngineRequest:
    options = {"max_tokens": 100, **params}
    return EngineRequest(
        request_id="a", prompt_token_ids=TOKENIZER.encode("Tell:"), sampling_params=SamplingParams(**options)
    )


async def run(engine: EngineClient, request: EngineRequest) -> list[SequenceDelta]:
    return [delta async for deltas in generate_text(engine, TOKENIZER, request) for delta in deltas]


def text_of(deltas: list[SequenceDelta]) -> str:
    return "".join(delta.text for delta in deltas)


async def test_tokens_become_text(fake: FakeScheduler, engine: EngineClient) -> None:
    deltas = await run(engine, request())
    assert text_of(deltas) == TEXT
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", None)
    assert deltas[-1].num_output_tokens == len(fake.script or []) + 1
    assert [token for delta in deltas for token in delta.token_ids] == [*(fake.script or []), 0]


async def test_an_end_token_is_no_text_even_if_special_tokens_are(engine: EngineClient) -> None:
    assert text_of(await run(engine, request(skip_special_tokens=False))) == TEXT
    kept = await run(engine, request(skip_special_tokens=False, include_stop_str_in_output=True))
    assert text_of(kept) == TEXT + "<|endoftext|>"


@pytest.mark.parametrize("include", [False, True])
async def test_a_stop_string_ends_the_sequence(fake: FakeScheduler, engine: EngineClient, include: bool) -> None:
    deltas = await run(engine, request(stop=["👋 th", "zzz"], include_stop_str_in_output=include))
    assert text_of(deltas) == "Once upon a time " + ("👋 th" if include else "")
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", "👋 th")
    ids = [token for delta in deltas for token in delta.token_ids]
    assert "👋 th" in TOKENIZER.decode(ids)
    assert "👋 th" not in TOKENIZER.decode(ids[:-1])
    assert deltas[-1].num_output_tokens == len(ids)
    async with asyncio.timeout(240):
        while fake.num_open_sequences:  # noqa: ASYNC110 (the fake has no events)
            await asyncio.sleep(0.002)
    assert fake.aborted == []


async def test_a_stop_string_is_not_looked_for_before_min_tokens(engine: EngineClient) -> None:
    assert text_of(await run(engine, request(stop=["a"], min_tokens=len(TOKENIZER.encode("Once upon a"))))) == (
        "Once upon a time 👋 there w"
    )


async def test_a_beginning_of_a_stop_string_is_given_out_at_the_end(engine: EngineClient) -> None:
    assert text_of(await run(engine, request(stop=["house. And"]))) == TEXT


async def test_logprobs_know_their_place_in_the_text(fake: FakeScheduler, engine: EngineClient) -> None:
    deltas = await run(engine, request(logprobs=1))
    ids = [token for delta in deltas for token in delta.token_ids]
    offsets = [offset for delta in deltas for offset in delta.token_text_offsets]
    logprobs = [entry for delta in deltas for entry in delta.logprobs or ()]
    assert len(ids) == len(offsets) == len(logprobs)
    assert offsets[:3] == [0, len(TOKENIZER.decode(ids[:1])), len(TOKENIZER.decode(ids[:2]))]
    assert offsets[-1] == len(TEXT)


async def test_without_detokenization_there_is_no_text(engine: EngineClient) -> None:
    deltas = await run(engine, request(detokenize=False))
    assert text_of(deltas) == ""
    assert deltas[-1].num_output_tokens > 5


async def test_closing_the_generator_aborts(fake: FakeScheduler, engine: EngineClient) -> None:
    fake.script = None
    async with aclosing(generate_text(engine, TOKENIZER, request(max_tokens=400))) as stream:
        await anext(stream)
    async with asyncio.timeout(240):
        while not fake.aborted:  # noqa: ASYNC110 (the fake has no events)
            await asyncio.sleep(0.002)
    assert fake.aborted == ["a"]


async def test_a_failed_sequence_raises(fake: FakeScheduler, engine: EngineClient) -> None:
    fake.fail_at["a"] = 2
    with pytest.raises(PagodaError, match="the fake failed this request"):
        await run(engine, request())
    assert engine.num_open_requests == 0


async def test_a_broken_stream_does_not_show_in_the_text(fake: FakeScheduler, engine: EngineClient) -> None:
    fake.drop_after = 2
    assert text_of(await run(engine, request(stop=["was a h"]))) == "Once upon a time 👋 there "
