"""Gives positions of a packed batch to transformers modules that would count tokens themselves."""

import inspect
from typing import Any

from torch import nn

from pagoda_worker.models.transformers_model.attention import CURRENT


def give_positions(backbone: nn.Module) -> int:
    """Make position tables look up the positions of the current pass.

    Returns:
        The changed tables.
    """
    count = 0
    for module in backbone.modules():
        if "Positional" not in type(module).__name__:
            continue
        forward = module.forward
        if "position_ids" in inspect.signature(forward).parameters:
            module.forward = _Given(forward)
            count += 1
    return count


def position_offset(backbone: nn.Module) -> int:
    """Offset of positions: RoBERTa's family starts after the padding token's id."""
    for module in backbone.modules():
        if hasattr(module, "create_position_ids_from_input_ids") and hasattr(module, "padding_idx"):
            return int(module.padding_idx) + 1  # type: ignore[arg-type]  # an int, in an nn.Module
    return 0


class _Given:
    """A forward that uses the positions of the pass."""

    def __init__(self, forward: Any) -> None:
        self._forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        assert CURRENT.running is not None, "tables are read within a pass of their model"
        return self._forward(*args, **kwargs | {"position_ids": CURRENT.running.positions})
