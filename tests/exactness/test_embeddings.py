"""Embeddings through the whole engine equal transformers' in float32, for prompts in chunks beside generations."""

import asyncio

import numpy as np
import pytest
import torch
import transformers

from pagoda_common.config.checkpoint.model_files import resolve_model
from pagoda_common.config.engine_config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from pagoda_common.engine.client import EngineRequest
from pagoda_common.params.outputs import Embedding
from pagoda_common.params.pooling_params import PoolingParams
from pagoda_common.params.sampling_params import SamplingParams
from tests.exactness.conftest import make_prompts
from tests.harness.engine import RunningEngine, running_engine

VOCAB_SIZE = 2000
BATCHED_TOKENS = 40


async def embed(engine: RunningEngine, name: str, prompt: list[int]) -> Embedding:
    params = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
    request = EngineRequest(request_id=name, prompt_token_ids=prompt, sampling_params=params, pooling=PoolingParams())
    (output,) = await engine.client.submit(request).get()
    assert output.embedding is not None, output
    return output.embedding


def references(prompts: list[list[int]]) -> list[Embedding]:
    model = transformers.AutoModel.from_pretrained(str(resolve_model("pagoda-tiny")), dtype=torch.float32).eval()
    with torch.inference_mode():
        states = [model(torch.tensor([prompt])).last_hidden_state[0, -1] for prompt in prompts]
    return [np.asarray(state / state.norm()) for state in states]


@pytest.mark.parametrize("prefix_caching", [True, False])
async def test_embeddings_are_those_of_transformers(prefix_caching: bool) -> None:
    config = EngineConfig(
        model=ModelConfig(model="pagoda-tiny", dtype="float32", device="cpu"),
        cache=CacheConfig(kv_cache_memory_bytes=64 * 2**20, enable_prefix_caching=prefix_caching),
        scheduler=SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=BATCHED_TOKENS),
    )
    prompts = make_prompts(VOCAB_SIZE)
    expected = references(prompts)
    greedy = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    async with running_engine(config) as engine:
        alone = [await engine.tokens(f"alone{n}", prompts[n], greedy) for n in range(4)]
        beside = asyncio.gather(*(engine.tokens(f"beside{n}", prompts[n], greedy) for n in range(4)))
        found = await asyncio.gather(*(embed(engine, str(n), prompt) for n, prompt in enumerate(prompts)))
        for one, other in zip(found, expected, strict=True):
            assert np.abs(one - other).max() < 1e-4
        assert await beside == alone
        assert engine.scheduler.engine.load().num_used_blocks == 0
        assert (engine.client.load.prefix_cache_hits > 0) is prefix_caching
