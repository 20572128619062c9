"""Mamba-2: a layer with a recurrent state instead of attention, or next to it. Knows tensors; no requests."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pagoda_kernels.decoder.decoder_layers import AttentionWeights
from pagoda_kernels.recurrent.gate_and_norm import gate_and_norm
from pagoda_kernels.recurrent.short_convolution import short_convolution
from pagoda_kernels.recurrent.state_space_scan import state_space_scan
from pagoda_worker.models.forward_context import ForwardContext
from pagoda_worker.models.layers import Linear
from pagoda_worker.models.model import RecurrentLayer, StateTensor
from pagoda_worker.models.recurrent_spec import Mamba2Spec
from pagoda_worker.models.spec import DecoderSpec
from pagoda_worker.parallel.tensor_parallel import ALONE, TensorParallel


def mamba2_state(net: Mamba2Spec) -> RecurrentLayer:
    """State of a layer: inputs of its convolution, and a matrix for each head."""
    return RecurrentLayer(
        (
            StateTensor((net.conv_width - 1, net.num_channels)),
            StateTensor((net.num_heads, net.state_size, net.head_dim), torch.float32),
        )
    )


class Mamba2(nn.Module):
    """Short convolution, state space scan, and a gate with a norm.

    Source: Dao and Gu 2024 (arXiv 2405.21060), as in Bamba, Granite 4, Falcon-H1, Nemotron-H and Zamba2.
    """

    float32_parameters = frozenset({"decay_log", "step_bias", "skip"})
    """Parameters that keep float32, whatever the model's data type."""

    def __init__(
        self, *, spec: DecoderSpec, net: Mamba2Spec, state: int, prefix: str = "", parallel: TensorParallel = ALONE
    ) -> None:
        """`state`: the layer's index among the recurrent layers."""
        super().__init__()
        self._parallel = parallel
        self._net = net
        self._state = state
        self._eps = spec.norm_eps if net.norm_eps is None else net.norm_eps
        self._multipliers: Tensor | None = None
        """Multiplier of each row of the first projection."""
        hidden, values = spec.hidden_size, net.num_values
        self.in_proj = Linear(
            in_features=hidden, out_features=sum(net.sizes), bias=net.in_bias, prefix=f"{prefix}.in_proj"
        )

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape), requires_grad=False)

        self.conv_weight = parameter(net.num_channels, 1, net.conv_width)
        self.conv_bias = parameter(net.num_channels) if net.conv_bias else None
        self.decay_log = parameter(net.num_heads)
        self.step_bias = parameter(net.num_heads)
        self.skip = parameter(net.num_heads)
        self.norm_weight = parameter(values) if net.norm != "none" else None
        self.o_proj = Linear(in_features=values, out_features=hidden, bias=net.out_bias, prefix=f"{prefix}.o_proj")

    def forward(self, x: Tensor, context: ForwardContext, residual: Tensor | None = None) -> Tensor:
        """[num_tokens, hidden_size] to the same, added to `residual`; updates the sequences' states."""
        assert context.recurrent is not None, "a model with recurrent layers has states"
        net, (inputs, matrices), batch = self._net, context.states[self._state], context.recurrent
        projected: Tensor = self.in_proj(x * net.in_multiplier if net.in_multiplier != 1.0 else x)
        if net.part_multipliers:
            projected = projected * self._multipliers_like(projected)
        gate, mixed, step = torch.split(projected, [net.num_values, net.num_channels, net.num_heads], dim=1)
        mixed = short_convolution(mixed, self.conv_weight.squeeze(1), inputs, batch, bias=self.conv_bias)
        values, b, c = torch.split(mixed, list(net.sizes[1:4]), dim=1)
        output = state_space_scan(
            values.reshape(-1, net.num_heads, net.head_dim),
            b.reshape(-1, net.num_groups, net.state_size),
            c.reshape(-1, net.num_groups, net.state_size),
            step,
            matrices,
            batch,
            step_bias=self.step_bias,
            decay_log=self.decay_log,
            skip=self.skip,
            steps=net.steps,
        )
        return self._parallel.all_reduce(self.o_proj(self._gated(output.flatten(1), gate), residual))

    def _gated(self, output: Tensor, gate: Tensor) -> Tensor:
        """The gated and normalised output; [num_tokens, num_values] of gate's data type."""
        net, is_gate_first = self._net, self._net.norm == "gate_first"
        if not net.shares_norm or self.norm_weight is None:
            return gate_and_norm(
                output, gate, self.norm_weight, self._eps, num_groups=net.norm_groups, is_gate_first=is_gate_first
            )
        opened = F.silu(gate.float())
        output = output * opened if is_gate_first else output
        squares = self._parallel.all_reduce(output.square().sum(1, keepdim=True))
        mean = squares / (net.num_values * self._parallel.world_size)
        normed = output * torch.rsqrt(mean + self._eps) * self.norm_weight.float()
        return (normed if is_gate_first else normed * opened).to(gate.dtype)

    def _multipliers_like(self, projected: Tensor) -> Tensor:
        if self._multipliers is None or self._multipliers.device != projected.device:
            factors = torch.tensor(self._net.part_multipliers, dtype=projected.dtype)
            self._multipliers = factors.repeat_interleave(torch.tensor(self._net.sizes)).to(projected.device)
        return self._multipliers

    def fused_weights(self) -> AttentionWeights | None:
        """See Attention."""
        return None
