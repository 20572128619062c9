"""A worker's drafts: tokens are those of plain decoding, and nothing is left of what was wrong."""

from typing import Any

import numpy as np
import pytest
import torch

from pagoda_common.config.engine_config import EMBEDDED_MODEL
from pagoda_common.config.speculative_config import SpeculativeConfig
from pagoda_common.params.sampling_params import SamplingParams
from pagoda_common.params.structured_outputs import StructuredOutputsParams
from pagoda_worker.sampling.logits_state import LogitsBatch
from pagoda_worker.sampling.sampler import SamplerOutput
from pagoda_worker.steps.step import IntArray, StepOutput
from pagoda_worker.worker import Worker
from tests.unit.worker.driver import Driver
from tests.unit.worker.models.reference import NUM_TOKENS, Reference, make_prompts, open_reference

DRAFTS = SpeculativeConfig(num_speculative_tokens=4, prompt_lookup_max=3, prompt_lookup_min=1)
LOOPS = [[300 + (number + place % (2 + number)) * 7 for place in range(17 + 5 * number)] for number in range(6)]
"""Prompts that go round: the model's output does so as well."""


@pytest.fixture(scope="module")
def plain() -> Driver:
    return Driver(EMBEDDED_MODEL)


@pytest.fixture(scope="module")
def guessing() -> Driver:
    return Driver(EMBEDDED_MODEL, speculative=DRAFTS)


def outputs_of(driver: Driver, params: Any = None, **options: Any) -> list[list[int]]:
    return [each.output for each in driver.generate(LOOPS, params, **{"max_tokens": 40} | options)]


@pytest.fixture(
    scope="module", params=["Gemma3ForCausalLM", "FalconForCausalLM", "BloomForCausalLM", "Phi3ForCausalLM"]
)
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return open_reference(tmp_path_factory.mktemp("checkpoint"), request.param)


@pytest.mark.parametrize("block_size", [16, 3])
def test_greedy_tokens_equal_transformers(reference: Reference, block_size: int) -> None:
    driver = Driver(reference.directory, speculative=DRAFTS, block_size=block_size, num_blocks=2000)
    sequences = driver.generate(make_prompts(), max_tokens=NUM_TOKENS, chunk=50)
    assert [each.output for each in sequences] == reference.outputs
    assert driver.num_draft_tokens > 0


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"temperature": 0.6, "top_p": 0.9, "seed": 5},
        {"temperature": 0.3, "top_k": 20, "min_p": 0.01, "seed": 6},
    ],
)
def test_tokens_are_those_without_drafts(plain: Driver, guessing: Driver, params: dict[str, Any]) -> None:
    before = guessing.num_draft_tokens
    sampling = SamplingParams(max_tokens=40, **params)
    assert outputs_of(guessing, sampling) == outputs_of(plain, sampling)
    assert guessing.num_draft_tokens > before


def test_right_guesses_save_steps(guessing: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []
    execute = guessing.worker.execute_model
    monkeypatch.setattr(guessing.worker, "execute_model", lambda step: (steps.append(1), execute(step))[1])
    outputs = outputs_of(guessing)
    assert {len(output) for output in outputs} == {40}
    assert len(steps) < 40


def test_log_probabilities_are_those_without_drafts(plain: Driver, guessing: Driver) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=20, logprobs=2)
    for one, other in zip(
        *(driver.generate(LOOPS, params, max_tokens=20) for driver in (plain, guessing)), strict=True
    ):
        assert (one.output, one.ranks) == (other.output, other.ranks)
        for expected, actual in zip(one.logprobs, other.logprobs, strict=True):
            assert actual == pytest.approx(expected, abs=1e-4)


def test_two_ranks_guess_alike() -> None:
    one, two = (Driver(EMBEDDED_MODEL, speculative=DRAFTS, world_size=size) for size in (1, 2))
    params = [
        SamplingParams(temperature=0.4 * (number % 2), seed=number, max_tokens=40) for number in range(len(LOOPS))
    ]
    assert outputs_of(one, params) == outputs_of(two, params)
    assert one.num_draft_tokens == two.num_draft_tokens > 0


@pytest.mark.parametrize(
    "params",
    [
        {"repetition_penalty": 1.2},
        {"min_tokens": 10},
        {"logit_bias": {400: 2.0}},
        {"bad_words_token_ids": ((500, 501),)},
        {"structured_outputs": StructuredOutputsParams(regex="(ab)*")},
    ],
)
def test_sequences_whose_tokens_need_state_get_no_drafts(plain: Driver, params: dict[str, Any]) -> None:
    driver = Driver(EMBEDDED_MODEL, speculative=DRAFTS)
    sampling = SamplingParams(temperature=0.0, max_tokens=12, **params)
    assert outputs_of(driver, sampling, max_tokens=12) == outputs_of(plain, sampling, max_tokens=12)
    assert driver.num_draft_tokens == 0


def test_a_draft_ends_where_the_output_must(guessing: Driver) -> None:
    """The scheduler may allow more: it does not know how far the sequence is."""
    for max_tokens in (1, 2, 3, 5, 7):
        assert {len(output) for output in outputs_of(guessing, max_tokens=max_tokens)} == {max_tokens}


def test_a_draft_ends_where_the_blocks_do(plain: Driver) -> None:
    driver = Driver(EMBEDDED_MODEL, speculative=DRAFTS, block_size=4)
    driver.num_reserved = 1
    assert outputs_of(driver) == outputs_of(plain)
    assert driver.num_draft_tokens > 0


def test_a_guess_that_is_not_a_number_harms_nobody(
    guessing: Driver, plain: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = guessing.worker
    assert isinstance(worker, Worker)
    runner = worker._runner
    assert runner is not None
    sampler, caches = runner._sampler, [*runner._kv_cache.k_caches, *runner._kv_cache.v_caches]
    sample, execute, num_bad = sampler.sample, guessing.execute, 0

    def spoil(logits: torch.Tensor, batch: LogitsBatch, **options: Any) -> SamplerOutput:
        """Logits are NaN from the second guess of each sequence on, and what their blocks hold of the last one."""
        nonlocal num_bad
        starts = np.flatnonzero(np.diff(batch.slots, prepend=-1))
        ahead = np.arange(batch.slots.size) - np.repeat(starts, np.diff(starts, append=batch.slots.size))
        num_bad += int((ahead > 1).sum())
        for slot, place in zip(batch.slots[ahead > 1], batch.num_tokens[ahead > 1] - 1, strict=True):
            block = runner.input_batch.readable_blocks(int(slot))[place // guessing.block_size]
            caches[0][int(block), place % guessing.block_size] = torch.nan
        spoilt = logits.masked_fill(torch.from_numpy(ahead > 1)[:, None], torch.nan)
        return sample(spoilt, batch, **options | {"likeliest": None})

    def checked(**step: Any) -> StepOutput:
        """The sequence that gets the blocks next finds numbers in them."""
        output = execute(**step)
        assert all(cache.isfinite().all() for cache in caches)
        return output

    monkeypatch.setattr(sampler, "sample", spoil)
    monkeypatch.setattr(guessing, "execute", checked)
    assert outputs_of(guessing) == outputs_of(plain)
    assert num_bad > 0


def test_a_sequence_that_fails_with_a_draft_had_no_guess_right(
    guessing: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = guessing.worker
    assert isinstance(worker, Worker)
    assert worker._runner is not None
    sampler, drafter = worker._runner._sampler, worker._runner.input_batch.drafter
    assert drafter is not None
    sample, judge, heard = sampler.sample, drafter.judge, []

    def spoil(logits: torch.Tensor, batch: LogitsBatch, **options: Any) -> SamplerOutput:
        """Logits of steps with guesses are NaN."""
        has_guesses = np.unique(batch.slots).size < batch.slots.size
        spoilt = torch.full_like(logits, torch.nan) if has_guesses else logits
        return sample(spoilt, batch, **options | {"likeliest": None})

    def listen(slots: IntArray, num_draft: IntArray, num_right: IntArray, num_tokens: IntArray) -> None:
        heard.extend(num_right.tolist())
        judge(slots, num_draft, num_right, num_tokens)

    monkeypatch.setattr(sampler, "sample", spoil)
    monkeypatch.setattr(drafter, "judge", listen)
    assert any(each.bad for each in guessing.generate(LOOPS, max_tokens=40))
    assert set(heard) == {0}
