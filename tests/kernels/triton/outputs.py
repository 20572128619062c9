"""Outputs that hold NaN before a kernel writes them: what it leaves out is seen."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def nan_filled_outputs() -> Iterator[None]:
    """Within: torch.empty gives NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
