"""The decoder core: embedding, layers of paged attention and feed-forward, logits. Knows tensors; no requests."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pagoda_kernels.attention_plan import AttentionPlan
from pagoda_kernels.paged_attention import paged_attention
from pagoda_kernels.rotary_embedding import rotary_embedding
from pagoda_kernels.silu_and_mul import silu_and_mul
from pagoda_kernels.store_kv_cache import store_kv_cache
from pagoda_worker.models.layers import Embedding, Linear, Norm, activation
from pagoda_worker.models.rope import RotaryTable
from pagoda_worker.models.spec import DecoderSpec


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """What every layer of one forward pass shares."""

    plan: AttentionPlan
    slot_mapping: Tensor
    """[num_tokens] int64, no -1."""
    k_caches: Sequence[Tensor]
    """One a layer, [num_blocks, block_size, num_kv_heads, head_dim]."""
    v_caches: Sequence[Tensor]
    rotary: tuple[Tensor, Tensor] | None = None
    """Cosines and sines of the tokens' positions."""


class Attention(nn.Module):
    """Grouped-query attention over the paged KV cache."""

    def __init__(self, *, spec: DecoderSpec, layer: int, prefix: str = "") -> None:
        super().__init__()
        self._layer = layer
        self._window = spec.window(layer)
        self._scale = spec.scale(layer)
        self._head_dim = spec.head_dim
        self._heads = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
        self.qkv_proj = Linear(
            in_features=spec.hidden_size,
            out_features=sum(self._heads) * spec.head_dim,
            bias=spec.qkv_bias,
            prefix=f"{prefix}.qkv_proj",
        )
        self.o_proj = Linear(
            in_features=spec.num_heads * spec.head_dim,
            out_features=spec.hidden_size,
            bias=spec.o_bias,
            prefix=f"{prefix}.o_proj",
        )
        self.q_norm: Norm | None = None
        self.k_norm: Norm | None = None
        if spec.has_qk_norm:
            self.q_norm = Norm(spec=spec, dim=spec.head_dim, prefix=f"{prefix}.q_norm")
            self.k_norm = Norm(spec=spec, dim=spec.head_dim, prefix=f"{prefix}.k_norm")

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        """[num_tokens, hidden_size] to the same; writes the tokens' keys and values into the cache first."""
        qkv = self.qkv_proj(x).view(x.shape[0], -1, self._head_dim)
        num_heads, num_kv_heads, _ = self._heads
        rotated, value = qkv[:, : num_heads + num_kv_heads], qkv[:, num_heads + num_kv_heads :]
        if self.q_norm is not None and self.k_norm is not None:
            rotated = torch.cat((self.q_norm(rotated[:, :num_heads]), self.k_norm(rotated[:, num_heads:])), dim=1)
        if context.rotary is not None:
            rotated = rotary_embedding(rotated, *context.rotary)
        query, key = rotated[:, :num_heads], rotated[:, num_heads:]
        k_cache, v_cache = context.k_caches[self._layer], context.v_caches[self._layer]
        # Before any query is answered: a sequence may read blocks that another one of the batch is just filling.
        store_kv_cache(key, value, k_cache, v_cache, context.slot_mapping, has_skips=False)
        attended = paged_attention(
            query.contiguous(), k_cache, v_cache, context.plan, scale=self._scale, window=self._window
        )
        return self.o_proj(attended)  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    """down(act(gate(x)) * up(x)), or fc2(act(fc1(x)))."""

    def __init__(self, *, spec: DecoderSpec, prefix: str = "") -> None:
        super().__init__()
        self._is_gated = spec.is_gated
        self._activation = activation(spec.activation)
        self._is_swiglu = spec.is_gated and spec.activation in ("silu", "swish")
        self.up_proj = Linear(
            in_features=spec.hidden_size,
            out_features=spec.intermediate_size * (2 if spec.is_gated else 1),
            bias=spec.mlp_bias,
            prefix=f"{prefix}.up_proj",
        )
        self.down_proj = Linear(
            in_features=spec.intermediate_size,
            out_features=spec.hidden_size,
            bias=spec.mlp_bias,
            prefix=f"{prefix}.down_proj",
        )

    def forward(self, x: Tensor) -> Tensor:
        """[num_tokens, hidden_size] to the same."""
        x = self.up_proj(x)
        if self._is_swiglu:
            x = silu_and_mul(x)
        elif self._is_gated:
            gate, up = x.chunk(2, dim=-1)
            x = self._activation(gate) * up
        else:
            x = self._activation(x)
        return self.down_proj(x)  # type: ignore[no-any-return]


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each with a residual sum and a norm before (or behind) it."""

    def __init__(self, *, spec: DecoderSpec, layer: int, prefix: str = "") -> None:
        super().__init__()
        self._is_post_norm = spec.is_post_norm
        self.attention_norm = Norm(spec=spec, dim=spec.hidden_size, prefix=f"{prefix}.attention_norm")
        self.attention = Attention(spec=spec, layer=layer, prefix=f"{prefix}.attention")
        self.mlp_norm = Norm(spec=spec, dim=spec.hidden_size, prefix=f"{prefix}.mlp_norm")
        self.mlp = FeedForward(spec=spec, prefix=f"{prefix}.mlp")

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        """[num_tokens, hidden_size] to the same."""
        if self._is_post_norm:
            x = self.attention_norm(x + self.attention(x, context))
            return self.mlp_norm(x + self.mlp(x))  # type: ignore[no-any-return]
        x = x + self.attention(self.attention_norm(x), context)
        return x + self.mlp(self.mlp_norm(x))  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """A whole decoder-only language model. Build it on the meta device; the loader gives it weights."""

    def __init__(self, *, spec: DecoderSpec, prefix: str = "") -> None:
        super().__init__()
        self.spec = spec
        dim = spec.embedding_dim or spec.hidden_size
        self.embed_tokens = Embedding(num_rows=spec.vocab_size, dim=dim, prefix=f"{prefix}embed_tokens")
        self.embed_positions: Embedding | None = None
        if spec.rope is None:
            rows = spec.max_position_embeddings + spec.position_offset
            self.embed_positions = Embedding(num_rows=rows, dim=spec.hidden_size, prefix=f"{prefix}embed_positions")
        self.project_in: Linear | None = None
        self.project_out: Linear | None = None
        if dim != spec.hidden_size:
            hidden = spec.hidden_size
            self.project_in = Linear(in_features=dim, out_features=hidden, bias=False, prefix=f"{prefix}project_in")
            self.project_out = Linear(in_features=hidden, out_features=dim, bias=False, prefix=f"{prefix}project_out")
        self.layers = nn.ModuleList(
            DecoderLayer(spec=spec, layer=layer, prefix=f"{prefix}layers.{layer}") for layer in range(spec.num_layers)
        )
        self.norm = Norm(spec=spec, dim=spec.hidden_size, prefix=f"{prefix}norm") if spec.has_final_norm else None
        self.lm_head: Linear | None = None
        if not spec.tie_word_embeddings:
            self.lm_head = Linear(in_features=dim, out_features=spec.vocab_size, bias=False, prefix=f"{prefix}lm_head")
        self._rotary: RotaryTable | None = None

    def prepare(self, *, max_model_len: int, device: torch.device) -> None:
        """Build the tables that are no weights, for positions below `max_model_len`."""
        if self.spec.rope is not None:
            self._rotary = RotaryTable(
                spec=self.spec.rope, head_dim=self.spec.head_dim, max_positions=max_model_len, device=device
            )

    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor] | None:
        """Cosines and sines for ForwardContext; None with learned positions."""
        return None if self._rotary is None else self._rotary(positions)

    def forward(self, input_ids: Tensor, positions: Tensor, context: ForwardContext) -> Tensor:
        """The last hidden state, ready for `compute_logits`.

        Args:
            input_ids, positions: [num_tokens] int64.
        """
        x: Tensor = self.embed_tokens(input_ids)
        if self.project_in is not None:
            x = self.project_in(x)
        if self.embed_positions is not None:
            x = x + self.embed_positions(positions + self.spec.position_offset)
        for layer in self.layers:
            x = layer(x, context)
        if self.norm is not None:
            x = self.norm(x)
        return x if self.project_out is None else self.project_out(x)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden] rows of `forward` to [n, vocab_size] float32."""
        head = self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight
        return torch.nn.functional.linear(hidden, head).float()
