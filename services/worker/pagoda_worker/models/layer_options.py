"""Options of layers that differ within a model, and of the additions of Gemma 3n and 4. Numbers; no tensors."""

from dataclasses import dataclass

from pagoda_common.errors import ModelLoadError


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSizes:
    """Sizes of one layer of a model with different layers."""

    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    cache_of: int | None = None
    """The earlier layer whose keys and values this layer reads; None: its own (Gemma 3n)."""
    values_are_keys: bool = False
    """Values equal the projected keys (Gemma 4)."""
    sparsity: float = 0.0
    """Share of the gate's values that become zero if they are normally distributed (Gemma 3n)."""
    is_linear: bool = False
    """One matrix replaces the feed-forward (Llama-Nemotron)."""

    def __post_init__(self) -> None:
        if min(self.num_kv_heads, self.head_dim, self.intermediate_size) < 1:
            raise ModelLoadError(f"sizes of a layer must be at least 1: {self}")
        if not 0.0 <= self.sparsity < 1.0:
            raise ModelLoadError(f"activation_sparsity_pattern has {self.sparsity}, must be in [0, 1)")


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerInputsSpec:
    """Each token has a vector for each layer, from a separate table and from its embedding (Gemma 3n)."""

    width: int
    """Of a vector."""
    vocab_size: int
    """Rows of the table; tokens from this id use the row of token 0."""

    def __post_init__(self) -> None:
        if min(self.width, self.vocab_size) < 1:
            raise ModelLoadError(f"sizes of inputs of layers must be at least 1: {self}")


@dataclass(frozen=True, kw_only=True, slots=True)
class AltUpSpec:
    """Several hidden states per token, of which each layer computes one and corrects all (Gemma 3n).

    Source: alternating updates, Baykal et al. 2023 (arXiv 2301.13310); learned augmented residual layers, Menghani et
    al. 2024 (arXiv 2411.07501).
    """

    num_streams: int
    """Hidden states of a token."""
    active: int = 0
    """The one that layers compute."""
    has_output_scale: bool = True
    """The hidden state for a layer's inputs is multiplied by a factor per value."""
    laurel_rank: int = 64
    """Width of the branch next to attention."""

    def __post_init__(self) -> None:
        if self.num_streams < 1 or not 0 <= self.active < self.num_streams:
            raise ModelLoadError(
                f"altup_active_idx is {self.active}, must be from 0 to below altup_num_inputs, {self.num_streams}"
            )
        if self.laurel_rank < 1:
            raise ModelLoadError(f"laurel_rank is {self.laurel_rank}, must be at least 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedBlocksSpec:
    """Blocks of attention and feed-forward that several layers share, each with its own small matrices (Zamba2)."""

    num_blocks: int = 1
    """Number of different blocks, which alternate."""
    adapter_rank: int = 128
    """Width of the layers' own matrices."""
    adapts_attention: bool = False
    """Queries, keys and values have such matrices too, not only the feed-forward."""

    def __post_init__(self) -> None:
        if min(self.num_blocks, self.adapter_rank) < 1:
            raise ModelLoadError(f"num_mem_blocks and adapter_rank must be at least 1: {self}")
