"""Transfers of blocks and states in the next step. Plain data."""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Transfers:
    """Transfers in the next step, in the order in which the worker does them."""

    swap_out: dict[int, int] = field(default_factory=dict)
    """Device block by host block: a host block that is reused within a step gets only the last content."""
    swap_in: list[tuple[int, int]] = field(default_factory=list)
    """(host block, device block)"""
    copy: dict[int, int] = field(default_factory=dict)
    """Source by target; both are device blocks."""
    states_to_load: Sequence[tuple[int, int]] = ()
    """(snapshot, slot)"""
    states_to_save: Sequence[tuple[int, int]] = ()
    """(slot, snapshot)"""
    states_to_swap_out: Sequence[tuple[int, int]] = ()
    """(snapshot, host snapshot)"""
    states_to_swap_in: Sequence[tuple[int, int]] = ()
    """(host snapshot, snapshot)"""
