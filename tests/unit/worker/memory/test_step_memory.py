"""What the largest step is measured to take on a device: the memory is made up, the steps are not."""

from dataclasses import replace

import pytest
import torch

from pagoda_worker.loader.loaded_model import LoadedModel
from pagoda_worker.memory import profiling
from pagoda_worker.memory.profiling import measured_budget, peak_activation_bytes
from pagoda_worker.steps.model_runner import ModelRunner
from pagoda_worker.steps.step import StepInput, StepOutput
from tests.unit.worker.driver import Driver

BEFORE, A_TOKEN, A_SEQUENCE = 1000, 10, 7
"""Bytes in use before a step, and what each token and each sampled sequence of it takes."""
TOTAL, FREE = 20_000, 9_000


class Memory:
    """A device's allocator. It keeps the memory of the largest step until its cache is emptied."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reserved = BEFORE + 5000  # left by an earlier step
        self.peak = 10**9
        self.steps: list[tuple[int, int]] = []
        """Sequences of each step, and its tokens."""
        for name in ("empty_cache", "reset_peak_memory_stats", "memory_reserved", "max_memory_reserved"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (FREE, TOTAL))
        monkeypatch.setattr(profiling, "free_memory_bytes", lambda device: FREE)
        execute = ModelRunner.execute

        def executed(runner: ModelRunner, step: StepInput) -> StepOutput:
            output = execute(runner, step)
            assert all(token >= 0 for token in output.token_ids.tolist()), "every sequence samples"
            assert all(request.sampling_params.top_p < 1 for request in step.new_requests), "a filter sorts all logits"
            num_tokens = int(step.num_scheduled_tokens.sum())
            self.steps.append((step.num_seqs, num_tokens))
            self.reserved += num_tokens * A_TOKEN + step.num_seqs * A_SEQUENCE
            self.peak = max(self.peak, self.reserved)
            return output

        monkeypatch.setattr(ModelRunner, "execute", executed)

    def empty_cache(self) -> None:
        self.reserved = BEFORE

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        self.peak = self.reserved

    def memory_reserved(self, device: torch.device) -> int:
        return self.reserved

    def max_memory_reserved(self, device: torch.device) -> int:
        return self.peak


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    return Memory(monkeypatch)


def loaded_tiny(max_num_seqs: int, max_num_batched_tokens: int) -> LoadedModel:
    loaded = Driver("pagoda-tiny", num_blocks=4, max_model_len=50).worker._loaded_model()
    scheduler = replace(
        loaded.config.scheduler, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens
    )
    return replace(loaded, config=replace(loaded.config, scheduler=scheduler))


@pytest.mark.parametrize(
    ("max_num_seqs", "max_num_batched_tokens", "steps"),
    [
        (6, 40, [(1, 40), (6, 36)]),
        (6, 200, [(4, 196), (6, 198)]),  # prompts of 49: one token is left to sample
        (6, 4, [(1, 4), (4, 4)]),
    ],
)
def test_the_largest_step_is_one_long_prompt_or_many_sequences(
    max_num_seqs: int, max_num_batched_tokens: int, steps: list[tuple[int, int]], memory: Memory
) -> None:
    found = peak_activation_bytes(loaded_tiny(max_num_seqs, max_num_batched_tokens))
    assert memory.steps == steps
    assert found == max(num_tokens * A_TOKEN + count * A_SEQUENCE for count, num_tokens in steps)


def test_the_cache_gets_what_the_largest_step_leaves(memory: Memory) -> None:
    loaded = loaded_tiny(6, 40)
    budget = measured_budget(loaded)
    utilization = loaded.config.cache.gpu_memory_utilization
    assert (budget.total_bytes, budget.free_bytes, budget.utilization) == (TOTAL, FREE, utilization)
    assert (budget.activation_bytes, budget.graph_bytes) == (40 * A_TOKEN + A_SEQUENCE, 0)


def test_each_guess_of_each_sequence_is_a_row_that_is_sampled(memory: Memory) -> None:
    loaded = loaded_tiny(6, 40)
    speculative = replace(loaded.config.speculative, num_speculative_tokens=2)
    peak_activation_bytes(replace(loaded, config=replace(loaded.config, speculative=speculative)))
    assert memory.steps == [(1, 40), (18, 36)]
