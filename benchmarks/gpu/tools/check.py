"""One call of one operation, and how far its result is from the reference's."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


@dataclass(frozen=True, slots=True)
class Pair:
    """What a kernel gave, and what it should have given."""

    actual: Tensor
    expected: Tensor
    tolerance: float

    @property
    def error(self) -> float:
        """The greatest difference, in tolerances (absolute and relative); at most 1 is right. NaN must meet NaN."""
        actual, expected = self.actual.double(), self.expected.double()
        if actual.shape != expected.shape or not torch.equal(actual.isnan(), expected.isnan()):
            return float("inf")
        if not actual.numel():
            return 0.0
        differs = (actual != expected) & ~expected.isnan()
        gap = torch.where(differs, (actual - expected).abs() / (1 + expected.abs()), 0.0)
        return float(gap.amax()) / self.tolerance


@dataclass(frozen=True, slots=True)
class Check:
    """One call of one operation."""

    operation: str
    case: str
    run: Callable[[], list[Pair]]
