"""Grouped-query attention of the decoder core, over the paged KV cache. Knows tensors; no requests."""

import functools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pagoda_kernels.attention.paged_attention import paged_attention
from pagoda_kernels.attention.rope_store import HeadNorms, rope_store
from pagoda_kernels.attention.rope_store_int8 import rope_store_int8
from pagoda_kernels.attention.rotary_embedding import rotary_embedding
from pagoda_kernels.decoder.decoder_layers import AttentionWeights
from pagoda_worker.models.forward_context import ForwardContext
from pagoda_worker.models.layers import Linear, Norm
from pagoda_worker.models.spec import DecoderSpec
from pagoda_worker.parallel.tensor_parallel import ALONE, TensorParallel


class Attention(nn.Module):
    """Grouped-query attention over the paged KV cache."""

    float32_parameters = frozenset({"sinks"})
    """Parameters that keep float32, whatever the model's data type."""

    def __init__(
        self,
        *,
        spec: DecoderSpec,
        layer: int,
        in_features: int | None = None,
        prefix: str = "",
        parallel: TensorParallel = ALONE,
    ) -> None:
        """`in_features`: width of the input, if not hidden_size."""
        super().__init__()
        spec = spec.of_layer(layer)
        self._parallel = parallel
        self._place = spec.cache_index(layer)
        self._num_kv_projections = spec.num_kv_projections(layer)
        self._norms_values = spec.norms_values
        self._has_gate = spec.has_attention_gate
        self._window = spec.window(layer)
        self._chunk = spec.chunk(layer)
        self._scale = spec.scale(layer)
        self._softcap = spec.attention_softcap
        self._clip = spec.clip_qkv
        self._ropes = spec.ropes
        self._rope = spec.layer_rope(layer)
        self._is_interleaved = self._rope is not None and self._rope.is_interleaved
        self._is_scaled = spec.temperature is not None and self._rope is None
        self.alibi_slopes: Tensor | None = None
        """[num_heads] float32, of Decoder.prepare."""
        self._head_dim = spec.head_dim
        self._num_heads, self._num_kv_heads = spec.num_heads, spec.num_kv_heads
        self.qkv_proj = Linear(
            in_features=in_features or spec.hidden_size,
            out_features=spec.num_qkv_heads(layer) * spec.head_dim,
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
        qk_norm = spec.layer_qk_norm(layer)
        self._norm_eps = spec.norm_eps
        self._norms_plainly = qk_norm == "plain"
        self._plain_norms: HeadNorms | None = None
        """Of `prepare`."""
        self._norms_width = qk_norm == "width"
        self._norms_turned = qk_norm == "turned_head"
        is_fused = qk_norm == "head" and spec.norm == "rms_norm" and spec.clip_qkv is None
        self._norms_heads = is_fused or self._norms_turned
        if qk_norm not in (None, "plain"):
            q_shape, k_shape = _qk_norm_shapes(spec)
            self.q_norm = Norm(spec=spec, shape=q_shape, prefix=f"{prefix}.q_norm")
            if self._num_kv_projections:
                self.k_norm = Norm(spec=spec, shape=k_shape, prefix=f"{prefix}.k_norm")

    def prepare(self, *, max_model_len: int, dtype: torch.dtype, device: torch.device) -> None:
        """Make tables that are not weights, for positions below `max_model_len`."""
        if self._chunk is not None and self._chunk >= max_model_len:
            self._chunk = None
        if self._norms_plainly:
            ones = torch.ones(self._head_dim, dtype=dtype, device=device)
            self._plain_norms = HeadNorms(ones, ones, self._norm_eps)

    def forward(
        self, x: Tensor, context: ForwardContext, residual: Tensor | None = None, *, added: Tensor | None = None
    ) -> Tensor:
        """[num_tokens, hidden_size] to the same, added to `residual`; first writes the tokens' keys and values into the
        cache, unless another layer does. `added`: to the projected queries, keys and values."""
        qkv = self.qkv_proj(x, added)
        gate: Tensor | None = None
        if self._has_gate:
            width = self._num_heads * self._head_dim
            query, gate, key_value = qkv.split((width, width, 2 * self._num_kv_heads * self._head_dim), dim=1)
            qkv = torch.cat((query, key_value), dim=1)
        if self._norms_values or self._num_kv_projections == 1:
            qkv = self._with_values(qkv)
        norms = self._plain_norms
        if self.q_norm is not None and self.k_norm is not None:
            norms = self._head_norms(self.q_norm, self.k_norm)
            if norms is None:
                self._norm_in_place(qkv, self.q_norm, self.k_norm)
        if self._clip is not None:
            qkv.clamp_(-self._clip, self._clip)
        # Before any query is answered: a sequence may read blocks that another one of the batch is just filling.
        k_cache, v_cache, plan, slot_mapping = context.paged(self._place)
        rotary = None if self._rope is None else context.rotary[self._rope]
        if not self._num_kv_projections:
            query = self._query_alone(qkv, rotary)
        else:
            is_quantized = k_cache.dtype == torch.int8
            store = functools.partial(rope_store_int8, head_dim=self._head_dim) if is_quantized else rope_store
            query = store(
                qkv,
                k_cache,
                v_cache,
                slot_mapping,
                rotary=rotary,
                is_interleaved=self._is_interleaved,
                norms=norms,
                has_skips=context.has_skips,
            )
        if self._is_scaled and context.query_scales is not None:
            query = (query * context.query_scales).to(query.dtype)
        if self._chunk is not None:
            plan = plan.chunked(self._chunk)
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

    def _with_values(self, qkv: Tensor) -> Tensor:
        """Queries, keys and values; keys before norms and rotation, values as cached."""
        if not self._num_kv_projections:
            return qkv
        width = self._num_kv_heads * self._head_dim
        values = qkv[:, -width:]
        if self._norms_values:
            heads = values.reshape(-1, self._num_kv_heads, self._head_dim).float()
            values = F.rms_norm(heads, (self._head_dim,), eps=self._norm_eps).to(qkv.dtype).flatten(1)
        return torch.cat((qkv[:, : qkv.shape[1] - (self._num_kv_projections - 1) * width], values), dim=1)

    def _query_alone(self, query: Tensor, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
        """[num_tokens, num_heads, head_dim], for a layer that reads another layer's keys and values."""
        heads = query.view(query.shape[0], self._num_heads, self._head_dim)
        if self.q_norm is not None and not self._norms_turned:
            heads = self.q_norm(heads)
        if rotary is not None:
            heads = rotary_embedding(heads, *rotary, is_interleaved=self._is_interleaved)
        return self.q_norm(heads) if self.q_norm is not None and self._norms_turned else heads

    def _head_norms(self, q_norm: Norm, k_norm: Norm) -> HeadNorms | None:
        """The norms, if a kernel can run them with the rotation."""
        if not self._norms_heads or q_norm.weight is None or k_norm.weight is None:
            return None
        return HeadNorms(q_norm.weight, k_norm.weight, q_norm.eps, q_norm.offset, self._norms_turned)

    def fused_weights(self) -> AttentionWeights | None:
        """The layer's description for a call of all layers; None if that call does not support it."""
        qkv, output = self.qkv_proj.fused_weights(), self.o_proj.fused_weights()
        norms = None if self.q_norm is None or self.k_norm is None else self._head_norms(self.q_norm, self.k_norm)
        is_plain = self._clip is None and self.alibi_slopes is None and (norms is not None or self.q_norm is None)
        is_plain = is_plain and not self._has_gate and self.sinks is None
        is_plain = is_plain and self._chunk is None and not self._is_scaled and not self._norms_plainly
        is_plain = is_plain and self._num_kv_projections == 2 and not self._norms_values
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
        parts = ((q_norm, qkv[:, :q_width]), (k_norm, qkv[:, q_width : q_width + k_width]))
        if self._norms_width and self._parallel.world_size > 1:
            self._norm_over_ranks(parts)
            return
        for norm, part in parts:
            heads = part if self._norms_width else part.view(part.shape[0], -1, self._head_dim)
            heads.copy_(norm(heads))

    def _norm_over_ranks(self, parts: Sequence[tuple[Norm, Tensor]]) -> None:
        """Root-mean-square norms over the columns of all ranks. If ranks share a KV head, each of them counts it."""
        squares = torch.stack([part.float().square().sum(dim=1) for _, part in parts])  # [2, num_tokens]
        totals = self._parallel.all_reduce(squares)
        for (norm, part), total in zip(parts, totals, strict=True):
            scale = torch.rsqrt(total / (self._parallel.world_size * part.shape[1]) + norm.eps)
            assert norm.rms_weight is not None, "Sharding refuses other norms"
            part.copy_(part.float() * scale[:, None] * (norm.rms_weight.float() + norm.offset))


def _qk_norm_shapes(spec: DecoderSpec) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the weights of q_norm and k_norm."""
    if spec.qk_norm in ("head", "turned_head"):
        return (spec.head_dim,), (spec.head_dim,)
    if spec.qk_norm == "width":
        return (spec.num_heads * spec.head_dim,), (spec.num_kv_heads * spec.head_dim,)
    return (spec.num_heads, spec.head_dim), (spec.num_kv_heads, spec.head_dim)
