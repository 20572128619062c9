"""A short convolution between two gates, instead of attention (LFM2). Knows tensors; no requests."""

import torch
from torch import Tensor, nn

from pagoda_kernels.decoder.decoder_layers import AttentionWeights
from pagoda_kernels.recurrent.short_convolution import short_convolution
from pagoda_worker.models.forward_context import ForwardContext
from pagoda_worker.models.layers import Linear
from pagoda_worker.models.model import RecurrentLayer, StateTensor
from pagoda_worker.models.recurrent_spec import ShortConvSpec
from pagoda_worker.models.spec import DecoderSpec
from pagoda_worker.parallel.tensor_parallel import ALONE, TensorParallel


def short_conv_state(net: ShortConvSpec) -> RecurrentLayer:
    """State of a layer: inputs of its convolution."""
    return RecurrentLayer((StateTensor((net.conv_width - 1, net.num_channels)),))


class ShortConv(nn.Module):
    """out(c * conv(b * x)), where b, c and x are projections of the input."""

    def __init__(
        self, *, spec: DecoderSpec, net: ShortConvSpec, state: int, prefix: str = "", parallel: TensorParallel = ALONE
    ) -> None:
        """`state`: the layer's index among the recurrent layers."""
        super().__init__()
        self._parallel = parallel
        self._state = state
        hidden, channels = spec.hidden_size, net.num_channels
        self.in_proj = Linear(in_features=hidden, out_features=3 * channels, bias=net.bias, prefix=f"{prefix}.in_proj")
        self.conv_weight = nn.Parameter(torch.empty(channels, 1, net.conv_width), requires_grad=False)
        self.conv_bias = nn.Parameter(torch.empty(channels), requires_grad=False) if net.bias else None
        self.o_proj = Linear(in_features=channels, out_features=hidden, bias=net.bias, prefix=f"{prefix}.o_proj")

    def forward(self, x: Tensor, context: ForwardContext, residual: Tensor | None = None) -> Tensor:
        """[num_tokens, hidden_size] to the same, added to `residual`; updates the sequences' states."""
        assert context.recurrent is not None, "a model with recurrent layers has states"
        (inputs,) = context.states[self._state]
        b, c, value = self.in_proj(x).chunk(3, dim=1)
        mixed = short_convolution(
            b * value, self.conv_weight.squeeze(1), inputs, context.recurrent, bias=self.conv_bias, has_silu=False
        )
        return self._parallel.all_reduce(self.o_proj(c * mixed, residual))

    def fused_weights(self) -> AttentionWeights | None:
        """See Attention."""
        return None
