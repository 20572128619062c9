"""The layers of a decoder in one call where they are PyTorch's operations: the same ones, called from C++."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from pagoda_kernels.attention.plan import AttentionPlan
from pagoda_kernels.decoder.decoder_layers import ACTIVATION_NAMES, EndWeights, FeedForwardWeights, LayerWeights
from pagoda_kernels.moe.experts import MixtureWeights
from pagoda_kernels.native.library import native
from pagoda_kernels.selection import is_set_aside

OPERATIONS = ("act_and_mul", "paged_attention", "rms_norm", "rope_store")
"""Operations whose replacement makes PyTorch compute the layers one by one."""


class ComposedLayers:
    """Layers with their weights and their part of the KV cache. One caller at a time.

    They give the bits that their modules give one by one, in less time: no Python runs between two operations, and
    other threads have the interpreter meanwhile.
    Measured (one token, 7 layers of width 192, one thread): 1.8 ms instead of 2.8.
    """

    def __init__(
        self,
        layers: Sequence[LayerWeights],
        *,
        k_caches: Sequence[Tensor],
        v_caches: Sequence[Tensor],
        rotations: Sequence[tuple[Tensor, Tensor]],
        groups: Sequence[int] | None = None,
        ends: EndWeights | None = None,
    ) -> None:
        """Weights and caches are used where they are, and are not to be replaced while this is in use.

        Args:
            groups: which of a call's plans and slot mappings each layer has; None: all have the one there is.
            k_caches, v_caches: one a layer, [num_blocks, block_size, num_kv_heads, head_dim], all of one data type.
            rotations: cosines and sines of every position for each, [max_positions, 1, angles] float32.
            ends: for `logits`.

        Raises:
            RuntimeError: there is no kernel for it (see `has_composed_layers`).
        """
        kernel = native("composed_layers")
        if kernel is None:
            raise RuntimeError("this library of C++ kernels has no composed_layers")
        self._kernel = kernel(k_caches[0].shape[2])
        groups = [0] * len(layers) if groups is None else groups
        windows = [layer.attention.window for layer in layers]
        self._kinds = list(dict.fromkeys(zip(groups, windows, strict=True)))
        """Group and window of each plan that the kernel is given."""
        for layer, k_cache, v_cache, group in zip(layers, k_caches, v_caches, groups, strict=True):
            attention = layer.attention
            self._kernel.add(
                layer.attention_norm,
                layer.mlp_norm,
                layer.eps,
                layer.weight_offset,
                *(attention.head_norms or (None, None, 0.0, 0.0, False)),
                [(linear.matrix, linear.bias) for linear in layer.linears],
                ACTIVATION_NAMES.index(_feed_forward(layer).activation),
                -1 if attention.rotation is None else attention.rotation,
                attention.is_interleaved,
                attention.scale,
                self._kinds.index((group, attention.window)),
                k_cache,
                v_cache,
                group,
            )
        for cos, sin in rotations:
            self._kernel.rotate(cos, sin)
        self.has_ends = ends is not None
        """`logits` may be called."""
        if ends is not None:
            head = ends.linear.matrix, ends.linear.bias
            self._kernel.ends(ends.embedding.matrix, ends.norm, ends.eps, ends.weight_offset, head)

    def __call__(
        self, x: Tensor, plans: Sequence[AttentionPlan], slot_mappings: Sequence[Tensor], positions: Tensor
    ) -> Tensor:
        """See DecoderLayers, of any data type; x is left as it was."""
        result: Tensor = self._kernel.forward(x, self._plans(plans), list(slot_mappings), positions)
        return result

    def logits(
        self,
        input_ids: Tensor,
        plans: Sequence[AttentionPlan],
        slot_mappings: Sequence[Tensor],
        positions: Tensor,
        rows: Tensor,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """See DecoderLayers."""
        batch = self._plans(plans), list(slot_mappings), positions
        logits, values, indices = self._kernel.forward_to_logits(input_ids, *batch, rows)
        return logits, (values, indices)

    def _plans(self, plans: Sequence[AttentionPlan]) -> list[Any]:
        parts = [plans[group].window(window) for group, window in self._kinds]
        return [
            (
                [(group.query_rows, group.block_ids, group.mask) for group in part.decodes],
                [
                    (row.query_start, row.query_len, row.block_ids, row.first, row.num_keys, row.mask)
                    for row in part.prefills
                ],
            )
            for part in parts
        ]


def has_composed_layers(layers: Sequence[LayerWeights]) -> bool:
    """Whether these layers on the CPU can be a ComposedLayers: PyTorch computes all of their operations."""
    if native("composed_layers") is None or not all(map(is_set_aside, OPERATIONS)):
        return False
    if any(layer.attention.softcap is not None or isinstance(layer.mlp, MixtureWeights) for layer in layers):
        return False
    return all(linear.is_plain for layer in layers for linear in layer.linears)


def _feed_forward(layer: LayerWeights) -> FeedForwardWeights:
    assert isinstance(layer.mlp, FeedForwardWeights), "has_composed_layers() has refused mixtures"
    return layer.mlp
