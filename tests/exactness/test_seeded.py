"""A seeded request samples the same tokens alone, in a batch, and after a preemption."""

from pagoda_common.config.engine_config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from pagoda_common.params.sampling_params import SamplingParams
from tests.exactness.conftest import Reference
from tests.exactness.test_greedy import FEW_BLOCKS
from tests.harness.engine import RunningEngine, running_engine

PARAMS = SamplingParams(temperature=0.9, top_p=0.95, top_k=50, seed=1234, max_tokens=48, ignore_eos=True)


def make_config(reference: Reference, **cache: int) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(model=str(reference.directory), dtype="float32", device="cpu"),
        cache=CacheConfig(**{"kv_cache_memory_bytes": 64 * 2**20, **cache}),
        scheduler=SchedulerConfig(max_num_seqs=32),
    )


async def alone(engine: RunningEngine, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    return [await engine.tokens(f"alone{number}", prompt, params) for number, prompt in enumerate(prompts)]


async def test_the_batch_does_not_matter(llama: Reference) -> None:
    prompts = (llama.prompts * 2)[:32]
    async with running_engine(make_config(llama)) as engine:
        expected = await alone(engine, prompts[:8], PARAMS)
        together = await engine.all_tokens(prompts, PARAMS)
        assert together[:8] == expected
        assert together[:12] == together[20:32], "equal prompts and seeds sample the same"
    async with running_engine(make_config(llama, num_blocks_override=FEW_BLOCKS)) as engine:
        assert await engine.all_tokens(prompts, PARAMS) == together
        assert engine.client.load.num_preemptions > 0


async def test_the_sequences_of_one_request_use_seeds_of_their_own(llama: Reference) -> None:
    prompt = llama.prompts[4]
    params = SamplingParams(temperature=0.9, seed=7, n=3, max_tokens=20, ignore_eos=True)
    async with running_engine(make_config(llama)) as engine:
        sequences: dict[int, list[int]] = {0: [], 1: [], 2: []}
        for output in await engine.generate("n", prompt, params):
            sequences[output.index] += output.token_ids
        for index, tokens in sequences.items():
            single = SamplingParams(temperature=0.9, seed=7 + index, max_tokens=20, ignore_eos=True)
            assert await engine.tokens(f"single{index}", prompt, single) == tokens
        assert len({tuple(tokens) for tokens in sequences.values()}) == 3
