"""Steps that overlap, as on a GPU, give what one step after the other gives; the scheduler sends ahead."""

import asyncio
from dataclasses import replace

import pytest

from pagoda_common.config.engine_config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from pagoda_common.params.sampling_params import SamplingParams
from pagoda_worker.steps.input_batch import ForwardInputs
from pagoda_worker.steps.step import StepInput
from pagoda_worker.steps.step_clock import StepClock
from pagoda_worker.steps.steps_in_flight import LaunchedStep, StepsInFlight
from tests.harness.engine import RunningEngine, running_engine

PARAMS = [
    SamplingParams(temperature=0, max_tokens=90),
    SamplingParams(temperature=0.9, seed=5, max_tokens=73, top_p=0.9, top_k=40),
    SamplingParams(temperature=1.2, seed=6, max_tokens=90, min_p=0.02, min_tokens=4, stop_token_ids=[*range(3, 300)]),
    SamplingParams(temperature=0.7, seed=7, max_tokens=81, presence_penalty=0.8, repetition_penalty=1.2),
    SamplingParams(temperature=0, max_tokens=3, logprobs=1, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=8, max_tokens=5, bad_words_token_ids=[[9], [10, 11]], logit_bias={40: 1.0}),
    SamplingParams(temperature=1.0, seed=9, max_tokens=62, n=2),
]
GREETING = [*range(400, 437)]
"""Begins some prompts: found in the cache."""
PROMPTS = [GREETING * (number % 5 == 1) + [20 + number] * (1 + 9 * number % 70) for number in range(21)]


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each step that was launched while another one was in flight, whether some of a prompt is in it."""
    launch, ahead = StepsInFlight.launch, []

    def noted(steps: StepsInFlight, step: StepInput, inputs: ForwardInputs, clock: StepClock) -> LaunchedStep:
        if steps:
            ahead.append(inputs.input_ids.size > inputs.slots.size)
        return launch(steps, step, inputs, clock)

    monkeypatch.setattr(StepsInFlight, "launch", noted)
    return ahead


async def generate_all(engine: RunningEngine) -> list[dict[int, list[int]]]:
    """Tokens of every request by sequence, all at once; some others are given up on the way."""

    async def one(number: int, prompt: list[int]) -> dict[int, list[int]]:
        await asyncio.sleep(0.02 * (number % 13))
        tokens: dict[int, list[int]] = {}
        for output in await engine.generate(f"r{number}", prompt, PARAMS[number % len(PARAMS)]):
            tokens.setdefault(output.index, []).extend(output.token_ids)
        return tokens

    async def given_up(number: int) -> None:
        params = replace(PARAMS[number % 4], max_tokens=500, stop_token_ids=[], ignore_eos=True)
        running = asyncio.create_task(engine.generate(f"gone{number}", PROMPTS[number], params))
        await asyncio.sleep(0.05 + 0.04 * number)
        engine.client.abort(f"gone{number}")
        await running

    gone = [asyncio.create_task(given_up(number)) for number in range(4)]
    found = await asyncio.gather(*(one(number, prompt) for number, prompt in enumerate(PROMPTS)))
    await asyncio.gather(*gone)
    return found


@pytest.mark.parametrize("max_num_batched_tokens", [24, 2048])
@pytest.mark.parametrize("cache", [{}, {"num_blocks_override": 42}, {"num_blocks_override": 42, "swap": 8 * 2**20}])
async def test_tokens_are_the_same_whatever_comes_and_goes(
    cache: dict[str, int], max_num_batched_tokens: int, ahead: list[bool]
) -> None:
    config = EngineConfig(
        model=ModelConfig(dtype="float32", device="cpu", max_model_len=600),
        cache=CacheConfig(
            kv_cache_memory_bytes=64 * 2**20,
            num_blocks_override=cache.get("num_blocks_override"),
            cpu_kv_cache_memory_bytes=cache.get("swap", 0),
        ),
        scheduler=SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=max_num_batched_tokens),
    )
    async with running_engine(config) as engine:
        expected = await generate_all(engine)
    assert not ahead
    async with running_engine(config, overlaps=True) as engine:
        assert await generate_all(engine) == expected
        assert not cache or engine.client.load.num_preemptions > 0
    assert len(ahead) > 10
    assert max_num_batched_tokens > 100 or any(ahead), "how many follows from when requests come"
