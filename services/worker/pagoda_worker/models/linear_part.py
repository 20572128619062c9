"""One matrix instead of attention or a feed-forward (Llama-Nemotron). Knows tensors; no requests."""

from torch import Tensor, nn

from pagoda_kernels.decoder.decoder_layers import AttentionWeights
from pagoda_worker.models.forward_context import ForwardContext
from pagoda_worker.models.layers import Linear
from pagoda_worker.models.spec import DecoderSpec


class LinearPart(nn.Module):
    """x W^T, per token. Every rank computes the whole product, so nothing is summed."""

    def __init__(self, *, spec: DecoderSpec, prefix: str = "") -> None:
        super().__init__()
        hidden = spec.hidden_size
        self.linear = Linear(in_features=hidden, out_features=hidden, bias=False, prefix=f"{prefix}.linear")

    def forward(self, x: Tensor, context: ForwardContext | None = None, residual: Tensor | None = None) -> Tensor:
        """[num_tokens, hidden_size] to the same, added to `residual`."""
        return self.linear(x, residual)  # type: ignore[no-any-return]  # torch: Module calls are Any

    def fused_weights(self) -> AttentionWeights | None:
        """See Attention."""
        return None
