"""DecoderSpec: the options of the decoder core. Built from a checkpoint's config.json by each family."""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from pagoda_common.errors import ModelLoadError
from pagoda_kernels.layers.act_and_mul import ClampedSwiglu
from pagoda_kernels.moe.route_tokens import GroupScore, Routing, Scoring
from pagoda_worker.models.layer_options import AltUpSpec, LayerInputsSpec, LayerSizes, SharedBlocksSpec
from pagoda_worker.models.recurrent_spec import Mixer, RecurrentSpec

NormKind: TypeAlias = Literal["rms_norm", "layer_norm"]
NormPlaces: TypeAlias = Literal["input", "output", "both", "sum"]
QkNorm: TypeAlias = Literal["head", "turned_head", "each_head", "width", "plain"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeSpec:
    """Rotary position embedding."""

    theta: float = 10000.0
    """Base wavelength."""
    rope_type: str = "default"
    """default, linear, dynamic, llama3, yarn, longrope or proportional."""
    parameters: tuple[tuple[str, Any], ...] = ()
    """Parameters of the type, as in the checkpoint."""
    partial_rotary_factor: float = 1.0
    """Share of each head's values that is rotated; the rest is unchanged."""
    is_interleaved: bool = False
    """Whether adjacent values form a pair; else value i and value i + half."""
    head_dim: int | None = None
    """head_dim of the rotated layers, if not the model's (Gemma 4)."""

    def rotary_dim(self, head_dim: int) -> int:
        """Number of rotated values of each head. `head_dim`: the model's."""
        return int((self.head_dim or head_dim) * self.partial_rotary_factor + 1e-6)


@dataclass(frozen=True, kw_only=True, slots=True)
class MoeSpec:
    """A mixture of experts instead of the feed-forward."""

    num_experts: int
    num_experts_per_token: int
    intermediate_size: int
    """Intermediate size of one expert."""
    is_normalized: bool = True
    """Whether the weights of a token's experts are normalised to sum to 1."""
    scoring: Scoring = "softmax"
    """See Routing; so are norm_min, norm_added, scale, num_groups, top_groups and group_score."""
    norm_min: float = 0.0
    norm_added: float = 0.0
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    group_score: GroupScore = "max"
    has_correction: bool = False
    """Whether a bias on the scores affects the choice of experts, but not their weights (DeepSeek-V3)."""
    router_bias: bool = False
    """The router's logits have a bias (gpt-oss)."""
    scales_input: bool = False
    """Whether a weight scales an expert's input instead of its output (Llama 4)."""
    expert_bias: bool = False
    """The matrices of experts have biases."""
    activation: ClampedSwiglu | None = None
    """Activation of the experts; None: the model's."""
    latent_size: int = 0
    """Width of the experts' inputs and outputs, projected from and to hidden_size; 0: hidden_size (Nemotron-H)."""
    shared_intermediate_size: int = 0
    """Intermediate size of the shared expert, which sees every token; 0: none."""
    shared_is_gated: bool = True
    """Whether the shared expert's output passes its own gate (Qwen2-MoE)."""
    sparse_layers: tuple[bool, ...] = ()
    """Which layers have experts; empty: all."""
    is_beside: bool = False
    """Whether experts are next to the feed-forward, with their own norms and factors (Gemma 4)."""

    def __post_init__(self) -> None:
        if not 1 <= self.num_experts_per_token <= self.num_experts:
            raise ModelLoadError(
                f"num_experts_per_tok is {self.num_experts_per_token}, must be between 1 and num_experts, "
                f"{self.num_experts}"
            )
        if self.num_groups < 1 or self.num_experts % self.num_groups:
            raise ModelLoadError(f"n_group is {self.num_groups}, must divide num_experts, {self.num_experts}")
        if not 1 <= self.top_groups <= self.num_groups:
            raise ModelLoadError(f"topk_group is {self.top_groups}, must be between 1 and n_group, {self.num_groups}")
        if self.num_experts_per_token > self.num_experts // self.num_groups * self.top_groups:
            raise ModelLoadError(
                f"num_experts_per_tok is {self.num_experts_per_token}, but {self.top_groups} groups have "
                f"{self.num_experts // self.num_groups * self.top_groups} experts"
            )

    @property
    def routing(self) -> Routing:
        """The routing method."""
        return Routing(
            top_k=self.num_experts_per_token,
            scoring=self.scoring,
            is_normalized=self.is_normalized,
            norm_min=self.norm_min,
            norm_added=self.norm_added,
            scale=self.scale,
            num_groups=self.num_groups,
            top_groups=self.top_groups,
            group_score=self.group_score,
        )

    def is_sparse(self, layer: int) -> bool:
        """Whether a layer has experts."""
        return self.sparse_layers[layer] if self.sparse_layers else True


@dataclass(frozen=True, kw_only=True, slots=True)
class LatentSpec:
    """Attention whose keys and values are computed from one latent vector per token, which alone is cached (MLA).

    The spec's head_dim is the rotated part of keys and queries; all heads share the rotated key.
    """

    kv_rank: int
    """Size of a latent."""
    key_dim: int
    """Size of the part of each head's key and query that is not rotated."""
    value_dim: int
    """Size of a head's values."""
    q_rank: int | None = None
    """Size of a latent for queries; None: queries are computed from the hidden state."""
    bias: bool = False
    """The projections to latents have biases."""
    norm_eps: float = 1e-6
    """Epsilon of the norms of latents."""

    def __post_init__(self) -> None:
        if min(self.kv_rank, self.key_dim, self.value_dim, 1 if self.q_rank is None else self.q_rank) < 1:
            raise ModelLoadError(f"sizes of latent attention must be at least 1: {self}")


@dataclass(frozen=True, kw_only=True, slots=True)
class TemperatureSpec:
    """Queries of layers without a rotation grow with their position: 1 + scale * log(1 + floor((position + 1) / step)).

    Source: Nakanishi 2025 (arXiv 2501.19399), as in Llama 4.
    """

    step: float
    """Tokens."""
    scale: float


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderSpec:
    """One decoder-only model. The default is a small one, for tests of single layers."""

    architecture: str = "Decoder"
    vocab_size: int = 256
    """Rows of the embedding and columns of the logits."""
    hidden_size: int = 64
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    intermediate_size: int = 128
    max_position_embeddings: int = 512
    """Maximum sequence length of the checkpoint, in tokens."""
    activation: str = "silu"
    """Name as in config.json: silu, gelu_new, relu, …"""
    norm: NormKind = "rms_norm"
    norm_eps: float = 1e-6
    norm_has_weights: bool = True
    """False: a norm without weight and bias."""
    norm_has_bias: bool = True
    """False: a layer norm with a weight only (Cohere)."""
    norm_weight_offset: float = 0.0
    """Added to every norm's weight (Gemma: 1)."""
    norms: NormPlaces = "input"
    """Places of norms: before attention and feed-forward (input), after them but before the residual sum (output: OLMo
    2), both (Gemma 2), or after the residual sum (sum: OPT-350m)."""
    is_gated: bool = True
    """down(act(gate(x)) * up(x)); else fc2(act(fc1(x)))."""
    is_parallel: bool = False
    """Attention and feed-forward read the same input; both results are added at once (GPT-NeoX)."""
    has_mlp_norm: bool = True
    """If False in a parallel layer, the feed-forward reads the output of attention's norm (Phi, Cohere)."""
    has_final_norm: bool = True
    has_embedding_norm: bool = False
    """Whether embeddings are normalised (BLOOM)."""
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    """Whether the language model head has a bias."""
    qk_norm: QkNorm | None = None
    """Norm of queries and keys before the rotation: of each head with one weight for all (head: Qwen3), of each head
    with its own weight (each_head: Cohere), over all heads together (width: OLMo 2), or of each head that is rotated,
    without weights (plain: Llama 4). After the rotation: of each head with one weight for all (turned_head: Hunyuan), a
    root-mean-square norm."""
    clip_qkv: float | None = None
    """Bound on the absolute values of queries, keys and values (OLMo)."""
    rope: RopeSpec | None = None
    """Rotary embedding; None: learned positions, or linear biases."""
    has_positions: bool = True
    """Whether the model has positions (recurrent layers need none)."""
    layer_ropes: tuple[RopeSpec | None, ...] = ()
    """Rotation of each layer if they differ, None for no rotation. Empty: all have `rope`."""
    alibi_slopes: tuple[float, ...] = ()
    """Linear biases: the amount per head and token of distance between query and key that is subtracted from a score
    (BLOOM, MPT)."""
    position_offset: int = 0
    """Rows of the position table before position 0 (OPT has 2)."""
    embedding_dim: int | None = None
    """Width of the token embedding if not hidden_size; projected in and out (OPT-350m)."""
    windows: tuple[int | None, ...] = ()
    """Sliding window of each layer; None: no window. Empty: no layer has a window."""
    chunks: tuple[int | None, ...] = ()
    """Chunk size in tokens of each layer, whose queries see only the keys of their own chunk; None: no chunks. Empty:
    no layer has chunks."""
    temperature: TemperatureSpec | None = None
    """Growth of queries with their position; None: no growth."""
    scales: tuple[float, ...] = ()
    """Softmax scale of each layer; empty: head_dim ** -0.5."""
    attention_softcap: float | None = None
    """Attention scores are bounded by softcap * tanh(score / softcap) (Gemma 2)."""
    logit_softcap: float | None = None
    """The same for logits."""
    embedding_multiplier: float = 1.0
    """Multiplier on token embeddings, rounded to the weights' data type as in the original (Gemma)."""
    residual_multiplier: float = 1.0
    """Multiplier on the outputs of attention and feed-forward (Granite)."""
    logit_multiplier: float = 1.0
    has_attention_gate: bool = False
    """Whether attention's output is gated by the sigmoid of an equally wide projection (Qwen3-Next)."""
    has_sinks: bool = False
    """Whether each head has one more score in the softmax, without a value (gpt-oss)."""
    latent: LatentSpec | None = None
    """Latent attention; None: layers cache keys and values."""
    recurrence: RecurrentSpec | None = None
    """Options of recurrent layers; None if there are none."""
    mixers: tuple[Mixer, ...] = ()
    """Mixer of each layer before its feed-forward; empty: attention."""
    feed_forwards: tuple[bool, ...] = ()
    """Which layers have a feed-forward; empty: all."""
    mixer_multipliers: tuple[float, float, float] = (1.0, 1.0, 1.0)
    """Multipliers on attention's input, its output and the recurrent part's output, in parallel layers (Falcon-H1)."""
    mlp_multipliers: tuple[float, float] = (1.0, 1.0)
    """Multipliers on the gate before its activation, and on the feed-forward's output (Falcon-H1)."""
    moe: MoeSpec | None = None
    """None: every layer has one feed-forward."""
    layer_sizes: tuple[LayerSizes, ...] = ()
    """Sizes of each layer if they differ. Empty: all have the model's."""
    norms_values: bool = False
    """Whether each head's values are normalised without a weight (Gemma 3n)."""
    has_layer_scale: bool = False
    """Whether a layer's output is multiplied by the layer's own number (Gemma 4)."""
    layer_inputs: LayerInputsSpec | None = None
    """Options of per-layer token vectors; None if there are none."""
    alt_up: AltUpSpec | None = None
    """Options of several hidden states per token; None: one."""
    shared_blocks: SharedBlocksSpec | None = None
    """Options of blocks that layers with mixer `both` share; None: each layer has its own."""
    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if field.type is int and field.name != "position_offset" and getattr(self, field.name) < 1:
                raise ModelLoadError(f"{field.name} is {getattr(self, field.name)}, must be at least 1")
        for name in ("mixers", "feed_forwards", "layer_sizes"):
            if len(getattr(self, name)) not in (0, self.num_layers):
                raise ModelLoadError(f"{len(getattr(self, name))} {name} are given for {self.num_layers} layers")
        if self.num_heads % self.num_kv_heads:
            raise ModelLoadError(f"{self.num_heads} heads cannot share {self.num_kv_heads} KV heads evenly")
        for rope in self.ropes:
            head_dim, rotary_dim = rope.head_dim or self.head_dim, rope.rotary_dim(self.head_dim)
            if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
                raise ModelLoadError(f"{rotary_dim} of head_dim {head_dim} are rotated, must be even")
        for layer, sizes in enumerate(self.layer_sizes):
            if self.num_heads % sizes.num_kv_heads:
                raise ModelLoadError(f"{self.num_heads} heads cannot share {sizes.num_kv_heads} KV heads evenly")
            if sizes.cache_of is not None and not 0 <= sizes.cache_of < layer:
                raise ModelLoadError(f"layer {layer} reads the cache of layer {sizes.cache_of}, must be an earlier one")

    def of_layer(self, layer: int) -> "DecoderSpec":
        """The spec with this layer's sizes."""
        if not self.layer_sizes:
            return self
        sizes = self.layer_sizes[layer]
        return dataclasses.replace(
            self,
            num_kv_heads=sizes.num_kv_heads,
            head_dim=sizes.head_dim,
            intermediate_size=sizes.intermediate_size,
        )

    def num_kv_projections(self, layer: int) -> int:
        """Names of a layer's projections for its cache: keys and values, keys used as values too, or nothing."""
        if not self.layer_sizes:
            return 2
        sizes = self.layer_sizes[layer]
        return 0 if sizes.cache_of is not None else 1 if sizes.values_are_keys else 2

    def num_qkv_heads(self, layer: int) -> int:
        """Number of heads of attention's first projection: queries, their gates, keys and values."""
        num_kv_heads = self.of_layer(layer).num_kv_heads * self.num_kv_projections(layer)
        return self.num_heads * (2 if self.has_attention_gate else 1) + num_kv_heads

    @property
    def has_learned_positions(self) -> bool:
        """Whether there is a table of positions."""
        return self.has_positions and self.rope is None and not self.alibi_slopes

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        """The different rotations of the model."""
        ropes = self.layer_ropes or (self.rope,)
        return tuple(dict.fromkeys(rope for rope in ropes if rope is not None))

    def layer_norms(self, layer: int) -> tuple[str, ...]:
        """Names of the norms that a layer has."""
        names = []
        for part in ("attention", "mlp"):
            if part == "mlp" and not (self.has_mlp_norm and self.has_feed_forward(layer)):
                break
            if part == "attention" and self.mixer(layer) == "none":
                continue
            if self.norms in ("input", "both"):
                names.append(f"{part}_norm")
            if self.norms in ("output", "both"):
                names.append(f"{part}_output_norm")
            if self.norms == "sum":
                names.append(f"{part}_sum_norm")
        return tuple(names)

    def layer_rope(self, layer: int) -> RopeSpec | None:
        """Rotation of a layer."""
        return self.layer_ropes[layer] if self.layer_ropes else self.rope

    def mixer(self, layer: int) -> Mixer:
        """The mixer of a layer before its feed-forward."""
        return self.mixers[layer] if self.mixers else "attention"

    def attends(self, layer: int) -> bool:
        """Whether a layer has attention."""
        return self.mixer(layer) in ("attention", "both")

    def cache_owner(self, layer: int) -> int:
        """The layer whose keys and values a layer of attention reads."""
        cache_of = self.layer_sizes[layer].cache_of if self.layer_sizes else None
        return layer if cache_of is None else cache_of

    def keeps_tokens(self, layer: int) -> bool:
        """Whether a layer keeps keys and values."""
        return self.attends(layer) and self.cache_owner(layer) == layer

    def is_recurrent(self, layer: int) -> bool:
        """Whether a layer keeps a recurrent state."""
        return self.mixer(layer) in ("recurrent", "both")

    def cache_index(self, layer: int) -> int:
        """Index, among layers with keys and values, of the layer whose keys and values a layer reads."""
        return sum(self.keeps_tokens(other) for other in range(self.cache_owner(layer)))

    def state_index(self, layer: int) -> int:
        """Index of a layer among those with a recurrent state."""
        return sum(self.is_recurrent(other) for other in range(layer))

    def has_feed_forward(self, layer: int) -> bool:
        """Whether a layer has a feed-forward."""
        return self.feed_forwards[layer] if self.feed_forwards else True

    def has_linear_feed_forward(self, layer: int) -> bool:
        """Whether the feed-forward of a layer is one matrix."""
        return bool(self.layer_sizes) and self.layer_sizes[layer].is_linear

    def window(self, layer: int) -> int | None:
        """Sliding window of a layer, tokens."""
        return self.windows[layer] if self.windows else None

    def chunk(self, layer: int) -> int | None:
        """Chunk of a layer, tokens."""
        return self.chunks[layer] if self.chunks else None

    def layer_qk_norm(self, layer: int) -> QkNorm | None:
        """Norm of a layer's queries and keys."""
        return None if self.qk_norm == "plain" and self.layer_rope(layer) is None else self.qk_norm

    def sparsity(self, layer: int) -> float:
        """Share of the gate's values that become zero."""
        return self.layer_sizes[layer].sparsity if self.layer_sizes else 0.0

    def scale(self, layer: int) -> float:
        """Softmax scale of a layer."""
        return self.scales[layer] if self.scales else self.head_dim**-0.5

    def layer_moe(self, layer: int) -> MoeSpec | None:
        """Experts of a layer; None: it has one feed-forward."""
        return self.moe if self.moe is not None and self.moe.is_sparse(layer) else None
