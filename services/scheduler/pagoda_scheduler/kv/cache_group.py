"""Cache groups: the data that layers keep of a sequence, and the room for it. Knows no requests."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

NO_BLOCK = 0xFFFFFFFF
"""In a block table: a block that left the group's window. No query reads it."""

CacheKind: TypeAlias = Literal["full", "window", "recurrent", "none"]


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that keep the same of a sequence."""

    kind: CacheKind
    """full: every token, in blocks. window: the last `window` tokens, in blocks of the same pool. recurrent: a state of
    fixed size in the sequence's slot, with snapshots in a pool of their own. none: nothing."""
    num_layers: int = 1
    window: int = 0
    """For kind window: number of tokens that a query sees, including itself."""

    def __post_init__(self) -> None:
        """Raises ValueError when the window does not fit the kind."""
        if (self.kind == "window") != (self.window > 0):
            raise ValueError(f"window is {self.window}, must be at least 1 for kind window and 0 for kind {self.kind}")

    @property
    def has_blocks(self) -> bool:
        """Whether it keeps tokens in blocks."""
        return self.kind in ("full", "window")


ONE_GROUP = (CacheGroup("full"),)
"""The cache groups of a model that does not describe them."""


def has_states(groups: Iterable[CacheGroup]) -> bool:
    """Whether some layers are recurrent."""
    return any(group.kind == "recurrent" for group in groups)


def computes_whole(groups: Iterable[CacheGroup]) -> bool:
    """Whether some layers keep nothing, so that a sequence is computed in one step."""
    return any(group.kind == "none" for group in groups)


@dataclass(frozen=True, slots=True)
class CacheSizes:
    """Room for what sequences keep."""

    num_blocks: int
    num_host_blocks: int = 0
    """In host memory, for swapping."""
    num_state_snapshots: int = 0
    """Number of snapshots of recurrent state, besides the states of the slots."""
    num_host_state_snapshots: int = 0

    def on_device(self) -> "CacheSizes":
        """The same without host memory."""
        return replace(self, num_host_blocks=0, num_host_state_snapshots=0)
