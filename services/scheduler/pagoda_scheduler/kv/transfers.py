"""Moves of blocks and states that go with the next step. Plain data."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Transfers:
    """Moves that go with the next step, in the order in which the worker does them."""

    swap_out: dict[int, int] = field(default_factory=dict)
    """Device block by host block: one that changes hands within a step takes the last content only."""
    swap_in: list[tuple[int, int]] = field(default_factory=list)
    """(host block, device block)"""
    copy: dict[int, int] = field(default_factory=dict)
    """Source by target, both device blocks."""
    states_to_load: list[tuple[int, int]] = field(default_factory=list)
    """(snapshot, slot)"""
    states_to_save: list[tuple[int, int]] = field(default_factory=list)
    """(slot, snapshot)"""
    states_to_swap_out: list[tuple[int, int]] = field(default_factory=list)
    """(snapshot, host snapshot)"""
    states_to_swap_in: list[tuple[int, int]] = field(default_factory=list)
    """(host snapshot, snapshot)"""
