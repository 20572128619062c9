"""The decoder core: embedding, layers of paged attention and feed-forward, logits. Knows tensors; no requests."""

import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pagoda_kernels.attention.paged_attention import paged_attention
from pagoda_kernels.attention.plan import AttentionPlan
from pagoda_kernels.attention.rope_store import HeadNorms, rope_store
from pagoda_kernels.attention.rope_store_int8 import rope_store_int8
from pagoda_kernels.decoder.composed_layers import ComposedLayers, has_composed_layers
from pagoda_kernels.decoder.decoder_layers import (
    AttentionWeights,
    DecoderLayers,
    EndWeights,
    LayerWeights,
    has_decoder_layers,
)
from pagoda_kernels.native.library import native
from pagoda_kernels.recurrent.batch import RecurrentBatch
from pagoda_worker.models.delta_net import GatedDeltaNet, delta_net_state
from pagoda_worker.models.feed_forward import FeedForward, MixtureOfExperts
from pagoda_worker.models.layers import Embedding, Linear, Norm
from pagoda_worker.models.model import AttentionLayer, Model
from pagoda_worker.models.rope import RotaryTable
from pagoda_worker.models.sharding import Sharding
from pagoda_worker.models.spec import DecoderSpec, RopeSpec
from pagoda_worker.models.weights import MadeWeights, WeightNames
from pagoda_worker.parallel.tensor_parallel import ALONE, TensorParallel


class PagedRows(NamedTuple):
    """What one layer of attention reads and writes."""

    k_cache: Tensor
    """[num_blocks, block_size, num_kv_heads, head_dim]; or int8 rows, as `quantized_cache` makes them."""
    v_cache: Tensor
    plan: AttentionPlan
    slot_mapping: Tensor
    """[num_tokens] int64; -1, which writes nothing, only with `has_skips`."""


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """What every layer of one forward pass shares."""

    plans: Sequence[AttentionPlan]
    """One a cache group with blocks; they differ in their block tables alone."""
    slot_mappings: Sequence[Tensor]
    """As of PagedRows, one a cache group with blocks."""
    k_caches: Sequence[Tensor]
    """The buffers of KVCache."""
    v_caches: Sequence[Tensor]
    places: Mapping[int, tuple[int, int]]
    """Group and buffer of each layer with blocks (CacheLayout.places)."""
    rotary: Mapping[RopeSpec, tuple[Tensor, Tensor]]
    """Cosines and sines of the tokens' positions, for each rotation of the model; empty where `fused` is not None."""
    fused: DecoderLayers | ComposedLayers | None = None
    """All layers of the model in one call, over the same caches."""
    has_skips: bool = False
    """Some tokens are padding, whose keys and values go nowhere."""

    states: Sequence[tuple[Tensor, ...]] = ()
    """Of each recurrent layer, [num_rows, …] each (StatePool)."""
    recurrent: RecurrentBatch | None = None
    """The batch, as recurrent layers need it; None: the model has none."""

    def paged(self, layer: int) -> PagedRows:
        """What a layer of attention reads and writes."""
        group, buffer = self.places[layer]
        return PagedRows(self.k_caches[buffer], self.v_caches[buffer], self.plans[group], self.slot_mappings[group])


class Attention(nn.Module):
    """Grouped-query attention over the paged KV cache."""

    float32_parameters = frozenset({"sinks"})
    """They keep float32, whatever the model's data type."""

    def __init__(self, *, spec: DecoderSpec, layer: int, prefix: str = "", parallel: TensorParallel = ALONE) -> None:
        super().__init__()
        self._parallel = parallel
        self._place = spec.place(layer)
        self._has_gate = spec.has_attention_gate
        self._window = spec.window(layer)
        self._scale = spec.scale(layer)
        self._softcap = spec.attention_softcap
        self._clip = spec.clip_qkv
        self._ropes = spec.ropes
        self._rope = spec.layer_rope(layer)
        self._is_interleaved = self._rope is not None and self._rope.is_interleaved
        self.alibi_slopes: Tensor | None = None
        """[num_heads] float32, of Decoder.prepare."""
        self._head_dim = spec.head_dim
        self._num_heads, self._num_kv_heads = spec.num_heads, spec.num_kv_heads
        self.qkv_proj = Linear(
            in_features=spec.hidden_size,
            out_features=spec.num_qkv_heads * spec.head_dim,
            bias=spec.qkv_bias,
            prefix=f"{prefix}.qkv_proj",
        )
        self.o_proj = Linear(
            in_features=spec.num_heads * spec.head_dim,
            out_features=spec.hidden_size,
            bias=spec.o_bias,
            prefix=f"{prefix}.o_proj",
        )
        self.sinks: nn.Parameter | None = None
        if spec.has_sinks:
            self.sinks = nn.Parameter(torch.empty(spec.num_heads), requires_grad=False)
        self.q_norm: Norm | None = None
        self.k_norm: Norm | None = None
        self._norms_width = spec.qk_norm == "width"
        self._norms_heads = spec.qk_norm == "head" and spec.norm == "rms_norm" and spec.clip_qkv is None
        if spec.qk_norm is not None:
            q_shape, k_shape = _qk_norm_shapes(spec)
            self.q_norm = Norm(spec=spec, shape=q_shape, prefix=f"{prefix}.q_norm")
            self.k_norm = Norm(spec=spec, shape=k_shape, prefix=f"{prefix}.k_norm")

    def forward(self, x: Tensor, context: ForwardContext, residual: Tensor | None = None) -> Tensor:
        """[num_tokens, hidden_size] to the same, added to `residual`; writes the tokens' keys and values into the cache
        first."""
        qkv = self.qkv_proj(x)
        gate: Tensor | None = None
        if self._has_gate:
            width = self._num_heads * self._head_dim
            query, gate, key_value = qkv.split((width, width, 2 * self._num_kv_heads * self._head_dim), dim=1)
            qkv = torch.cat((query, key_value), dim=1)
        norms: HeadNorms | None = None
        if self.q_norm is not None and self.k_norm is not None:
            norms = self._head_norms(self.q_norm, self.k_norm)
            if norms is None:
                self._norm_in_place(qkv, self.q_norm, self.k_norm)
        if self._clip is not None:
            qkv.clamp_(-self._clip, self._clip)
        # Before any query is answered: a sequence may read blocks that another one of the batch is just filling.
        k_cache, v_cache, plan, slot_mapping = context.paged(self._place)
        is_quantized = k_cache.dtype == torch.int8
        store = functools.partial(rope_store_int8, head_dim=self._head_dim) if is_quantized else rope_store
        query = store(
            qkv,
            k_cache,
            v_cache,
            slot_mapping,
            rotary=None if self._rope is None else context.rotary[self._rope],
            is_interleaved=self._is_interleaved,
            norms=norms,
            has_skips=context.has_skips,
        )
        attended = paged_attention(
            query,
            k_cache,
            v_cache,
            plan,
            scale=self._scale,
            window=self._window,
            softcap=self._softcap,
            alibi_slopes=self.alibi_slopes,
            sinks=self.sinks,
        )
        if gate is not None:
            attended = attended * gate.sigmoid()
        return self._parallel.all_reduce(self.o_proj(attended, residual))

    def _head_norms(self, q_norm: Norm, k_norm: Norm) -> HeadNorms | None:
        """The norms, if they may run with the rotation."""
        if not self._norms_heads or q_norm.weight is None or k_norm.weight is None:
            return None
        return HeadNorms(q_norm.weight, k_norm.weight, q_norm.eps, q_norm.offset)

    def fused_weights(self) -> AttentionWeights | None:
        """For layers in one call; None: it does something that they do not."""
        qkv, output = self.qkv_proj.fused_weights(), self.o_proj.fused_weights()
        norms = None if self.q_norm is None or self.k_norm is None else self._head_norms(self.q_norm, self.k_norm)
        is_plain = self._clip is None and self.alibi_slopes is None and (norms is not None or self.q_norm is None)
        is_plain = is_plain and not self._has_gate and self.sinks is None
        if qkv is None or output is None or not is_plain or self._parallel.world_size > 1:
            return None
        return AttentionWeights(
            qkv=qkv,
            output=output,
            head_norms=norms,
            rotation=None if self._rope is None else self._ropes.index(self._rope),
            is_interleaved=self._is_interleaved,
            scale=self._scale,
            softcap=self._softcap,
            window=self._window,
        )

    def _norm_in_place(self, qkv: Tensor, q_norm: Norm, k_norm: Norm) -> None:
        q_width, k_width = self._num_heads * self._head_dim, self._num_kv_heads * self._head_dim
        for norm, part in ((q_norm, qkv[:, :q_width]), (k_norm, qkv[:, q_width : q_width + k_width])):
            heads = part if self._norms_width else part.view(part.shape[0], -1, self._head_dim)
            heads.copy_(norm(heads))


def _qk_norm_shapes(spec: DecoderSpec) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the weights of q_norm and k_norm."""
    if spec.qk_norm == "head":
        return (spec.head_dim,), (spec.head_dim,)
    if spec.qk_norm == "width":
        return (spec.num_heads * spec.head_dim,), (spec.num_kv_heads * spec.head_dim,)
    return (spec.num_heads, spec.head_dim), (spec.num_kv_heads, spec.head_dim)


class DecoderLayer(nn.Module):
    """Attention and feed-forward, one behind the other or side by side, with norms where the spec wants them."""

    def __init__(self, *, spec: DecoderSpec, layer: int, prefix: str = "", parallel: TensorParallel = ALONE) -> None:
        super().__init__()
        self._is_parallel = spec.is_parallel
        self._multiplier = spec.residual_multiplier
        # The last projection of a part adds what it computed to the residual, where nothing comes in between.
        has_output_norm = "attention_output_norm" in spec.block_norms
        self._adds_residual = not (
            spec.is_parallel or has_output_norm or spec.residual_multiplier != 1 or parallel.world_size > 1
        )
        self._is_usual = self._adds_residual and set(spec.block_norms) == {"attention_norm", "mlp_norm"}

        def norm(name: str) -> nn.Module:
            if name not in spec.block_norms:
                return nn.Identity()
            return Norm(spec=spec, shape=(spec.hidden_size,), prefix=f"{prefix}.{name}")

        self.attention_norm = norm("attention_norm")
        self.attention: Attention | GatedDeltaNet
        if spec.is_recurrent(layer):
            assert spec.delta_net is not None, "recurrent layers have a spec"
            self.attention = GatedDeltaNet(
                spec=spec,
                net=spec.delta_net,
                state=spec.place(layer),
                prefix=f"{prefix}.attention",
                parallel=parallel,
            )
        else:
            self.attention = Attention(spec=spec, layer=layer, prefix=f"{prefix}.attention", parallel=parallel)
        self.attention_output_norm = norm("attention_output_norm")
        self.attention_sum_norm = norm("attention_sum_norm")
        self._shares_norm = spec.is_parallel and not spec.has_mlp_norm
        self.mlp_norm = norm("mlp_norm")
        moe = spec.layer_moe(layer)
        self.mlp: nn.Module = (
            FeedForward(spec=spec, intermediate_size=spec.intermediate_size, prefix=f"{prefix}.mlp", parallel=parallel)
            if moe is None
            else MixtureOfExperts(spec=spec, moe=moe, prefix=f"{prefix}.mlp", parallel=parallel)
        )
        self.mlp_output_norm = norm("mlp_output_norm")
        self.mlp_sum_norm = norm("mlp_sum_norm")

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        """[num_tokens, hidden_size] to the same."""
        if self._adds_residual:
            x = self.attention_sum_norm(self.attention(self.attention_norm(x), context, residual=x))
            # torch: Module calls are Any
            return self.mlp_sum_norm(self.mlp(self.mlp_norm(x), residual=x))  # type: ignore[no-any-return]
        normed = self.attention_norm(x)
        attended = self.attention_output_norm(self.attention(normed, context))
        if self._is_parallel:
            mlp_input = normed if self._shares_norm else self.mlp_norm(x)
            return x + attended + self.mlp(mlp_input)  # type: ignore[no-any-return]  # torch: Module calls are Any
        if isinstance(self.mlp_norm, Norm):
            x, normed = self.mlp_norm.add(x, attended, alpha=self._multiplier)
        else:
            x = normed = self.attention_sum_norm(torch.add(x, attended, alpha=self._multiplier))
        transformed = self.mlp_output_norm(self.mlp(normed))
        # torch: Module calls are Any
        return self.mlp_sum_norm(torch.add(x, transformed, alpha=self._multiplier))  # type: ignore[no-any-return]

    def fused_weights(self) -> LayerWeights | None:
        """For layers in one call; None: it does something that they do not."""
        first, second = self.attention_norm, self.mlp_norm
        if not self._is_usual or not isinstance(first, Norm) or not isinstance(second, Norm):
            return None
        attention = self.attention.fused_weights()
        mlp = self.mlp.fused_weights() if isinstance(self.mlp, FeedForward | MixtureOfExperts) else None
        if attention is None or mlp is None or first.rms_weight is None or second.rms_weight is None:
            return None
        return LayerWeights(
            attention_norm=first.rms_weight,
            mlp_norm=second.rms_weight,
            eps=first.eps,
            weight_offset=first.offset,
            attention=attention,
            mlp=mlp,
        )


def attention_layers(spec: DecoderSpec) -> tuple[AttentionLayer, ...]:
    """How each layer of a model, or of a rank's part, attends."""
    return tuple(
        AttentionLayer(
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            scale=spec.scale(layer),
            window=spec.window(layer),
            softcap=spec.attention_softcap,
            has_biases=bool(spec.alibi_slopes),
            has_sinks=spec.has_sinks,
        )
        for layer in range(spec.num_layers)
        if not spec.is_recurrent(layer)
    )


class Decoder(Model):
    """A decoder-only language model, or one rank's part. Build it on the meta device; the loader gives it weights."""

    sharding: Sharding

    def __init__(
        self,
        *,
        spec: DecoderSpec,
        prefix: str = "",
        parallel: TensorParallel = ALONE,
        names: WeightNames | None = None,
    ) -> None:
        """
        Args:
            spec: of the whole model.
            names: of a checkpoint's tensors; None: it is never read from one.

        Raises:
            ConfigError: the ranks cannot share the model.
        """
        super().__init__()
        self.sharding = Sharding(spec, parallel)
        self._names = names
        spec = self.sharding.local_spec
        self.architecture = spec.architecture
        self.vocab_size = spec.vocab_size
        self.embedding_size = spec.embedding_dim or spec.hidden_size
        self.max_position_embeddings = spec.max_position_embeddings
        self.num_layers = spec.num_layers
        self.attention_layers = attention_layers(spec)
        if spec.delta_net is not None:
            self.recurrent_layers = (delta_net_state(spec.delta_net),) * sum(spec.recurrent)
        self._parallel = parallel
        self._head_rows = parallel.part(spec.vocab_size)
        self.spec = spec
        dim = spec.embedding_dim or spec.hidden_size
        self.embed_tokens = Embedding(
            num_rows=spec.vocab_size,
            dim=dim,
            is_head=spec.tie_word_embeddings and parallel.world_size == 1,
            prefix=f"{prefix}embed_tokens",
        )
        self.embed_positions: Embedding | None = None
        self.embedding_norm: Norm | None = None
        if spec.has_embedding_norm:
            self.embedding_norm = Norm(spec=spec, shape=(spec.hidden_size,), prefix=f"{prefix}embedding_norm")
        if spec.has_learned_positions:
            rows = spec.max_position_embeddings + spec.position_offset
            self.embed_positions = Embedding(num_rows=rows, dim=spec.hidden_size, prefix=f"{prefix}embed_positions")
        self.project_in: Linear | None = None
        self.project_out: Linear | None = None
        if dim != spec.hidden_size:
            hidden = spec.hidden_size
            self.project_in = Linear(in_features=dim, out_features=hidden, bias=False, prefix=f"{prefix}project_in")
            self.project_out = Linear(in_features=hidden, out_features=dim, bias=False, prefix=f"{prefix}project_out")
        self.layers = nn.ModuleList(
            DecoderLayer(spec=spec, layer=layer, prefix=f"{prefix}layers.{layer}", parallel=parallel)
            for layer in range(spec.num_layers)
        )
        self.norm: Norm | None = None
        if spec.has_final_norm:
            self.norm = Norm(spec=spec, shape=(spec.hidden_size,), prefix=f"{prefix}norm")
        self.lm_head: Linear | None = None
        if not spec.tie_word_embeddings:
            rows = len(self._head_rows)
            self.lm_head = Linear(in_features=dim, out_features=rows, bias=False, prefix=f"{prefix}lm_head")
        self.lm_head_bias: nn.Parameter | None = None
        if spec.head_bias:
            self.lm_head_bias = nn.Parameter(torch.empty(len(self._head_rows)), requires_grad=False)
        self._embedding_multiplier = spec.embedding_multiplier
        self._rotary: dict[RopeSpec, RotaryTable] = {}

    @property
    def identity(self) -> Mapping[str, object]:
        """The options of the whole model."""
        spec = self.sharding.spec
        return {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}

    def weights(self, stored: Collection[str]) -> WeightNames:
        """As in Model; the family knows all names. Of two ways to make a parameter, it is the one whose tensors are
        there."""
        names = self._names
        assert names is not None, "a model that is read from a checkpoint has names"
        if not names.made:
            return names
        known = {name.removeprefix(prefix) for name in stored for prefix in (*names.prefixes, "")}
        makers: dict[str, MadeWeights] = {}
        for made in names.made:
            if made.parameters[0] not in makers or made.names[0] in known:
                makers[made.parameters[0]] = made
        return dataclasses.replace(names, made=tuple(makers.values()))

    def dummy_value(self, parameter: str) -> float | None:
        """Norms of ones, biases of zeros."""
        if parameter.endswith(("bias", "decay_log", "sinks")):
            return 0.0
        if parameter.endswith("output_scale"):
            return 1.0
        return 1.0 - self.spec.norm_weight_offset if "norm" in parameter else None

    @property
    def what_waits(self) -> str | None:
        """As in Model."""
        mixtures = (module for module in self.modules() if isinstance(module, MixtureOfExperts))
        is_plain = any(not mixture.is_grouped for mixture in mixtures)
        return "the host has to hear which tokens an expert gets" if is_plain else None

    def prepare(self, *, max_model_len: int, device: torch.device) -> None:
        """Build the tables that are no weights, for positions below `max_model_len`."""
        self._rotary = {
            rope: RotaryTable(spec=rope, head_dim=self.spec.head_dim, max_positions=max_model_len, device=device)
            for rope in self.spec.ropes
        }
        if self.spec.alibi_slopes:
            slopes = torch.tensor(self.spec.alibi_slopes, dtype=torch.float32, device=device)
            for module in self.modules():
                if isinstance(module, Attention):
                    module.alibi_slopes = slopes
        self._embedding_multiplier = float(torch.tensor(self.spec.embedding_multiplier, dtype=self._dtype))

    @property
    def _dtype(self) -> torch.dtype:
        return self.embed_tokens.dtype

    def rotary(self, positions: Tensor) -> dict[RopeSpec, tuple[Tensor, Tensor]]:
        """Cosines and sines for ForwardContext, in the order of the spec's ropes; none with learned positions."""
        return {rope: table(positions) for rope, table in self._rotary.items()}

    def forward(self, input_ids: Tensor, positions: Tensor, context: ForwardContext) -> Tensor:
        """The last hidden state, ready for `compute_logits`.

        Args:
            input_ids, positions: [num_tokens] int64.
        """
        x: Tensor = self.embed_tokens(input_ids)
        if self._embedding_multiplier != 1.0:
            x = x * self._embedding_multiplier
        if self.project_in is not None:
            x = self.project_in(x)
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        if self.embed_positions is not None:
            x = x + self.embed_positions(positions + self.spec.position_offset)
        if context.fused is not None:
            x = context.fused(x, context.plans, context.slot_mappings, positions)
        else:
            for layer in self.layers:
                x = layer(x, context)
        if self.norm is not None:
            x = self.norm(x)
        return x if self.project_out is None else self.project_out(x)

    def fuse_layers(
        self, *, k_caches: Sequence[Tensor], v_caches: Sequence[Tensor], places: Mapping[int, tuple[int, int]]
    ) -> DecoderLayers | ComposedLayers | None:
        """The layers, over these caches, as one call; None: there is none for some operation of theirs.

        It is right for as long as weights and caches stay where they are.

        Args:
            places: as in ForwardContext.
        """
        if not k_caches or not k_caches[0].is_cpu or k_caches[0].dtype != self._dtype:
            return None
        asked = [layer.fused_weights() for layer in self.layers if isinstance(layer, DecoderLayer)]
        layers = [layer for layer in asked if layer is not None]
        if len(layers) < len(self.layers):
            return None
        rotations = [table.tables for table in self._rotary.values()]
        groups, buffers = zip(*(places[layer] for layer in range(len(layers))), strict=True)
        k_caches, v_caches = [k_caches[buffer] for buffer in buffers], [v_caches[buffer] for buffer in buffers]
        if has_decoder_layers(layers, self._dtype):
            return DecoderLayers(
                layers,
                k_caches=k_caches,
                v_caches=v_caches,
                groups=groups,
                num_heads=self.spec.num_heads,
                rotations=rotations,
                ends=self._end_weights(is_plain=False),
            )
        if has_composed_layers(layers):
            ends = self._end_weights(is_plain=True)
            return ComposedLayers(
                layers, k_caches=k_caches, v_caches=v_caches, groups=groups, rotations=rotations, ends=ends
            )
        return None

    def _end_weights(self, *, is_plain: bool) -> EndWeights | None:
        """What comes before and behind the layers; None: it is more than a table, a norm and a matrix.

        Args:
            is_plain: in which form matrices must be.
        """
        spec, norm, table = self.spec, self.norm, self.embed_tokens
        if norm is None or norm.rms_weight is None or native("argmax") is None or self._parallel.world_size > 1:
            return None
        is_usual = self.lm_head_bias is None and spec.logit_multiplier == 1.0 and spec.logit_softcap is None
        is_usual = is_usual and self._embedding_multiplier == 1.0 and self.embedding_norm is None
        if not is_usual or self.embed_positions is not None or self.project_in is not None:
            return None
        matrix = table if self.lm_head is None else self.lm_head
        linear = matrix.method.fused_weights(matrix, None)
        embedding = table.method.fused_weights(table, None)
        if linear is None or embedding is None or linear.is_plain != is_plain:
            return None
        return EndWeights(
            embedding=embedding,
            norm=norm.rms_weight,
            eps=norm.eps,
            weight_offset=norm.offset,
            linear=linear,
        )

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden] rows of `forward` to [n, vocab_size] float32 on rank 0; the other ranks' mean nothing."""
        if self.lm_head is not None:
            logits = self.lm_head.method.apply(self.lm_head, hidden, bias=self.lm_head_bias, out_dtype=torch.float32)
        elif self.embed_tokens.is_multiplied:
            table = self.embed_tokens
            logits = table.method.apply(table, hidden, bias=self.lm_head_bias, out_dtype=torch.float32)
        else:  # every rank has all rows, for its embeddings, and multiplies with some
            rows = self.embed_tokens.weight[self._head_rows.start : self._head_rows.stop]
            logits = F.linear(hidden, rows, self.lm_head_bias).float()
        logits = self._parallel.gather_columns(logits, self.spec.vocab_size)
        if self.spec.logit_multiplier != 1.0:
            logits = logits * self.spec.logit_multiplier
        if self.spec.logit_softcap is not None:
            logits = self.spec.logit_softcap * torch.tanh(logits / self.spec.logit_softcap)
        return logits
