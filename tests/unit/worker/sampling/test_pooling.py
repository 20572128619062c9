"""Embeddings out of the model runner: those of transformers, whatever else is in the step and however they are cut."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from pagoda_common.config.checkpoint.model_files import resolve_model
from pagoda_common.params.pooling_params import PoolingParams
from pagoda_common.params.sampling_params import SamplingParams
from pagoda_worker.steps.step import NewRequest, StepOutput
from tests.unit.worker.driver import Driver

LENGTHS = (1, 2, 15, 16, 17, 33, 90)
BLOCKS_PER_SLOT = 16


def prompts(lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    generator = np.random.default_rng(3)
    return [generator.integers(5, 2000, size=length).tolist() for length in lengths]


@cache
def reference_model() -> Any:
    from transformers import AutoModel

    return AutoModel.from_pretrained(str(resolve_model("pagoda-tiny")), dtype=torch.float32).eval()


def reference(prompt: list[int], *, normalize: bool = True) -> np.ndarray:
    """transformers' final hidden state of the last token."""
    with torch.inference_mode():
        state = reference_model()(torch.tensor([prompt])).last_hidden_state[0, -1]
    state = state / state.norm() if normalize else state
    return np.asarray(state)


def request(slot: int, prompt: list[int], pooling: PoolingParams | None, *, computed: int = 0) -> NewRequest:
    """With blocks of its own, as many as it will need."""
    return NewRequest(
        slot=slot,
        request_id=f"r{slot}",
        prompt_token_ids=np.array(prompt),
        sampling_params=SamplingParams(temperature=0, max_tokens=50),
        block_ids=np.arange(BLOCKS_PER_SLOT * slot, BLOCKS_PER_SLOT * (slot + 1)),
        num_computed_tokens=computed,
        pooling=pooling,
    )


def step(driver: Driver, counts: dict[int, int], new: Sequence[NewRequest] = ()) -> StepOutput:
    return driver.execute(
        new_requests=list(new),
        num_seqs=len(counts),
        slots=np.array(list(counts)),
        num_scheduled_tokens=np.array(list(counts.values())),
    )


def embeddings(output: StepOutput) -> dict[int, np.ndarray]:
    if output.pooled is None:
        return {}
    assert all(values.dtype == np.float32 for values in output.pooled.values)
    return dict(zip(output.pooled.slots.tolist(), output.pooled.values, strict=True))


def pool_all(driver: Driver, all_prompts: list[list[int]], *, chunk: int) -> dict[int, np.ndarray]:
    """Prompts in the slots after the first, all at once, in chunks."""
    left = {slot: len(prompt) for slot, prompt in enumerate(all_prompts, start=1)}
    new = [request(slot, prompt, PoolingParams()) for slot, prompt in enumerate(all_prompts, start=1)]
    found: dict[int, np.ndarray] = {}
    while left:
        counts = {slot: min(chunk, count) for slot, count in left.items()}
        output = step(driver, counts, new)
        new = []
        left = {slot: count - counts[slot] for slot, count in left.items() if count > counts[slot]}
        assert output.num_sampled_tokens is not None
        assert not output.num_sampled_tokens.any()
        assert not output.token_ids.size
        assert set(embeddings(output)) == set(counts) - set(left), "only with a prompt's last token"
        found |= embeddings(output)
    return found


@pytest.mark.parametrize("chunk", [1000, 7, 1])
@pytest.mark.parametrize("world_size", [1, 2])
def test_embeddings_are_those_of_transformers(chunk: int, world_size: int) -> None:
    driver = Driver("pagoda-tiny", world_size=world_size)
    found = pool_all(driver, prompts(), chunk=chunk)
    for slot, prompt in enumerate(prompts(), start=1):
        assert np.abs(found[slot] - reference(prompt)).max() < 1e-4
        assert np.linalg.norm(found[slot]) == pytest.approx(1.0, abs=1e-5)


def test_layers_in_one_call_give_nearly_the_same() -> None:
    driver = Driver("pagoda-tiny", dtype="bfloat16")
    found = pool_all(driver, prompts(), chunk=20)
    for slot, prompt in enumerate(prompts(), start=1):
        assert float(found[slot] @ reference(prompt)) > 0.99


def test_generation_beside_it_is_undisturbed() -> None:
    alone = Driver("pagoda-tiny").generate([prompts()[3]], max_tokens=5)[0].output
    driver = Driver("pagoda-tiny")
    prompt = prompts()[5]
    tokens = step(driver, {0: 16}, [request(0, prompts()[3], None)]).token_ids.tolist()
    output = step(driver, {1: 20, 0: 1}, [request(1, prompt, PoolingParams(normalize=False))])
    assert output.pooled is None
    assert output.num_sampled_tokens is not None
    assert output.num_sampled_tokens.tolist() == [0, 1]
    tokens += output.token_ids.tolist()
    output = step(driver, {1: 13, 0: 1})
    assert output.num_sampled_tokens is not None
    assert output.num_sampled_tokens.tolist() == [0, 1]
    tokens += output.token_ids.tolist()
    np.testing.assert_allclose(embeddings(output)[1], reference(prompt, normalize=False), atol=1e-4)
    for _ in range(2):
        output = step(driver, {0: 1})
        assert (output.pooled, output.num_sampled_tokens) == (None, None)
        tokens += output.token_ids.tolist()
    assert tokens == alone


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_that_looks_like_decodes_may_have_the_last_token_of_a_prompt(dtype: str) -> None:
    alone = Driver("pagoda-tiny", dtype=dtype).generate([prompts()[3]], max_tokens=6)[0].output
    driver = Driver("pagoda-tiny", dtype=dtype)
    tokens = step(driver, {0: 16}, [request(0, prompts()[3], None)]).token_ids.tolist()
    for number, prompt in enumerate(([7], [8, 9])):  # one new in the step, one that has a token before it
        new = [request(1, prompt, PoolingParams())]
        for count in range(1, len(prompt) + 1):
            output = driver.execute(new_requests=new, num_seqs=2, slots=np.array([0, 1]))
            new = []
            assert set(embeddings(output)) == ({1} if count == len(prompt) else set())
            tokens += output.token_ids.tolist()
        assert float(embeddings(output)[1] @ reference(prompt)) > (0.99 if dtype == "bfloat16" else 1 - 1e-5)
        assert len(tokens) == 2 + 2 * number
    for freed in ([1], [], []):
        driver._to_free = freed
        output = driver.execute(num_seqs=1, slots=np.array([0]))
        tokens += output.token_ids.tolist()
    assert tokens[:6] == alone


def test_after_a_cached_prefix_only_the_rest_is_computed() -> None:
    driver = Driver("pagoda-tiny")
    prompt = prompts()[6]
    step(driver, {0: 90}, [request(0, prompt, None)])
    again = NewRequest(
        slot=1,
        request_id="r1",
        prompt_token_ids=np.array(prompt),
        sampling_params=SamplingParams(temperature=0),
        block_ids=np.array([0, 1, 2, 3, 4, 60]),
        num_computed_tokens=80,
        pooling=PoolingParams(),
    )
    output = step(driver, {1: 10}, [again])
    assert np.abs(embeddings(output)[1] - reference(prompt)).max() < 1e-4


def test_a_slot_forgets_that_its_last_sequence_was_pooled() -> None:
    driver = Driver("pagoda-tiny")
    step(driver, {0: 16}, [request(0, prompts()[3], PoolingParams())])
    output = step(driver, {0: 16}, [request(0, prompts()[3], None)])
    assert output.pooled is None
    assert output.token_ids.size == 1


def test_what_is_not_finite_is_that_sequences_fault() -> None:
    driver = Driver("pagoda-tiny")
    worker: Any = driver.worker
    runner = worker._runner
    runner._kv_cache.k_caches[0][BLOCKS_PER_SLOT] = float("nan")
    cached = request(1, prompts()[5], PoolingParams(), computed=16)
    output = step(driver, {0: 16, 1: 17}, [request(0, prompts()[3], PoolingParams()), cached])
    assert set(embeddings(output)) == {0}
    (bad,) = output.bad_slots
    assert (bad.slot, bad.message) == (1, "the model gave no finite hidden state for the prompt's last token")
    assert not torch.isnan(runner._kv_cache.k_caches[0][BLOCKS_PER_SLOT]).any()
