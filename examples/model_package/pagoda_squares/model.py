"""SquaresForCausalLM: a decoder whose attention has a gate and whose feed-forward squares. Tensors have our names."""

from collections.abc import Collection, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pagoda_worker.models.attend import attend
from pagoda_worker.models.forward_context import ForwardContext
from pagoda_worker.models.layers import Embedding, Linear
from pagoda_worker.models.model import AttentionLayer, BuildConfig, Model
from pagoda_worker.models.weights import WeightNames, WeightSource
from pagoda_worker.parallel.tensor_parallel import ALONE, TensorParallel


class Layer(nn.Module):
    """Gated attention, then squares; each is added to what it reads."""

    def __init__(self, *, size: int, attention: AttentionLayer, index: int, prefix: str) -> None:
        super().__init__()
        self.attention, self.index = attention, index
        for name, rows, columns in (
            ("qkv", 3 * size, size),
            ("gate", size, size),
            ("out", size, size),
            ("up", 2 * size, size),
            ("down", size, 2 * size),
        ):
            linear = Linear(in_features=columns, out_features=rows, bias=False, prefix=f"{prefix}.{name}")
            setattr(self, name, linear)

    def forward(self, x: Tensor, context: ForwardContext, angles: Tensor) -> Tensor:
        """[num_tokens, size] to the same."""
        normed = F.rms_norm(x, x.shape[-1:])
        heads = self.qkv(normed).view(x.shape[0], 3, self.attention.num_heads, self.attention.head_dim)
        query, key, value = heads.unbind(1)
        attended = attend(rotate(query, angles), rotate(key, angles), value, context, self.attention, self.index)
        x = x + self.out(attended.flatten(1) * torch.sigmoid(self.gate(normed)))
        return x + self.down(F.relu(self.up(F.rms_norm(x, x.shape[-1:]))) ** 2)


class SquaresForCausalLM(Model):
    """The model, as Pagoda's worker wants it."""

    architecture = "SquaresForCausalLM"

    def __init__(self, *, config: BuildConfig, prefix: str = "", parallel: TensorParallel = ALONE) -> None:
        super().__init__()
        if parallel.world_size > 1:
            raise ValueError("ranks cannot share this model")
        self.options: dict[str, Any] = config.checkpoint
        size, heads = int(self.options["hidden_size"]), int(self.options["num_attention_heads"])
        self.vocab_size, self.embedding_size = int(self.options["vocab_size"]), size
        self.max_position_embeddings = int(self.options["max_position_embeddings"])
        self.num_layers = int(self.options["num_hidden_layers"])
        dim = size // heads
        attention = AttentionLayer(num_heads=heads, num_kv_heads=heads, head_dim=dim, scale=dim**-0.5)
        self.attention_layers = (attention,) * self.num_layers
        self.embed = Embedding(num_rows=self.vocab_size, dim=size, prefix=f"{prefix}embed")
        self.layers = nn.ModuleList(
            Layer(size=size, attention=attention, index=index, prefix=f"{prefix}layers.{index}")
            for index in range(self.num_layers)
        )
        self.head = Linear(in_features=size, out_features=self.vocab_size, bias=False, prefix=f"{prefix}head")

    @property
    def identity(self) -> Mapping[str, object]:
        """All options: weights of a model with others do not fit."""
        return self.options

    def weights(self, stored: Collection[str]) -> WeightNames:
        """A checkpoint has the names of the parameters."""
        names = [name for name, _ in self.named_parameters()]
        return WeightNames(sources=[WeightSource(name=name, parameter=name) for name in names], prefixes=("",))

    def dummy_value(self, parameter: str) -> float | None:
        """Everything is random."""
        return None

    def prepare(self, *, max_model_len: int, device: torch.device) -> None:
        """The angles of all positions."""
        self.angles = angles(self.attention_layers[0].head_dim, max_model_len).to(device)

    def forward(self, input_ids: Tensor, positions: Tensor, context: ForwardContext) -> Tensor:
        """As in Model."""
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x, context, self.angles[positions])
        return F.rms_norm(x, x.shape[-1:])

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """As in Model."""
        return self.head(hidden).float()


def angles(dim: int, length: int) -> Tensor:
    """[length, 1, dim / 2]."""
    return torch.outer(torch.arange(length), 10000.0 ** -(torch.arange(0, dim, 2) / dim))[:, None]


def rotate(heads: Tensor, by: Tensor) -> Tensor:
    """Rotate halves of [num_tokens, num_heads, dim] by [num_tokens, 1, dim / 2]."""
    first, second = heads.float().chunk(2, dim=-1)
    rotated = torch.cat([first * by.cos() - second * by.sin(), second * by.cos() + first * by.sin()], dim=-1)
    return rotated.to(heads.dtype)
