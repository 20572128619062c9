"""One layer of Zamba2: Mamba-2, and in some layers a preceding block of attention and feed-forward, whose matrices
several layers share. Knows tensors; no requests."""

import torch
from torch import Tensor, nn

from pagoda_worker.models.attention import Attention
from pagoda_worker.models.feed_forward import FeedForward
from pagoda_worker.models.forward_context import ForwardContext
from pagoda_worker.models.layer_options import SharedBlocksSpec
from pagoda_worker.models.layers import Linear, Matrix, Norm
from pagoda_worker.models.recurrent import recurrent_mixer
from pagoda_worker.models.spec import DecoderSpec
from pagoda_worker.parallel.tensor_parallel import ALONE, TensorParallel


class Narrow(nn.Module):
    """right(left(x)) with a small width between: a layer's own addition to a shared matrix."""

    def __init__(self, *, in_features: int, rank: int, out_features: int, prefix: str = "") -> None:
        super().__init__()
        self.left = Linear(in_features=in_features, out_features=rank, bias=False, prefix=f"{prefix}.left")
        self.right = Linear(in_features=rank, out_features=out_features, bias=False, prefix=f"{prefix}.right")

    def forward(self, x: Tensor) -> Tensor:
        """[num_tokens, in_features] to [num_tokens, out_features]."""
        return self.right(self.left(x))  # type: ignore[no-any-return]  # torch: Module calls are Any


class SharedBlock(nn.Module):
    """Attention over a token's hidden state and its embedding, and a feed-forward, one after the other."""

    def __init__(self, *, spec: DecoderSpec, shared: SharedBlocksSpec, layer: int, prefix: str = "") -> None:
        super().__init__()
        hidden, rank = spec.hidden_size, shared.adapter_rank
        self.attention_norm = Norm(spec=spec, shape=(2 * hidden,), prefix=f"{prefix}.attention_norm")
        self.attention = Attention(spec=spec, layer=layer, in_features=2 * hidden, prefix=f"{prefix}.attention")
        self.mlp_norm = Norm(spec=spec, shape=(hidden,), prefix=f"{prefix}.mlp_norm")
        self.mlp = FeedForward(spec=spec, intermediate_size=spec.intermediate_size, prefix=f"{prefix}.mlp")
        widths = (spec.num_heads * spec.head_dim, *(spec.num_kv_heads * spec.head_dim,) * 2)
        self.qkv_adapters = nn.ModuleList(
            Narrow(in_features=2 * hidden, rank=rank, out_features=width, prefix=f"{prefix}.qkv_adapters.{number}")
            for number, width in enumerate(widths if shared.adapts_attention else ())
        )
        self.mlp_adapter = Narrow(
            in_features=hidden, rank=rank, out_features=2 * spec.intermediate_size, prefix=f"{prefix}.mlp_adapter"
        )
        self.projection = Linear(in_features=hidden, out_features=hidden, bias=False, prefix=f"{prefix}.projection")
        for matrix in (*self.attention.modules(), *self.mlp.modules()):
            if isinstance(matrix, Matrix):
                matrix.takes_adapters = False  # of several layers

    def share(self, first: "SharedBlock") -> None:
        """Share another layer's matrices and norms, except each layer's own ones."""
        self.attention_norm, self.mlp_norm, self.mlp = first.attention_norm, first.mlp_norm, first.mlp
        self.attention.qkv_proj, self.attention.o_proj = first.attention.qkv_proj, first.attention.o_proj

    def forward(self, x: Tensor, embedded: Tensor, context: ForwardContext) -> Tensor:
        """[num_tokens, hidden_size] twice to the same."""
        wide = self.attention_norm(torch.cat((x, embedded), dim=1))
        added = torch.cat([adapter(wide) for adapter in self.qkv_adapters], dim=1) if self.qkv_adapters else None
        normed = self.mlp_norm(self.attention(wide, context, added=added))
        # torch: Module calls are Any
        return self.projection(self.mlp(normed, added=self.mlp_adapter(normed)))  # type: ignore[no-any-return]  # torch: Module calls are Any


class ZambaLayer(nn.Module):
    """x + mamba(norm(x + block(x)))."""

    def __init__(self, *, spec: DecoderSpec, layer: int, prefix: str = "", parallel: TensorParallel = ALONE) -> None:
        super().__init__()
        assert spec.shared_blocks is not None, "layers of Zamba2 share blocks"
        self.attention_norm = Norm(spec=spec, shape=(spec.hidden_size,), prefix=f"{prefix}.attention_norm")
        self.attention = recurrent_mixer(spec=spec, layer=layer, prefix=f"{prefix}.attention", parallel=parallel)
        self.block: SharedBlock | None = None
        if spec.attends(layer):
            self.block = SharedBlock(spec=spec, shared=spec.shared_blocks, layer=layer, prefix=f"{prefix}.block")

    def forward(self, x: Tensor, context: ForwardContext) -> Tensor:
        """[num_tokens, hidden_size] to the same."""
        moved = x
        if self.block is not None:
            assert context.embedded is not None, "the decoder gives them"
            moved = x + self.block(x, context.embedded, context)
        # torch: Module calls are Any
        return self.attention(self.attention_norm(moved), context, residual=x)  # type: ignore[no-any-return]  # torch: Module calls are Any


def share_blocks(layers: nn.ModuleList, num_blocks: int) -> None:
    """Tie the matrices of alternating blocks."""
    blocks = [layer.block for layer in layers if isinstance(layer, ZambaLayer) and layer.block is not None]
    for number, block in enumerate(blocks[num_blocks:]):
        block.share(blocks[number % num_blocks])
