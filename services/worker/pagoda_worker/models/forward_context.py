"""ForwardContext: data that the layers of one forward pass share. Knows tensors and plans; no layers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from pagoda_kernels.attention.plan import AttentionPlan
from pagoda_kernels.decoder.composed_layers import ComposedLayers
from pagoda_kernels.decoder.decoder_layers import DecoderLayers, LayerAdapters
from pagoda_kernels.recurrent.batch import RecurrentBatch
from pagoda_worker.models.spec import RopeSpec


class PagedRows(NamedTuple):
    """The inputs and outputs of one attention layer."""

    k_cache: Tensor
    """[num_blocks, block_size, num_kv_heads, head_dim]; or int8 rows, as `quantized_cache` makes them."""
    v_cache: Tensor
    plan: AttentionPlan
    slot_mapping: Tensor
    """[num_tokens] int64; -1 (write nothing) only with `has_skips`."""


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """The data that all layers of one forward pass share."""

    plans: Sequence[AttentionPlan]
    """One per cache group with blocks; they differ only in their block tables."""
    slot_mappings: Sequence[Tensor]
    """See PagedRows; one per cache group with blocks."""
    k_caches: Sequence[Tensor]
    """The buffers of KVCache."""
    v_caches: Sequence[Tensor]
    places: Mapping[int, tuple[int, int]]
    """Group and buffer of each layer with blocks (CacheLayout.places)."""
    rotary: Mapping[RopeSpec, tuple[Tensor, Tensor]]
    """Cosines and sines of the tokens' positions, for each rotation of the model; empty if `fused` is not None."""
    fused: DecoderLayers | ComposedLayers | None = None
    """All layers of the model in one call, over the same caches."""
    query_scales: Tensor | None = None
    """[num_tokens, 1, 1] float32 factors on queries of layers without a rotation; None if the model has none."""
    adapters: LayerAdapters | None = None
    """Adapters of that call, if any token has one."""
    has_skips: bool = False
    """Whether some tokens are padding, whose keys and values are not written."""

    states: Sequence[tuple[Tensor, ...]] = ()
    """States of each recurrent layer, [num_rows, …] each (StatePool)."""
    starts: Sequence[int] = ()
    """First token of each sequence, then the number of tokens; for models that see whole sequences."""
    token_types: Tensor | None = None
    """[num_tokens] int64: 1 for tokens of the second text of a pair; None if there are no pairs."""
    recurrent: RecurrentBatch | None = None
    """The batch for recurrent layers; None if the model has none."""
    layer_inputs: Tensor | None = None
    """[num_tokens, num_layers, width], a vector per token and layer; None if the model has none."""

    embedded: Tensor | None = None
    """[num_tokens, hidden_size], token embeddings, if layers read them again."""

    def paged(self, layer: int) -> PagedRows:
        """The inputs and outputs of an attention layer."""
        group, buffer = self.places[layer]
        return PagedRows(self.k_caches[buffer], self.v_caches[buffer], self.plans[group], self.slot_mappings[group])
