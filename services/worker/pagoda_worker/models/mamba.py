"""Mamba (version 1): a layer with a recurrent state instead of attention. Knows tensors; no requests."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pagoda_kernels.decoder.decoder_layers import AttentionWeights
from pagoda_kernels.recurrent.gate_and_norm import gate_and_norm
from pagoda_kernels.recurrent.selective_scan import selective_scan
from pagoda_kernels.recurrent.short_convolution import short_convolution
from pagoda_worker.models.forward_context import ForwardContext
from pagoda_worker.models.layers import Linear
from pagoda_worker.models.model import RecurrentLayer, StateTensor
from pagoda_worker.models.recurrent_spec import MambaSpec
from pagoda_worker.models.spec import DecoderSpec
from pagoda_worker.parallel.tensor_parallel import ALONE, TensorParallel


def mamba_state(net: MambaSpec) -> RecurrentLayer:
    """State of a layer: inputs of its convolution, and a vector for each channel."""
    return RecurrentLayer(
        (
            StateTensor((net.conv_width - 1, net.num_channels)),
            StateTensor((net.num_channels, net.state_size), torch.float32),
        )
    )


class Mamba(nn.Module):
    """Short convolution, state space scan with a decay per number, and a gate.

    Source: Gu and Dao 2023 (arXiv 2312.00752), as in Mamba, Falcon Mamba and Jamba.
    """

    float32_parameters = frozenset({"decay_log", "step_bias", "skip"})
    """Parameters that keep float32, whatever the model's data type."""

    def __init__(
        self, *, spec: DecoderSpec, net: MambaSpec, state: int, prefix: str = "", parallel: TensorParallel = ALONE
    ) -> None:
        """`state`: the layer's index among the recurrent layers."""
        super().__init__()
        self._parallel = parallel
        self._net = net
        self._state = state
        hidden, channels, rank = spec.hidden_size, net.num_channels, net.step_rank
        self.in_proj = Linear(in_features=hidden, out_features=2 * channels, bias=net.bias, prefix=f"{prefix}.in_proj")
        self.x_proj = Linear(
            in_features=channels, out_features=rank + 2 * net.state_size, bias=False, prefix=f"{prefix}.x_proj"
        )
        self.step_proj = Linear(in_features=rank, out_features=channels, bias=False, prefix=f"{prefix}.step_proj")
        self.step_proj.takes_adapters = False  # transformers multiplies with its weight alone

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape), requires_grad=False)

        self.conv_weight = parameter(channels, 1, net.conv_width)
        self.conv_bias = parameter(channels) if net.conv_bias else None
        self.decay_log = parameter(channels, net.state_size)
        self.step_bias = parameter(channels)
        self.skip = parameter(channels)
        has_weights = net.norm == "weights"
        self.step_norm_weight = parameter(rank) if has_weights else None
        self.b_norm_weight = parameter(net.state_size) if has_weights else None
        self.c_norm_weight = parameter(net.state_size) if has_weights else None
        self.o_proj = Linear(in_features=channels, out_features=hidden, bias=net.bias, prefix=f"{prefix}.o_proj")

    def forward(self, x: Tensor, context: ForwardContext, residual: Tensor | None = None) -> Tensor:
        """[num_tokens, hidden_size] to the same, added to `residual`; updates the sequences' states."""
        assert context.recurrent is not None, "a model with recurrent layers has states"
        net, (inputs, vectors), batch = self._net, context.states[self._state], context.recurrent
        mixed, gate = self.in_proj(x).chunk(2, dim=1)
        mixed = short_convolution(mixed, self.conv_weight.squeeze(1), inputs, batch, bias=self.conv_bias)
        parts = self._parallel.all_reduce(self.x_proj(mixed))
        step, b, c = torch.split(parts, [net.step_rank, net.state_size, net.state_size], dim=1)
        output = selective_scan(
            mixed,
            self._normed(b, self.b_norm_weight),
            self._normed(c, self.c_norm_weight),
            self.step_proj(self._normed(step, self.step_norm_weight)),
            vectors,
            batch,
            step_bias=self.step_bias,
            decay_log=self.decay_log,
            skip=self.skip,
        )
        gated = gate_and_norm(output, gate, None, net.norm_eps)
        return self._parallel.all_reduce(self.o_proj(gated, residual))

    def _normed(self, x: Tensor, weight: Tensor | None) -> Tensor:
        net = self._net
        if net.norm == "none":
            return x.contiguous()
        normed = F.rms_norm(x.float(), x.shape[-1:], eps=net.norm_eps).to(x.dtype)
        return normed if weight is None else normed * weight

    def fused_weights(self) -> AttentionWeights | None:
        """As of Attention."""
        return None
