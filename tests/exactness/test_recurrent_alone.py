"""A model that keeps states and no token: no blocks, no tables, and the same tokens."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from pagoda_common.config.engine_config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from pagoda_common.config.speculative_config import SpeculativeConfig
from pagoda_common.engine.client import EngineRequest
from pagoda_common.params.sampling_params import SamplingParams
from tests.checkpoints import make_checkpoint
from tests.exactness import test_cache_groups as groups
from tests.exactness.conftest import Reference, make_prompts
from tests.exactness.test_beam_search import check_hypotheses
from tests.harness.engine import RunningEngine, running_engine

NUM_TOKENS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


OPTIONS: dict[str, dict[str, Any]] = {
    "Qwen3NextForCausalLM": {"layer_types": ["linear_attention"] * 4},  # without its layers of attention
    "MambaForCausalLM": {},
    "Mamba2ForCausalLM": {},
    "FalconMambaForCausalLM": {},
}
FAMILIES = ("MambaForCausalLM", "Mamba2ForCausalLM", "FalconMambaForCausalLM")
"""Without a layer that keeps tokens; `python -m tests.models.circumstances` has them among all families."""


@pytest.fixture(scope="module", params=OPTIONS)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(request.param, tmp_path_factory.mktemp("recurrent"), **OPTIONS[request.param])


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return make_prompts(128)[:6] + make_prompts(128)[17:]


@pytest.fixture(scope="module")
def model(directory: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def assert_likeliest(model: Any, prompt: list[int], tokens: list[int]) -> None:
    """Each token is the likeliest after those before it; in one pass, since its cache knows no such model."""
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + tokens]), use_cache=False).logits[0]
    assert logits[len(prompt) - 1 : -1].argmax(dim=-1).tolist() == tokens


def config(directory: Path, *, prefix_caching: bool = True, drafts: int = 0, max_num_seqs: int = 4) -> EngineConfig:
    speculative = SpeculativeConfig(num_speculative_tokens=drafts, prompt_lookup_max=3, prompt_lookup_min=1)
    return EngineConfig(
        model=ModelConfig(model=str(directory), dtype="float32", device="cpu"),
        cache=CacheConfig(
            kv_cache_memory_bytes=16 * 2**20,
            cpu_kv_cache_memory_bytes=4 * 2**20,
            enable_prefix_caching=prefix_caching,
            snapshot_interval=64,
        ),
        scheduler=SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=64),
        speculative=speculative if drafts else SpeculativeConfig(),
    )


@pytest.mark.parametrize(("prefix_caching", "drafts"), [(True, 0), (False, 0), (True, 3)])
async def test_the_tokens_are_those_of_transformers(
    directory: Path, prompts: list[list[int]], model: Any, prefix_caching: bool, drafts: int
) -> None:
    """More sequences than slots, in chunks; then again, where a state may be found."""
    async with running_engine(config(directory, prefix_caching=prefix_caching, drafts=drafts)) as engine:
        outputs = await engine.all_tokens(prompts, GREEDY)
        assert await engine.all_tokens(prompts, GREEDY) == outputs
        load = engine.scheduler.engine.load()
        assert load.num_used_blocks == load.num_total_blocks == 0
        assert (engine.client.load.prefix_cache_hits > 0) is prefix_caching
    for prompt, tokens in zip(prompts, outputs, strict=True):
        assert len(tokens) == NUM_TOKENS
        assert_likeliest(model, prompt, tokens)


async def test_siblings_part(directory: Path, prompts: list[list[int]]) -> None:
    sampled = SamplingParams(temperature=1.0, seed=7, max_tokens=NUM_TOKENS, ignore_eos=True, n=3)

    async def tokens(max_num_seqs: int, prefix_caching: bool) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        engine_config = config(directory, max_num_seqs=max_num_seqs, prefix_caching=prefix_caching)
        async with running_engine(engine_config) as engine:
            for output in await engine.generate("s", prompts[5], sampled):
                found.setdefault(output.index, []).extend(output.token_ids)
        return found

    together = await tokens(4, prefix_caching=True)
    assert together == await tokens(1, prefix_caching=False)
    assert len({tuple(one) for one in together.values()}) == 3


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest, reference_of: Callable[..., Reference]) -> Reference:
    """One family after the other, and what transformers says to its prompts."""
    return reference_of(request.param)


SOME = slice(8, None)
"""Of the prompts: each length is there twice, and four prompts begin as one of the others does."""


async def urgent_last(engine: RunningEngine, prompts: list[list[int]]) -> list[list[int]]:
    """Output tokens. Each prompt comes when the one before it has its first token, and is more urgent than that."""
    begun = [asyncio.Event() for _ in prompts]

    async def follow(number: int) -> list[int]:
        if number:
            await begun[number - 1].wait()
        request = EngineRequest(
            request_id=f"u{number}",
            prompt_token_ids=prompts[number],
            sampling_params=groups.TWO_BLOCKS,
            eos_token_ids=(),
            priority=-number,
        )
        stream, tokens = engine.client.submit(request), list[int]()
        while not stream.is_finished:
            for output in await stream.get():
                tokens += output.token_ids
            if tokens:
                begun[number].set()
        return tokens

    return await asyncio.gather(*map(follow, range(len(prompts))))


def urgent_outputs(family: Reference) -> list[list[int]]:
    return [tokens[: groups.TWO_BLOCKS.max_tokens] for tokens in family.outputs[SOME]]


def two_slots(
    family: Reference, *, cache: dict[str, Any] | None = None, scheduler: dict[str, Any] | None = None
) -> EngineConfig:
    """Urgent sequences take the slots of others, as there are no blocks that could run out."""
    return groups.make_config(
        family,
        cache={"cpu_kv_cache_memory_bytes": 4 * 2**20, "snapshot_interval": 64} | (cache or {}),
        scheduler={"policy": "priority", "max_num_seqs": 2} | (scheduler or {}),
    )


@pytest.mark.parametrize(
    ("mode", "is_async", "prefix_caching", "max_num_batched_tokens"), [*groups.RECOMPUTE, *groups.SWAP]
)
async def test_under_preemption(
    family: Reference, mode: str, is_async: bool, prefix_caching: bool, max_num_batched_tokens: int
) -> None:
    config = two_slots(
        family,
        cache={"enable_prefix_caching": prefix_caching},
        scheduler={
            "async_scheduling": is_async,
            "max_num_batched_tokens": max_num_batched_tokens,
            "preemption_mode": mode,
        },
    )
    async with running_engine(config) as engine:
        assert await urgent_last(engine, family.prompts[SOME]) == urgent_outputs(family)
        assert engine.client.load.num_preemptions > 0
        groups.assert_nothing_is_left(engine)


async def test_beams_find_the_hypotheses_of_transformers(family: Reference) -> None:
    async with running_engine(groups.make_config(family)) as engine:
        for number in (1, 4, 5):
            await check_hypotheses(engine, family, number, width=3, penalty=1.0, stopping=False)
        groups.assert_nothing_is_left(engine)


async def test_an_int8_cache_changes_nothing(family: Reference) -> None:
    """States are not rounded."""
    async with running_engine(two_slots(family, cache={"kv_cache_dtype": "int8"})) as engine:
        assert await engine.all_tokens(family.prompts, groups.GREEDY) == family.outputs
        assert await urgent_last(engine, family.prompts[SOME]) == urgent_outputs(family)
        assert engine.client.load.num_preemptions > 0
        groups.assert_nothing_is_left(engine)


@pytest.mark.parametrize("prefix_caching", [True, False])
async def test_steps_that_overlap(family: Reference, prefix_caching: bool) -> None:
    config = two_slots(family, cache={"enable_prefix_caching": prefix_caching})
    async with running_engine(config, overlaps=True) as engine:
        assert await urgent_last(engine, family.prompts[SOME]) == urgent_outputs(family)
        assert engine.client.load.num_preemptions > 0
        groups.assert_nothing_is_left(engine)
