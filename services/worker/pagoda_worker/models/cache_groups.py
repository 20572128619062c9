"""Groups layers by the data that they keep of a sequence, and assigns them to buffers. Knows no tensors."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias

from pagoda_common.errors import ConfigError

CacheKind: TypeAlias = Literal["full", "latent", "window", "recurrent", "none"]
FULL_COST = 32
"""Cost of a layer that keeps every token, relative to one with a window: prompts are longer than windows."""


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that keep the same data of a sequence."""

    kind: CacheKind
    """full: every token; latent: every token, as one vector from which keys and values are computed; window: the last
    `window` tokens; recurrent: a state of fixed size; none: nothing."""
    layers: tuple[int, ...]
    """Indexes among the attention layers, or among the recurrent ones."""
    window: int | None = None
    """Number of tokens that a query sees, itself included."""

    @property
    def has_blocks(self) -> bool:
        """Whether the group keeps tokens in blocks."""
        return self.kind in ("full", "latent", "window")

    def num_blocks(self, num_tokens: int, *, block_size: int, chunk: int) -> int:
        """Maximum number of blocks of a sequence of `num_tokens` at a time, if a step computes at most `chunk`."""
        kept = num_tokens if self.window is None else min(num_tokens, self.window + chunk)
        whole = -(-num_tokens // block_size)
        return whole if kept == num_tokens else min(whole, -(-kept // block_size) + 1)


@dataclass(frozen=True)
class CacheLayout:
    """The groups of a model. Those with blocks have the same number of layers each, or fewer; the i-th layer of each
    lies in buffer i, under the group's own block ids, so that any free block serves any group.

    Source: the hybrid KV cache manager of vLLM.
    """

    groups: tuple[CacheGroup, ...]
    """Groups with blocks; full ones first."""
    recurrent: tuple[int, ...] = ()
    """Layers with a state, ascending."""
    uncached: tuple[int, ...] = ()
    """Layers that keep nothing, so that sequences are computed whole."""

    @property
    def buffers(self) -> tuple[int, ...]:
        """For each buffer of keys and values, a layer that uses it."""
        return max((group.layers for group in self.groups), key=len, default=())

    @cached_property
    def places(self) -> dict[int, tuple[int, int]]:
        """Group and buffer of each layer that has blocks."""
        return {
            layer: (number, buffer)
            for number, group in enumerate(self.groups)
            for buffer, layer in enumerate(group.layers)
        }

    @property
    def is_plain(self) -> bool:
        """Whether every layer keeps every token."""
        is_whole = len(self.groups) == 1 and self.groups[0].window is None
        return is_whole and not self.recurrent and not self.uncached

    @cached_property
    def has_windows(self) -> bool:
        """Whether blocks are freed before their sequence ends."""
        return any(group.kind == "window" for group in self.groups)

    @property
    def all_groups(self) -> tuple[CacheGroup, ...]:
        """All groups: those with blocks, then the one with states, then the one that keeps nothing."""
        others = (("recurrent", self.recurrent), ("none", self.uncached))
        return self.groups + tuple(CacheGroup(kind, layers) for kind, layers in others if layers)  # type: ignore[arg-type]


def plain_layout(num_layers: int) -> CacheLayout:
    """Every layer keeps every token, in one group."""
    return CacheLayout((CacheGroup("full", tuple(range(num_layers))),))


def groups_by_window(windows: Sequence[int | None]) -> tuple[CacheGroup, ...]:
    """One group for each window of attention layers; None: no window."""
    by_window: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        by_window.setdefault(window, []).append(layer)
    return tuple(
        CacheGroup("full" if window is None else "window", tuple(layers), window)
        for window, layers in by_window.items()
    )


def check_chunks(chunks: Iterable[int | None], *, block_size: int, max_model_len: int) -> None:
    """Check that attention chunks begin at blocks.

    Raises:
        ConfigError: a chunk does not.
    """
    for chunk in chunks:
        if chunk is not None and chunk < max_model_len and chunk % block_size:
            raise ConfigError(
                f"block_size is {block_size}, must divide the model's attention_chunk_size, {chunk}",
                field="block_size",
            )


def make_layout(declared: Sequence[CacheGroup], *, max_model_len: int, knows_groups: bool) -> CacheLayout:
    """The layout for a model's groups.

    Args:
        knows_groups: the scheduler frees blocks outside of windows and keeps snapshots of states; else every layer
        keeps every token.

    Raises:
        ConfigError: the model has states, or keeps nothing, and the scheduler does not support that.
    """
    recurrent = tuple(sorted(layer for group in declared if group.kind == "recurrent" for layer in group.layers))
    uncached = tuple(sorted(layer for group in declared if group.kind == "none" for layer in group.layers))
    whole: CacheKind = "latent" if any(group.kind == "latent" for group in declared) else "full"
    paged: dict[int | None, list[int]] = {None: []}
    for group in declared:
        if group.has_blocks:
            is_full = group.window is None or group.window >= max_model_len or not knows_groups
            paged.setdefault(None if is_full else group.window, []).extend(group.layers)
    if recurrent and not knows_groups:
        raise ConfigError(
            "the model has layers with a recurrent state, which this scheduler does not know: upgrade the scheduler",
            field="takes_cache_groups",
        )
    if uncached and not knows_groups:
        raise ConfigError(
            "the model keeps no cache, which this scheduler does not know: upgrade the scheduler",
            field="takes_cache_groups",
        )
    kinds = {window: sorted(layers) for window, layers in paged.items() if layers}
    size = group_size(
        num_full=len(kinds.get(None, ())), num_others=[len(kinds[window]) for window in kinds if window is not None]
    )
    groups = [
        CacheGroup(whole if window is None else "window", tuple(layers[start : start + size]), window)
        for window, layers in kinds.items()
        for start in range(0, len(layers), size)
    ]
    return CacheLayout(tuple(groups), recurrent, uncached)


def group_size(*, num_full: int, num_others: Sequence[int] = ()) -> int:
    """Number of layers per group for kinds of these sizes: the one that leaves the fewest places empty, the largest
    among equals.

    It is at least the count of the rarest kind, since each group has its own block table. An empty place next to layers
    that keep every token costs the most.
    """
    counts = [count for count in (num_full, *num_others) if count]
    if not counts:
        return 1

    def wasted(size: int) -> int:
        return FULL_COST * (-num_full % size) + sum(-count % size for count in num_others)

    return min(range(min(counts), max(counts) + 1), key=lambda size: (wasted(size), -size))
