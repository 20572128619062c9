"""Attention of transformers' modules over packed whole sequences, with masks as functions.

Knows the interfaces of transformers; no cache and no checkpoints.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

from pagoda_common.errors import ModelLoadError
from pagoda_kernels.attention.sequence_attention import sequence_attention

NAME = "pagoda_packed"
"""Name of the implementation in transformers."""
MaskFunction: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""transformers' mask function: from batch, head, query and key to whether the query sees the key."""


@dataclass(frozen=True, slots=True)
class PackedMask:
    """A transformers mask as a rule: which keys of its own sequence a query sees."""

    function: MaskFunction
    made: dict[int, Tensor | None] = field(default_factory=dict)
    """Masks by first token of a sequence: [length, length] bool; None: each query sees all keys."""

    @property
    def is_causal(self) -> bool:
        """Whether the rule is the plain causal mask."""
        return self.function is causal_mask_function

    def of(self, start: int, length: int, device: torch.device) -> Tensor | None:
        """The mask of one sequence; None: it hides nothing."""
        if self.function is bidirectional_mask_function or length == 1:
            return None
        if start not in self.made:
            places = torch.arange(start, start + length, device=device)
            zero = torch.zeros((), dtype=torch.int64, device=device)
            visible = self.function(zero, zero, places[:, None], places[None, :]).expand(length, length)
            self.made[start] = None if bool(visible.all()) else visible
        return self.made[start]

    def all_of(self, starts: Sequence[int], device: torch.device) -> list[Tensor | None] | None:
        """The mask of each sequence; None: none hides anything."""
        if self.function is bidirectional_mask_function:
            return None
        masks = [self.of(start, end - start, device) for start, end in pairwise(starts)]
        return masks if any(mask is not None for mask in masks) else None


@dataclass(slots=True)
class PackedRun:
    """One forward pass."""

    starts: Sequence[int]
    """First token of each sequence, then the number of tokens."""
    num_calls: int = 0
    """Number of layers that attended."""


class _Current(threading.local):
    """The current pass of this thread."""

    running: PackedRun | None = None


PACKED = _Current()


def attend(query: Tensor, key: Tensor, value: Tensor, *, slopes: Tensor | None = None) -> Tensor:
    """Attention of a Pagoda module in the current pass: each token over its whole sequence.

    Args:
        query, key, value: [num_tokens, num_heads, head_dim].
        slopes: as in `sequence_attention`.

    Returns:
        [num_tokens, num_heads, head_dim].
    """
    running = PACKED.running
    assert running is not None, "attention runs within a pass of its model"
    running.num_calls += 1
    return sequence_attention(query, key, value, running.starts, scale=query.shape[2] ** -0.5, slopes=slopes)


def attend_packed(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: PackedMask | None = None,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """[1, heads, num_tokens, head_dim] each to [1, num_tokens, heads, value_dim]: each sequence by itself."""
    running = PACKED.running
    assert running is not None, "attention runs within a pass of its model"
    if query.dim() != 4 or query.shape[0] != 1:
        raise ModelLoadError("its attention takes other shapes than heads of tokens")
    if softcap or s_aux is not None:
        raise ModelLoadError("its attention has sinks or bounded scores")
    running.num_calls += 1
    causal = attention_mask is None and bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    causal = causal or (attention_mask is not None and attention_mask.is_causal)
    masks = None if attention_mask is None or causal else attention_mask.all_of(running.starts, query.device)
    if masks is None:
        scale = query.shape[3] ** -0.5 if scaling is None else scaling
        q, k, v = (one[0].transpose(0, 1) for one in (query, key, value))
        return sequence_attention(q, k, v, running.starts, scale=scale, is_causal=causal)[None], None
    out = query.new_empty((1, query.shape[2], query.shape[1], value.shape[3]))
    many = query.shape[1] != key.shape[1]
    for start, end, mask in zip(running.starts[:-1], running.starts[1:], masks, strict=True):
        part = F.scaled_dot_product_attention(
            query[:, :, start:end],
            key[:, :, start:end],
            value[:, :, start:end],
            attn_mask=mask,
            scale=scaling,
            enable_gqa=many,
        )
        out[:, start:end] = part.transpose(1, 2)
    return out, None


def _mask(*args: Any, mask_function: MaskFunction, **others: Any) -> PackedMask:
    return PackedMask(mask_function)


def register() -> None:
    """Register the implementation with transformers; repeated calls have no effect."""
    AttentionInterface.register(NAME, attend_packed)
    AttentionMaskInterface.register(NAME, _mask)
