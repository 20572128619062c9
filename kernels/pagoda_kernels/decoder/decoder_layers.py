"""The layers of a decoder in one call, where all of their operations have a C++ kernel: no Python between them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pagoda_kernels.attention.plan import AttentionPlan
from pagoda_kernels.attention.rope_store import HeadNorms
from pagoda_kernels.decoder.decode_rows import IntArray, SequenceColumns
from pagoda_kernels.layers.act_and_mul import ACTIVATIONS
from pagoda_kernels.linear.linear_weights import LinearWeights, native_weights
from pagoda_kernels.lora.add_lora import GroupedRows
from pagoda_kernels.moe.experts import Mixture, MixtureWeights, has_mixture
from pagoda_kernels.native.library import native

OPERATIONS = ("act_and_mul", "packed_linear", "paged_attention", "quantized_linear", "rms_norm", "rope_store")
"""Operations that one call replaces: it computes the same as their kernels, bit by bit."""
ACTIVATION_NAMES = tuple(ACTIVATIONS)
"""Their places are the numbers that the kernels know them by."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionWeights:
    """Grouped-query attention with rotated queries and keys."""

    qkv: LinearWeights
    output: LinearWeights
    head_norms: HeadNorms | None
    rotation: int | None
    """Which of a call's; None rotates nothing."""
    is_interleaved: bool
    scale: float
    softcap: float | None
    window: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class FeedForwardWeights:
    """down(activation(gate(x)) * up(x))."""

    gate_up: LinearWeights
    down: LinearWeights
    activation: str
    """A name in ACTIVATIONS."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerWeights:
    """x += attention(norm(x)), then x += mlp(norm(x)); all tensors of one data type."""

    attention_norm: Tensor
    """[hidden_size], of a root-mean-square norm; so is mlp_norm."""
    mlp_norm: Tensor
    eps: float
    weight_offset: float
    """Added to the weights of both norms."""
    attention: AttentionWeights
    mlp: FeedForwardWeights | MixtureWeights

    @property
    def linears(self) -> tuple[LinearWeights, ...]:
        """Its matrices but those of a mixture, in the order in which they are used."""
        attention = self.attention.qkv, self.attention.output
        return attention if isinstance(self.mlp, MixtureWeights) else (*attention, self.mlp.gate_up, self.mlp.down)


@dataclass(frozen=True, kw_only=True, slots=True)
class EndWeights:
    """The ends of a model: rows of a table before the layers, and linear(norm(x)) after them: logits."""

    embedding: LinearWeights
    """[vocab_size, hidden_size], in any form."""
    norm: Tensor
    """[hidden_size], of a root-mean-square norm."""
    eps: float
    weight_offset: float
    linear: LinearWeights


class LayerAdapters(NamedTuple):
    """Adapters of some rows of a batch, for all layers."""

    rows: GroupedRows
    fields: Tensor
    """[num_groups, num_places, most parts, NUM_FIELDS] int64: a LoraTable's for each place."""
    places: Tensor
    """[num_layers, 4] int64, of `matrix_names`; -1: no adapter changes it."""


class DecoderLayers:
    """Layers with their weights and their part of the KV cache. One caller at a time."""

    def __init__(
        self,
        layers: Sequence[LayerWeights],
        *,
        k_caches: Sequence[Tensor],
        v_caches: Sequence[Tensor],
        num_heads: int,
        rotations: Sequence[tuple[Tensor, Tensor]],
        groups: Sequence[int] | None = None,
        ends: EndWeights | None = None,
    ) -> None:
        """Weights and caches are used where they are, and are not to be replaced while this is in use.

        Args:
            groups: which of a call's plans and slot mappings each layer has; None: all have the one there is.
            rotations: cosines and sines of every position for each, [max_positions, 1, angles] float32.
            ends: for `logits`.
            k_caches, v_caches: one a layer, [num_blocks, block_size, num_kv_heads, head_dim] bfloat16.

        Raises:
            RuntimeError: there is no kernel for it (see `has_decoder_layers`).
        """
        kernel = native("decoder_layers")
        if kernel is None:
            raise RuntimeError("this library of C++ kernels has no decoder_layers")
        self._kept = layers, tuple(k_caches), tuple(v_caches), ends
        """The kernel has no more than pointers."""
        self.matrix_names = [[linear.name for linear in layer.linears] for layer in layers]
        """Names of each layer's matrices: qkv, output, and gate_up and down except for a mixture."""
        num_kv_heads, head_dim = k_caches[0].shape[2:]
        self._kernel = kernel(num_heads, num_kv_heads, head_dim)
        groups = [0] * len(layers) if groups is None else groups
        for layer, k_cache, v_cache, group in zip(layers, k_caches, v_caches, groups, strict=True):
            attention, mlp = layer.attention, layer.mlp
            self._kernel.add(
                layer.attention_norm,
                layer.mlp_norm,
                layer.eps,
                layer.weight_offset,
                *(attention.head_norms or (None, None, 0.0, 0.0, False)),
                [native_weights(linear) for linear in layer.linears],
                0 if isinstance(mlp, MixtureWeights) else ACTIVATION_NAMES.index(mlp.activation),
                -1 if attention.rotation is None else attention.rotation,
                attention.is_interleaved,
                attention.scale,
                attention.softcap or 0.0,
                attention.window or 0,
                k_cache,
                v_cache,
                group,
            )
            if isinstance(mlp, MixtureWeights):
                self._kernel.mix(Mixture(mlp).kernel)

        for cos, sin in rotations:
            self._kernel.rotate(cos, sin)
        self.has_ends = ends is not None
        """`logits` may be called."""
        self._vocab_size = 0
        if ends is not None:
            self._vocab_size = ends.linear.out_features
            head = ends.norm, ends.eps, ends.weight_offset, native_weights(ends.linear)
            self._kernel.ends(native_weights(ends.embedding), ends.embedding.is_plain, *head)

    def __call__(
        self,
        x: Tensor,
        plans: Sequence[AttentionPlan],
        slot_mappings: Sequence[Tensor],
        positions: Tensor,
        adapters: LayerAdapters | None = None,
    ) -> Tensor:
        """All layers over a batch, whose keys and values go into the cache.

        Args:
            x: [num_tokens, hidden_size] bfloat16, contiguous; changed.
            plans: one a group, of the same lengths.
            slot_mappings: one a group, [num_tokens] int64, no -1.
            positions: [num_tokens] int64.
            adapters: None: no token has one.

        Returns:
            x.
        """
        self._kernel.forward(x, *_batch(plans, slot_mappings), positions, _tensors(adapters))
        return x

    def logits(
        self,
        input_ids: Tensor,
        plans: Sequence[AttentionPlan],
        slot_mappings: Sequence[Tensor],
        positions: Tensor,
        rows: Tensor,
        adapters: LayerAdapters | None = None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """The whole model, and logits for some of the tokens: of others, the last layer makes keys and values alone.

        Measured on 2 cores, 12 layers of width 768, against all of the last layer: a prompt of 2,048 tokens 0.49 s
        instead of 0.54.

        Args:
            input_ids: [num_tokens] int64.
            rows: [n] int64, places among the tokens.
            adapters: of the layers, not of the ends. None: no token has one.

        Returns:
            [n, vocab_size] float32; and what `argmax` gives of it.
        """
        logits = torch.empty(rows.shape[0], self._vocab_size)
        values, indices = torch.empty(rows.shape[0]), torch.empty(rows.shape[0], dtype=torch.int64)
        batch = *_batch(plans, slot_mappings), positions, _tensors(adapters)
        self._kernel.forward_to_logits(input_ids, *batch, rows, logits, values, indices)
        return logits, (values, indices)

    def decode(
        self,
        slots: IntArray,
        columns: SequenceColumns,
        *,
        max_tokens: int,
        more_tables: npt.NDArray[np.int32] | None = None,
    ) -> IntArray | None:
        """One token of each sequence: `decode_rows`, `logits` and `append_rows` in one call, for steps so short that
        calls count.

        Args:
            slots: [n].
            more_tables: [groups - 1, slots, blocks], block tables as of the columns for the groups but the first.

        Returns:
            [n] the likeliest tokens; None: it is no such step, not all are greedy, the tokens have no column for one
            more, or some logits are not finite. Nothing but the cache has changed then.
        """
        token_ids = np.empty(slots.size, dtype=np.int64)
        more_tables = _NO_TABLES if more_tables is None else more_tables
        return token_ids if self._kernel.decode(slots, *columns, more_tables, max_tokens, token_ids) else None


def set_num_helpers(count: int) -> None:
    """Have `count` more threads help with what this thread computes from now on in a DecoderLayers; none at first.

    They are for few tokens: they multiply matrices and attend, at idle priority, and no one waits for one whose core
    another process takes, as threads of OpenMP wait for each other. What is computed stays the same to the bit.
    """
    set_count = native("set_num_helpers")
    if set_count is not None:
        set_count(count)


def has_decoder_layers(layers: Sequence[LayerWeights], dtype: torch.dtype) -> bool:
    """Whether these layers on the CPU can be a DecoderLayers: no kernel of theirs is missing or set aside.

    Args:
        dtype: of weights and cache.
    """
    if dtype != torch.bfloat16 or native("decoder_layers") is None or not all(map(native, OPERATIONS)):
        return False
    mixtures = (layer.mlp for layer in layers if isinstance(layer.mlp, MixtureWeights))
    if not all(has_mixture(mixture, dtype) for mixture in mixtures):
        return False
    return not any(linear.is_plain for layer in layers for linear in layer.linears)


_NO_TABLES = np.zeros((0, 1, 1), dtype=np.int32)


def _tensors(adapters: LayerAdapters | None) -> tuple[Tensor, ...] | None:
    """As the kernel takes them."""
    return None if adapters is None else (adapters.rows.rows, adapters.rows.starts, adapters.fields, adapters.places)


def _batch(
    plans: Sequence[AttentionPlan], slot_mappings: Sequence[Tensor]
) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor]]:
    """Lengths of the queries and of the sequences; block tables and slot mappings by group."""
    columns = [plan.columns() for plan in plans]
    return columns[0][0], columns[0][1], [table for _, _, table in columns], list(slot_mappings)
