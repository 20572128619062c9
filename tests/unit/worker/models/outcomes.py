"""What comes of a checkpoint, in numbers that an option or a tensor must change to mean something."""

from pathlib import Path
from typing import TypeAlias

import torch
from safetensors.torch import save_file

from pagoda_common.params.sampling_params import SamplingParams
from tests.unit.worker.driver import Driver
from tests.unit.worker.models.reference import make_prompts

NUM_TOKENS = 8

Outcome: TypeAlias = list[float]
"""Greedy tokens and their log probabilities."""


def outcome_of(directory: Path) -> Outcome:
    """Of three prompts."""
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, logprobs=0, ignore_eos=True)
    found: Outcome = []
    for one in Driver(directory).generate(make_prompts((5, 40, 90)), params, max_tokens=NUM_TOKENS):
        found += [float(token) for token in one.output]
        found += [row[token] for token, row in zip(one.output, one.logprobs, strict=True)]
    return found


def differ(one: Outcome, other: Outcome) -> bool:
    """By more than rounding."""
    return max(abs(a - b) for a, b in zip(one, other, strict=True)) > 1e-2


def copied(directory: Path, target: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """A checkpoint with other tensors."""
    for path in directory.glob("*.json"):
        (target / path.name).write_bytes(path.read_bytes())
    save_file({name: one.contiguous() for name, one in tensors.items()}, target / "model.safetensors")
    return target
