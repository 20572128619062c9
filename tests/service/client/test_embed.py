"""LLM.embed and AsyncLLM.embed in front of a fake scheduler."""

import asyncio
import io
from typing import Any

import pytest
from tqdm import tqdm

from pagoda import LLM, AsyncLLM, PoolingParams
from pagoda_common.errors import Code, InvalidRequest, PagodaError, QueueFull
from tests.fakes.fake_scheduler import FakeScheduler
from tests.service.client.conftest import FakeSchedulerThread

LONGEST = 512


@pytest.fixture
def fake(scheduler_thread: FakeSchedulerThread) -> FakeScheduler:
    scheduler_thread.fake.submits.clear()
    return scheduler_thread.fake


def embed(llm: LLM, prompts: Any, **options: Any) -> list[list[float]]:
    return [output.outputs.embedding for output in llm.embed(prompts, use_tqdm=False, **options)]


def test_every_form_of_prompt_in_its_order(llm: LLM, fake: FakeScheduler) -> None:
    token_ids = llm.get_tokenizer().encode("Once upon a time")
    expected = [float(len(token_ids)), float(token_ids[-1]), 0.0, 0.0]
    for prompt in ("Once upon a time", token_ids, {"prompt": "Once upon a time"}, {"prompt_token_ids": token_ids}):
        assert embed(llm, prompt) == embed(llm, [prompt]) == [expected]
    outputs = llm.embed([[7] * length for length in range(1, 60)], use_tqdm=False)
    assert [output.outputs.embedding[0] for output in outputs] == list(range(1, 60))
    assert [len(output.prompt_token_ids) for output in outputs] == list(range(1, 60))
    assert len({output.request_id for output in outputs}) == 59
    assert {(output.finished, output.outputs.hidden_size) for output in outputs} == {(True, 4)}
    assert llm.embed([], use_tqdm=False) == []


def test_progress_is_shown_prompt_by_prompt(llm: LLM, fake: FakeScheduler) -> None:
    bars: list[Any] = []

    def make_bar(**options: Any) -> Any:
        bars.append(tqdm(**options, file=io.StringIO()))
        return bars[-1]

    llm.embed([[5], [6], [7]], use_tqdm=make_bar)
    llm.generate([[5], [6]], use_tqdm=make_bar)
    assert [(bar.total, bar.n) for bar in bars] == [(3, 3), (2, 2)]


def test_normalisation_may_be_left_out(llm: LLM, fake: FakeScheduler) -> None:
    assert embed(llm, [5], pooling_params=PoolingParams(normalize=False)) == [[1.0, 5.0, 0.0, -1.0]]


def test_a_prompt_may_fill_the_context(llm: LLM, fake: FakeScheduler) -> None:
    assert embed(llm, [5] * LONGEST)[0][0] == LONGEST


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ("", {}, "prompt is empty"),
        ([[5], []], {}, "prompt is empty"),
        ([[5] * (LONGEST + 1)], {}, f"context length is {LONGEST} tokens, but an input has {LONGEST + 1} tokens"),
        ([[3072]], {}, "token id 3072 is out of vocabulary"),
        ("a", {"pooling_params": {"normalize": False}}, "pooling_params must be PoolingParams"),
        ("a", {"lora_request": "adapter"}, "lora_request is not supported"),
    ],
)
def test_what_is_wrong_is_refused_before_anything_is_submitted(
    llm: LLM, fake: FakeScheduler, prompts: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        llm.embed(prompts, use_tqdm=False, **options)
    assert fake.submits == []


def test_a_refusal_of_the_engine_is_raised(llm: LLM, fake: FakeScheduler) -> None:
    fake.reject["*"] = QueueFull("the queue is full")
    try:
        with pytest.raises(PagodaError, match="the queue is full"):
            llm.embed(["a", "b"], use_tqdm=False)
    finally:
        fake.reject.clear()
    assert embed(llm, [5]) == [[1.0, 5.0, 0.0, 0.0]]


async def test_async_embeddings(scheduler_thread: FakeSchedulerThread, fake: FakeScheduler) -> None:
    async with AsyncLLM(address=scheduler_thread.address) as llm:
        outputs = await asyncio.gather(*(llm.embed([9] * length) for length in range(1, 20)))
        assert [output.outputs.embedding[0] for output in outputs] == list(range(1, 20))
        two_prompts: Any = ["a", "b"]
        with pytest.raises(InvalidRequest, match="embed takes one prompt, got 2"):
            await llm.embed(two_prompts)
        fake.is_paused = True
        fake.aborted.clear()
        try:
            waiting = asyncio.create_task(llm.embed("a", request_id="left"))
            aborted = asyncio.create_task(llm.embed("a", request_id="mine"))
            async with asyncio.timeout(240):
                while fake.num_open_sequences < 2:  # noqa: ASYNC110 (the requests are on their way)
                    await asyncio.sleep(0.01)
                await llm.abort("mine")
                with pytest.raises(PagodaError) as caught:
                    await aborted
                assert caught.value.code is Code.CANCELLED
                waiting.cancel()
                while sorted(fake.aborted) != ["left", "mine"]:  # noqa: ASYNC110 (the abort is on its way)
                    await asyncio.sleep(0.01)
        finally:
            fake.is_paused = False
