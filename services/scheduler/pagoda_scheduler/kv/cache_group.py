"""Cache groups: layers that keep the same data of a sequence, and the size of the cache. Knows no requests."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

NO_BLOCK = 0xFFFFFFFF
"""Entry of a block table for a block that left the group's window. No query reads it."""

CacheKind: TypeAlias = Literal["full", "window", "recurrent", "none"]


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that keep the same data of a sequence."""

    kind: CacheKind
    """full: every token, in blocks. window: the last `window` tokens, in blocks of the same pool. recurrent: a state of
    fixed size in the sequence's slot, with snapshots in a separate pool. none: nothing."""
    num_layers: int = 1
    window: int = 0
    """For kind window: number of tokens that a query sees, including itself."""

    def __post_init__(self) -> None:
        """Raises ValueError when the window does not fit the kind."""
        if (self.kind == "window") != (self.window > 0):
            raise ValueError(f"window is {self.window}, must be at least 1 for kind window and 0 for kind {self.kind}")

    @property
    def has_blocks(self) -> bool:
        """Whether the group keeps tokens in blocks."""
        return self.kind in ("full", "window")


ONE_GROUP = (CacheGroup("full"),)
"""The cache groups of a model that reports none."""


def has_states(groups: Iterable[CacheGroup]) -> bool:
    """Whether any layers are recurrent."""
    return any(group.kind == "recurrent" for group in groups)


def computes_whole(groups: Iterable[CacheGroup]) -> bool:
    """Whether any layers keep nothing, so that a sequence must be computed in one step."""
    return any(group.kind == "none" for group in groups)


@dataclass(frozen=True, slots=True)
class CacheSizes:
    """Size of the cache."""

    num_blocks: int
    num_host_blocks: int = 0
    """Number of blocks in host memory, for swapping."""
    num_state_snapshots: int = 0
    """Number of snapshots of recurrent state, in addition to the states of the slots."""
    num_host_state_snapshots: int = 0

    def on_device(self) -> "CacheSizes":
        """The same sizes without host memory."""
        return replace(self, num_host_blocks=0, num_host_state_snapshots=0)
