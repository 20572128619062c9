"""What a client asks of sampling, against the real engine: a frontend and the embedded model in this process."""

import math
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from pagoda_common.config.engine_config import CacheConfig, EngineConfig, ModelConfig
from tests.fakes.fake_scheduler import FakeScheduler
from tests.harness.engine import running_worker
from tests.harness.scheduler import running_scheduler
from tests.service.frontend.harness import MODEL, Running, frontend_at, until

pytestmark = pytest.mark.asyncio(loop_scope="module")
TEXT = "Once upon a time there was a little dog"
PROCESSORS = ("examples.logits_processor:OnlyThisToken",)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[Running]:
    model = ModelConfig(max_logprobs=-1, logits_processors=PROCESSORS)
    config = EngineConfig(model=model, cache=CacheConfig(kv_cache_memory_bytes=64 << 20))
    async with (
        running_scheduler(config) as scheduler,
        running_worker(scheduler.address),
        frontend_at(scheduler.address, FakeScheduler(), max_logprobs=-1) as running,
    ):
        await until(lambda: running.server.serving.is_ready, timeout_s=240)
        yield running


async def choice_of(engine: Running, **body: Any) -> dict[str, Any]:
    [choice] = (await engine.complete(**{"prompt": TEXT, **body}))["choices"]
    return dict(choice)


async def test_scoring_agrees_with_generating(engine: Running) -> None:
    made = await choice_of(engine, temperature=0, max_tokens=12, logprobs=3)
    scored = await choice_of(engine, prompt=TEXT + made["text"], max_tokens=0, echo=True, logprobs=3)
    assert scored["text"] == TEXT + made["text"]
    lists, generated = scored["logprobs"], made["logprobs"]
    count = len(generated["tokens"])
    assert lists["tokens"][-count:] == generated["tokens"]
    assert lists["token_logprobs"][0] is None
    assert lists["token_logprobs"][-count:] == pytest.approx(generated["token_logprobs"], abs=1e-3)
    for ours, theirs in zip(lists["top_logprobs"][-count:], generated["top_logprobs"], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-3)


async def test_prompt_logprobs_of_a_long_prompt_come_whole(engine: Running) -> None:
    prompt = [(7 * place) % 900 + 10 for place in range(400)]
    choices = (await engine.complete(prompt=prompt, max_tokens=1, n=2, temperature=1, prompt_logprobs=2))["choices"]
    for choice in choices:
        entries = choice["prompt_logprobs"]
        assert [entry is None for entry in entries] == [True] + [False] * 399
        for token, entry in zip(prompt[1:], entries[1:], strict=True):
            assert 2 <= len(entry) <= 3
            assert entry[str(token)]["logprob"] <= max(value["logprob"] for value in entry.values())
            assert {1, 2} <= {value["rank"] for value in entry.values()}


async def test_a_prompt_of_one_token_has_nothing_to_be_judged_by(engine: Running) -> None:
    choice = await choice_of(engine, prompt=[5], max_tokens=0, echo=True, logprobs=2)
    assert choice["prompt_logprobs"] == [None]
    lists = choice["logprobs"]
    assert (lists["token_logprobs"], lists["top_logprobs"], lists["text_offset"]) == ([None], [None], [0])
    assert len(lists["tokens"]) == 1


async def test_the_whole_vocabulary_sums_to_one(engine: Running) -> None:
    choice = await choice_of(engine, prompt=[5, 6], max_tokens=1, prompt_logprobs=-1)
    total = sum(math.exp(value["logprob"]) for value in choice["prompt_logprobs"][1].values())
    assert total == pytest.approx(1, abs=1e-3)


async def test_logprobs_of_chosen_tokens(engine: Running) -> None:
    body: dict[str, Any] = {"temperature": 0, "max_tokens": 2, "return_tokens_as_token_ids": True}
    whole = await choice_of(engine, logprobs=-1, **body)
    chosen = await choice_of(engine, logprobs=0, logprob_token_ids=[7, 1500, 99], **body)
    for position, everything in zip(chosen["logprobs"]["top_logprobs"], whole["logprobs"]["top_logprobs"], strict=True):
        assert {"token_id:7", "token_id:1500", "token_id:99"} <= position.keys()
        assert len(position) <= 4
        assert position == pytest.approx({key: everything[key] for key in position}, abs=1e-4)


async def test_a_processor_changes_only_who_asks_for_it(engine: Running) -> None:
    body: dict[str, Any] = {"temperature": 0, "max_tokens": 3, "return_token_ids": True, "ignore_eos": True}
    plain = await choice_of(engine, **body)
    forced = await choice_of(engine, vllm_xargs={"only_token_id": 77}, **body)
    assert forced["token_ids"] == [77, 77, 77]
    assert (await choice_of(engine, **body))["token_ids"] == plain["token_ids"] != [77, 77, 77]
    assert (await choice_of(engine, vllm_xargs={"unknown": 1}, **body))["token_ids"] == plain["token_ids"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("value", ["x", -1, 10**9, 1.5, None])
async def test_wrong_arguments_of_a_processor_are_a_400(engine: Running, value: Any, stream: bool) -> None:
    body = {"model": MODEL, "prompt": TEXT, "vllm_xargs": {"only_token_id": value}, "stream": stream}
    response = await engine.post("/v1/completions", body)
    assert response.status_code == 400, response.text
    assert "only_token_id" in response.json()["error"]["message"]
    assert response.json()["error"]["param"] == "vllm_xargs"
    assert (await choice_of(engine, max_tokens=1))["finish_reason"] == "length"
