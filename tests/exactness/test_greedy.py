"""Greedy tokens and log probabilities equal transformers' in float32, however the engine gets to them."""

import itertools
from dataclasses import replace
from typing import Any

import pytest

from pagoda_common.config.engine_config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from pagoda_common.params.sampling_params import SamplingParams
from tests.exactness.conftest import LENGTHS, NUM_TOKENS, Reference
from tests.harness.engine import running_engine

GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
TWO_BLOCKS = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
"""For requests that run alone: enough to begin new blocks and to pass a window of 24, whatever the prompt's length."""
FEW_BLOCKS = 40
"""Blocks of 16 tokens: one prompt of 300 and its output fill 22, and 20 requests want about 100."""
SEVERAL_GROUPS = (
    "Qwen2ForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "Gemma3nForCausalLM",
    "Cohere2ForCausalLM",
    "GptOssForCausalLM",
    "Llama4ForCausalLM",
    "Exaone4ForCausalLM",
)
"""Of two or three cache groups, each of which has blocks of its own."""


def few_blocks(reference: Reference, max_num_batched_tokens: int = 2048) -> int:
    """Blocks of which one prompt of 300 with its output takes most. Windows hold what one step computes as well."""
    in_windows = ("MistralForCausalLM", "MixtralForCausalLM-sliding_window")
    if any(name in str(reference.directory) for name in in_windows) and max_num_batched_tokens < 300:
        return 12  # all of its layers have a window
    if not any(name in str(reference.directory) for name in SEVERAL_GROUPS):
        return FEW_BLOCKS
    return 72 if max_num_batched_tokens > 300 else 52


def make_config(
    reference: Reference, *, cache: dict[str, Any] | None = None, scheduler: dict[str, Any] | None = None
) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(model=str(reference.directory), dtype="float32", device="cpu"),
        cache=CacheConfig(**{"kv_cache_memory_bytes": 64 * 2**20, **(cache or {})}),
        scheduler=SchedulerConfig(**{"max_num_seqs": 32, **(scheduler or {})}),
    )


async def test_alone(reference: Reference) -> None:
    async with running_engine(make_config(reference)) as engine:
        for number in range(len(LENGTHS), 2 * len(LENGTHS)):  # those before are alone in test_log_probabilities
            tokens = await engine.tokens(str(number), reference.prompts[number], TWO_BLOCKS)
            assert tokens == reference.outputs[number][: TWO_BLOCKS.max_tokens], number


@pytest.mark.parametrize("prefix_caching", [True, False])
async def test_all_at_once(reference: Reference, prefix_caching: bool) -> None:
    async with running_engine(make_config(reference, cache={"enable_prefix_caching": prefix_caching})) as engine:
        assert await engine.all_tokens(reference.prompts, GREEDY) == reference.outputs
        hits = engine.client.load.prefix_cache_hits
        assert (hits > 0) is prefix_caching


async def test_all_at_once_with_too_few_blocks(reference: Reference) -> None:
    async with running_engine(make_config(reference, cache={"num_blocks_override": few_blocks(reference)})) as engine:
        assert await engine.all_tokens(reference.prompts, GREEDY) == reference.outputs
        assert engine.client.load.num_preemptions > 0
        assert engine.scheduler.engine.load().num_used_blocks == 0


async def test_log_probabilities(reference: Reference) -> None:
    params = replace(TWO_BLOCKS, logprobs=3)
    num_tokens = params.max_tokens
    async with running_engine(make_config(reference)) as engine:
        for number, prompt in enumerate(reference.prompts[: len(LENGTHS)]):
            outputs = await engine.generate(str(number), prompt, params)
            rows = [row for output in outputs for row in output.logprobs or []]
            assert [row.logprobs[0] for row in rows] == pytest.approx(reference.logprobs[number][:num_tokens], abs=1e-4)
            for row, token_id in zip(rows, reference.outputs[number][:num_tokens], strict=True):
                assert row.token_ids[0] == token_id
                assert row.sampled_rank == 1
                others = list(row.logprobs[1:])
                assert others == sorted(others, reverse=True)
                assert len(row.token_ids) == 4


COMBINATIONS = list(itertools.product([True, False], [True, False], [24, 2048], ["recompute", "swap"]))
"""async_scheduling, enable_prefix_caching, max_num_batched_tokens, preemption_mode."""
HALVES = [
    [one for one in COMBINATIONS if (one[0] + one[1] + (one[2] == 24) + (one[3] == "swap")) % 2 == half]
    for half in (0, 1)
]
"""Of any three of the four settings, each half has every combination."""
MORE_COMBINED = ("MistralForCausalLM", "Qwen2ForCausalLM")
"""With a window in all layers, and in some; what keeps every token in every layer is Llama's case."""
SOME_COMBINED = ("Gemma2ForCausalLM", "Gemma3ForCausalLM", "Cohere2ForCausalLM", "Qwen2MoeForCausalLM")
"""Their layers differ from one another; two of the combinations in which most goes on."""
CASES = [
    *(("LlamaForCausalLM", *combination) for combination in COMBINATIONS),
    *((name, *combination) for number, name in enumerate(MORE_COMBINED) for combination in HALVES[number % 2]),
    *((architecture, True, True, 24, mode) for architecture in SOME_COMBINED for mode in ("recompute", "swap")),
]


@pytest.mark.parametrize(
    ("reference", "is_async", "prefix_caching", "max_num_batched_tokens", "preemption_mode"),
    CASES,
    indirect=["reference"],
)
async def test_every_combination_under_preemption(
    reference: Reference, is_async: bool, prefix_caching: bool, max_num_batched_tokens: int, preemption_mode: str
) -> None:
    config = make_config(
        reference,
        cache={
            "num_blocks_override": few_blocks(reference, max_num_batched_tokens),
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
        assert await engine.all_tokens(reference.prompts, GREEDY) == reference.outputs
        assert engine.client.load.num_preemptions > 0
