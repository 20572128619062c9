"""Replacements for transformers' attention interface: paged attention over packed batches, masks as rules, and a cache
that passes keys and values through. Knows the interfaces of transformers; no checkpoints."""

import threading
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache

from pagoda_common.errors import ModelLoadError
from pagoda_worker.models.attend import attend
from pagoda_worker.models.forward_context import ForwardContext
from pagoda_worker.models.model import AttentionLayer

NAME = "pagoda"
"""Name of the implementation in transformers."""
PROBED = (0, 1, 2, 5, 63, 1000, 1 << 20)
"""Query positions for which a mask is compared with its assumed rule."""
HARMLESS = frozenset(
    {
        *("dropout", "position_ids", "position_embeddings", "use_cache", "output_attentions", "output_hidden_states"),
        *("output_router_logits", "return_dict", "cache", "is_causal", "layer_idx", "cache_position", "token_type_ids"),
        *("logits_to_keep", "num_items_in_batch", "shape", "deterministic", "past_key_values", "training"),
    }
)
"""Arguments of attention without effect here."""


@dataclass(frozen=True, slots=True)
class MaskRule:
    """A transformers mask as a rule: each query sees itself and earlier keys."""

    window: int | None
    """Number of keys that a query sees, its own included; None: all."""
    is_known: bool = True
    """False: the mask follows another rule, and a layer that uses it cannot run."""

    def __getitem__(self, index: object) -> "MaskRule":
        """The mask of a part of the queries and keys."""
        return self


class PassingCache(Cache):  # type: ignore[misc]  # transformers: Any
    """A transformers cache that keeps nothing: keys and values are passed to attention, which has its own cache."""

    def __init__(self) -> None:
        super().__init__(layers=[])

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return both unchanged."""
        return key, value

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The cache is empty."""
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """The first query is the first key."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Keys, and where they begin."""
        return query_length, 0

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise ModelLoadError("its layers cache more than keys and values")

    get_conv_state = update_conv_state = get_recurrent_state = update_recurrent_state = _refuse
    update_indexer = has_previous_state = _refuse


@dataclass(slots=True)
class Run:
    """One forward pass: computes attention and masks for the module."""

    context: ForwardContext
    layers: tuple[AttentionLayer, ...]
    positions: Tensor
    given: Tensor | None = None
    """Final hidden states, which replace the inner module's."""
    has_masks: bool = True
    """Whether layers get rules for masks; else no masks."""
    calls: int = 0
    """Number of layers that ran."""

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: "Options") -> Tensor:
        """[1, heads, num_tokens, head_dim] each to [1, num_tokens, num_heads, value_dim]."""
        index, self.calls = self.calls, self.calls + 1
        query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
        return attend(query, key, value, self.context, self.layers[index], index, sinks=options.sinks)[None]


@dataclass(frozen=True, slots=True)
class Options:
    """Attention options that one layer requests."""

    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None


@dataclass(slots=True)
class Probe:
    """A forward pass without values, which records how each layer attends."""

    positions: Tensor
    given: Tensor | None = None
    has_masks: bool = True
    layers: list[AttentionLayer] = field(default_factory=list)
    modules: list[nn.Module] = field(default_factory=list)

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: Options) -> Tensor:
        """See Run."""
        if query.shape[2] != key.shape[2]:
            raise ModelLoadError("it attends to other keys than those of its own tokens")
        if options.sinks is not None and options.sinks.numel() != query.shape[1]:
            raise ModelLoadError("its sinks are not one for each head of a rank")
        self.modules.append(module)
        self.layers.append(
            AttentionLayer(
                num_heads=query.shape[1],
                num_kv_heads=key.shape[1],
                head_dim=max(query.shape[3], value.shape[3]),
                scale=options.scale,
                window=options.window,
                softcap=options.softcap,
                has_sinks=options.sinks is not None,
            )
        )
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])


Pass: TypeAlias = Run | Probe


class _Current(threading.local):
    """The current pass of this thread."""

    running: Pass | None = None


CURRENT = _Current()


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    running = CURRENT.running
    assert running is not None, "attention runs within a pass of its model"
    if isinstance(running, Probe):
        _check(module, query, attention_mask, others)
    window = attention_mask.window if isinstance(attention_mask, MaskRule) else sliding_window
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    return running.attend(module, query, key, value, Options(scale, window, softcap or None, s_aux)), None


def _check(module: nn.Module, query: Tensor, mask: Any, others: dict[str, Any]) -> None:
    """
    Raises:
        ModelLoadError: it is not causal attention over one packed batch, or it has unknown options.
    """
    is_bidirectional = others.get("is_causal", getattr(module, "is_causal", True)) is False
    is_known = isinstance(mask, MaskRule) and mask.is_known  # which says more than the flag
    if is_bidirectional and not is_known:
        raise ModelLoadError("its attention is not causal")
    if mask is not None and not isinstance(mask, MaskRule):
        raise ModelLoadError("it uses custom attention masks")
    unknown = [name for name, value in others.items() if name not in HARMLESS and value is not None]
    if isinstance(mask, MaskRule) and not mask.is_known:
        raise ModelLoadError("its attention masks are neither causal nor sliding windows")
    if unknown:
        raise ModelLoadError(f"its attention takes {', '.join(sorted(unknown))}")
    if query.dim() != 4 or query.shape[0] != 1:
        raise ModelLoadError("its attention takes other shapes than heads of tokens")


def _mask(*args: Any, mask_function: Any, local_size: int | None = None, **others: Any) -> MaskRule | None:
    """A rule instead of a mask; a probe compares it with the function that makes the mask."""
    running = CURRENT.running
    if not isinstance(running, Probe):
        return MaskRule(local_size) if running is None or running.has_masks else None
    rule = MaskRule(local_size, _follows(mask_function, local_size))
    if running.has_masks:
        return rule
    if rule != MaskRule(None):
        raise ModelLoadError("it uses custom attention masks")
    return None


def _follows(mask_function: Any, window: int | None) -> bool:
    """Whether a mask is the rule of a window."""
    for query in PROBED:
        first = max(0, query - (window or query) - 2)
        keys = torch.arange(first, query + 3, device="cpu") if query - first < 1 << 16 else _ends(first, query)
        if not torch.equal(_visible(mask_function, query, keys), _visible(_rule(window), query, keys)):
            return False
    return True


def _ends(first: int, query: int) -> Tensor:
    return torch.cat([torch.arange(at, at + 103, device="cpu") for at in (first, query - 100)])


def _rule(window: int | None) -> Any:
    def function(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (key > query - (window or 1 << 40))

    return function


def _visible(function: Any, query: int, keys: Tensor) -> Tensor:
    with torch.device("cpu"):
        zero = torch.zeros_like(keys)
        result: Tensor = function(zero, zero, torch.full_like(keys, query), keys)
    return result.expand_as(keys).bool()


def register() -> None:
    """Register the implementation with transformers; repeated calls have no effect."""
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _mask)
