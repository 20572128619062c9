"""With drafts the tokens are the same: greedy, seeded, in any batch, and whatever happens on the way."""

import asyncio
from typing import Any

import pytest

from pagoda_common.config.engine_config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from pagoda_common.config.speculative_config import SpeculativeConfig
from pagoda_common.params.sampling_params import SamplingParams
from tests.exactness.conftest import NUM_TOKENS, Reference
from tests.exactness.test_greedy import FEW_BLOCKS, GREEDY
from tests.harness.engine import RunningEngine, running_engine

DRAFTS = SpeculativeConfig(num_speculative_tokens=4, prompt_lookup_max=3, prompt_lookup_min=1)
COMBINATIONS = [
    (True, True, 24, "swap"),
    (True, True, 2048, "recompute"),
    (True, False, 24, "recompute"),
    (True, False, 2048, "swap"),
    (False, True, 2048, "swap"),
    (False, False, 24, "swap"),
]
"""async_scheduling, enable_prefix_caching, max_num_batched_tokens, preemption_mode."""
SOME = ("Gemma2ForCausalLM", "Qwen2ForCausalLM", "GPT2LMHeadModel")


def make_config(
    model: str,
    *,
    cache: dict[str, Any] | None = None,
    scheduler: dict[str, Any] | None = None,
    speculative: SpeculativeConfig = DRAFTS,
) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(model=model, dtype="float32", device="cpu"),
        cache=CacheConfig(**{"kv_cache_memory_bytes": 64 * 2**20, **(cache or {})}),
        scheduler=SchedulerConfig(**{"max_num_seqs": 32, **(scheduler or {})}),
        speculative=speculative,
    )


def check_drafts(engine: RunningEngine) -> None:
    """Some drafts were right, and nothing is left behind."""
    drafts = engine.client.load.speculation
    assert drafts.num_accepted_tokens > 0
    assert drafts.num_draft_tokens >= drafts.num_accepted_tokens
    assert sum(drafts.num_accepted_tokens_per_pos) == drafts.num_accepted_tokens
    assert engine.scheduler.engine.load().num_used_blocks == 0


@pytest.mark.parametrize(("is_async", "prefix_caching", "max_num_batched_tokens", "preemption_mode"), COMBINATIONS)
async def test_greedy_tokens_equal_transformers(
    llama: Reference, is_async: bool, prefix_caching: bool, max_num_batched_tokens: int, preemption_mode: str
) -> None:
    config = make_config(
        str(llama.directory),
        cache={
            "num_blocks_override": FEW_BLOCKS,
            "enable_prefix_caching": prefix_caching,
            "cpu_kv_cache_memory_bytes": 16 * 2**20,
        },
        scheduler={
            "async_scheduling": is_async,
            "max_num_batched_tokens": max_num_batched_tokens,
            "preemption_mode": preemption_mode,
        },
    )
    async with running_engine(config) as engine:
        assert await engine.all_tokens(llama.prompts, GREEDY) == llama.outputs
        if max_num_batched_tokens == 2048:  # with fewer, drafts leave room for few sequences at a time
            assert engine.client.load.num_preemptions > 0
        check_drafts(engine)


@pytest.mark.parametrize("reference", SOME, indirect=True)
async def test_greedy_tokens_equal_transformers_in_other_architectures(reference: Reference) -> None:
    async with running_engine(make_config(str(reference.directory))) as engine:
        assert await engine.all_tokens(reference.prompts, GREEDY) == reference.outputs
        check_drafts(engine)


async def test_log_probabilities_are_those_of_each_token(llama: Reference) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=2)
    async with running_engine(make_config(str(llama.directory))) as engine:
        outputs = await asyncio.gather(
            *(engine.generate(f"r{number}", prompt, params) for number, prompt in enumerate(llama.prompts))
        )
        for number, parts in enumerate(outputs):
            rows = [row for part in parts for row in part.logprobs or []]
            assert [row.token_ids[0] for row in rows] == llama.outputs[number]
            assert [row.logprobs[0] for row in rows] == pytest.approx(llama.logprobs[number], abs=2e-4)
        check_drafts(engine)


def mixed_requests() -> list[tuple[list[int], SamplingParams]]:
    """16 requests to the embedded model: prompts that repeat themselves, and every kind of sampling."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.0, "ignore_eos": True},
        {"temperature": 0.7, "seed": 3, "top_p": 0.9},
        {"temperature": 0.3, "seed": 5, "top_k": 40, "n": 2},
        {"temperature": 0.0, "repetition_penalty": 1.1},
        {"temperature": 0.2, "seed": 9, "logprobs": 1},
        {"temperature": 0.0, "min_tokens": 8, "bad_words_token_ids": ((300, 301),)},
        {"temperature": 0.0, "stop_token_ids": (270, 271, 272, 273), "ignore_eos": True},
    ]
    requests = []
    for number in range(16):
        period = 3 + number % 5
        prompt = [300 + (number + place % period) * 7 for place in range(20 + 9 * number)]
        requests.append((prompt, SamplingParams(max_tokens=40 + 3 * number, **kinds[number % len(kinds)])))
    return requests


async def answers(config: EngineConfig) -> list[dict[int, list[int]]]:
    """Tokens of each sequence of the mixed requests, all at once."""
    async with running_engine(config) as engine:

        async def answer(number: int, prompt: list[int], params: SamplingParams) -> dict[int, list[int]]:
            sequences: dict[int, list[int]] = {index: [] for index in range(params.n)}
            for output in await engine.generate(f"m{number}", prompt, params):
                sequences[output.index] += output.token_ids
            return sequences

        result = await asyncio.gather(*(answer(number, *request) for number, request in enumerate(mixed_requests())))
        if config.speculative.is_on:
            check_drafts(engine)
        return result


async def test_a_mixed_batch_gets_the_same_tokens_with_and_without_drafts() -> None:
    expected = await answers(make_config("pagoda-tiny", speculative=SpeculativeConfig()))
    for scheduler in ({}, {"async_scheduling": False, "max_num_batched_tokens": 48}):
        assert await answers(make_config("pagoda-tiny", scheduler=scheduler)) == expected
    few = {"num_blocks_override": 70, "cpu_kv_cache_memory_bytes": 16 * 2**20}
    assert await answers(make_config("pagoda-tiny", cache=few)) == expected
