"""Multi-head latent attention of the decoder core, over a paged cache of latents. Knows tensors; no requests."""

import dataclasses

import torch
from torch import Tensor, nn

from pagoda_kernels.attention.mla_attention import mla_attention
from pagoda_kernels.attention.rotary_embedding import rotary_embedding
from pagoda_kernels.attention.store_kv_cache import store_kv_cache
from pagoda_worker.models.forward_context import ForwardContext
from pagoda_worker.models.layers import Linear, Matrix, Norm
from pagoda_worker.models.spec import DecoderSpec, LatentSpec
from pagoda_worker.parallel.tensor_parallel import ALONE, TensorParallel


class LatentUp(Matrix):
    """The projection from latents to keys and values, as floats: first the rows of all heads' keys, then those of
    values.

    Attention multiplies queries by the key part and sums of latents by the value part, so adapters cannot change it.
    """

    is_float = True
    takes_adapters = False

    def __init__(self, *, num_heads: int, latent: LatentSpec, prefix: str = "") -> None:
        rows = num_heads * (latent.key_dim + latent.value_dim)
        super().__init__(rows=rows, columns=latent.kv_rank, is_multiplied=False, prefix=prefix)
        self._num_heads = num_heads
        self._num_key_rows = num_heads * latent.key_dim

    @property
    def keys(self) -> Tensor:
        """[num_heads, key_dim, kv_rank]."""
        return self.weight[: self._num_key_rows].view(self._num_heads, -1, self.columns)

    @property
    def values(self) -> Tensor:
        """[num_heads, value_dim, kv_rank]."""
        return self.weight[self._num_key_rows :].view(self._num_heads, -1, self.columns)


class LatentAttention(nn.Module):
    """Attention that caches one normalised latent per token, and the rotated key that all heads share.

    Ranks share the heads; each has the whole cache.
    Source: DeepSeek-AI 2024 (arXiv 2405.04434), section 2.1.
    """

    def __init__(
        self, *, spec: DecoderSpec, latent: LatentSpec, layer: int, prefix: str = "", parallel: TensorParallel = ALONE
    ) -> None:
        super().__init__()
        self._parallel = parallel
        self._place = spec.cache_index(layer)
        self._scale = spec.scale(layer)
        self._rope = spec.layer_rope(layer)
        self._rank = latent.kv_rank
        self._num_heads, self._rotary_dim = spec.num_heads, spec.head_dim
        hidden, narrow = spec.hidden_size, dataclasses.replace(spec, norm_eps=latent.norm_eps)
        self.q_a_proj: Linear | None = None
        self.q_a_norm: Norm | None = None
        if latent.q_rank is not None:
            self.q_a_proj = Linear(
                in_features=hidden, out_features=latent.q_rank, bias=latent.bias, prefix=f"{prefix}.q_a_proj"
            )
            self.q_a_norm = Norm(spec=narrow, shape=(latent.q_rank,), prefix=f"{prefix}.q_a_norm")
        self.q_proj = Linear(
            in_features=latent.q_rank or hidden,
            out_features=spec.num_heads * (latent.key_dim + spec.head_dim),
            bias=False,
            prefix=f"{prefix}.q_proj",
        )
        self.kv_a_proj = Linear(
            in_features=hidden,
            out_features=latent.kv_rank + spec.head_dim,
            bias=latent.bias,
            prefix=f"{prefix}.kv_a_proj",
        )
        self.kv_a_norm = Norm(spec=narrow, shape=(latent.kv_rank,), prefix=f"{prefix}.kv_a_norm")
        self.kv_up = LatentUp(num_heads=spec.num_heads, latent=latent, prefix=f"{prefix}.kv_up")
        self.o_proj = Linear(
            in_features=spec.num_heads * latent.value_dim,
            out_features=hidden,
            bias=spec.o_bias,
            prefix=f"{prefix}.o_proj",
        )

    def forward(self, x: Tensor, context: ForwardContext, residual: Tensor | None = None) -> Tensor:
        """[num_tokens, hidden_size] to the same, added to `residual`; first writes the latents into the cache."""
        cache, _, plan, slot_mapping = context.paged(self._place)
        latent = self._latents(x, context)
        store_kv_cache(latent, latent, cache, cache, slot_mapping, has_skips=context.has_skips)
        attended = mla_attention(
            self._queries(x, context),
            cache,
            plan,
            key_up=self.kv_up.keys,
            value_up=self.kv_up.values,
            scale=self._scale,
        )
        return self._parallel.all_reduce(self.o_proj(attended, residual))

    def fused_weights(self) -> None:
        """None: the call of all layers does not support it."""

    def _latents(self, x: Tensor, context: ForwardContext) -> Tensor:
        """[num_tokens, 1, kv_rank + rotary_dim], as cached."""
        projected = self.kv_a_proj(x)
        key = self._rotated(projected[:, None, self._rank :], context)
        return torch.cat((self.kv_a_norm(projected[:, : self._rank])[:, None], key), dim=-1)

    def _queries(self, x: Tensor, context: ForwardContext) -> Tensor:
        """[num_tokens, num_heads, key_dim + rotary_dim]."""
        if self.q_a_proj is not None and self.q_a_norm is not None:
            x = self.q_a_norm(self.q_a_proj(x))
        query: Tensor = self.q_proj(x).view(x.shape[0], self._num_heads, -1)
        query[..., -self._rotary_dim :] = self._rotated(query[..., -self._rotary_dim :], context)
        return query

    def _rotated(self, x: Tensor, context: ForwardContext) -> Tensor:
        """[num_tokens, heads, rotary_dim], rotated."""
        if self._rope is None:
            return x
        return rotary_embedding(x, *context.rotary[self._rope], is_interleaved=self._rope.is_interleaved)
