"""A model that keeps states and no token: no blocks, no tables, and the same tokens."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from pagoda_common.config.engine_config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from pagoda_common.config.speculative_config import SpeculativeConfig
from pagoda_common.params.sampling_params import SamplingParams
from tests.checkpoints import make_checkpoint
from tests.exactness.conftest import make_prompts
from tests.harness.engine import running_engine

NUM_TOKENS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


OPTIONS: dict[str, dict[str, Any]] = {
    "Qwen3NextForCausalLM": {"layer_types": ["linear_attention"] * 4},  # without its layers of attention
    "Mamba2ForCausalLM": {},
    "FalconMambaForCausalLM": {},
}


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
