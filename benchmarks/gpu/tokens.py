"""Greedy tokens of the embedded model in float32: the same with CUDA graphs and without, with steps that overlap and
without, with kernels and without."""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch

from pagoda_common.config.engine_config import EngineConfig, ModelConfig, SchedulerConfig
from pagoda_common.params.sampling_params import SamplingParams
from pagoda_kernels.selection import triton_on_cpu, use_references
from pagoda_worker.steps.pending_step import PendingStep
from pagoda_worker.steps.step import NewRequest, StepInput, StepOutput
from pagoda_worker.worker import Worker

BLOCKS_EACH = 16
BLOCK_SIZE = 16
VARIANTS: dict[str, dict[str, Any]] = {
    "kernels and graphs": {"reference_kernels": ("none",)},
    "kernels, one step after the other": {"reference_kernels": ("none",), "overlaps": False},
    "kernels without graphs": {"reference_kernels": ("none",), "enforce_eager": True},
    "PyTorch": {"reference_kernels": ("all",), "overlaps": False},
}
"""Options of the model, and whether steps overlap. What the last one gives is right."""


def compare_tokens(device: torch.device, *, is_small: bool) -> list[dict[str, Any]]:
    """A row for each variant and batch, as of a check: which of its tokens are those of the last variant."""
    batches, num_steps = ((2,), 2) if is_small else ((1, 3, 11, 17, 64), 40)
    found = {
        name: [_generate(device, batch, num_steps, options, is_small=is_small) for batch in batches]
        for name, options in VARIANTS.items()
    }
    expected = found[list(VARIANTS)[-1]]
    return [
        {
            "operation": "tokens",
            "case": f"{name}, batch {batch}, {num_steps} steps",
            "num_other": int((mine != right).sum()),
            "is_right": bool((mine == right).all()),
        }
        for name, outputs in found.items()
        for batch, mine, right in zip(batches, outputs, expected, strict=True)
    ]


def _generate(
    device: torch.device, batch: int, num_steps: int, options: dict[str, Any], *, is_small: bool
) -> np.ndarray[Any, Any]:
    """[num_steps, batch] token ids, after prompts of different lengths in one step."""
    worker = Worker(overlaps=options.get("overlaps", True))
    asked = {name: value for name, value in options.items() if name != "overlaps"}
    model = ModelConfig(dtype="float32", device="cuda" if device.type == "cuda" else "cpu", **asked)
    try:
        with triton_on_cpu() if is_small else nullcontext():
            worker.init_device(EngineConfig(model=model, scheduler=SchedulerConfig(max_num_seqs=batch)))
            worker.load_model(lambda loaded, total: None)
            worker.initialize_cache(num_blocks=BLOCKS_EACH * batch, num_cpu_blocks=0)
            generator, lengths = np.random.default_rng(batch), 1 + (2 if is_small else 13) * np.arange(batch) % 150
            requests = [
                NewRequest(
                    slot=slot,
                    request_id=str(slot),
                    prompt_token_ids=generator.integers(3, 3000, length),
                    sampling_params=SamplingParams(temperature=0.0, max_tokens=num_steps, ignore_eos=True),
                    block_ids=np.arange(slot * BLOCKS_EACH, (slot + 1) * BLOCKS_EACH),
                )
                for slot, length in enumerate(lengths.tolist())
            ]
            slots = np.arange(batch)
            first = StepInput(new_requests=requests, num_seqs=batch, slots=slots, num_scheduled_tokens=lengths)
            later = StepInput(num_seqs=batch)
            return np.stack([output.token_ids for output in run_ahead(worker, [first, *[later] * (num_steps - 1)])])
    finally:
        use_references(())


def run_ahead(worker: Worker, steps: Sequence[StepInput]) -> Iterator[StepOutput]:
    """The outputs of steps, each begun as early as the worker takes it."""
    begun: deque[PendingStep] = deque()
    for step in steps:
        while begun and (len(begun) > 1 or not worker.can_begin(step)):
            yield begun.popleft().result()
        begun.append(worker.begin(step))
    while begun:
        yield begun.popleft().result()
