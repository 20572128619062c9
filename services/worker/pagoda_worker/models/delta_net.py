"""Gated delta net: a layer with a recurrent state instead of attention (Qwen3-Next). Knows tensors; no requests."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pagoda_kernels.decoder.decoder_layers import AttentionWeights
from pagoda_kernels.recurrent.gated_delta_rule import gated_delta_rule
from pagoda_kernels.recurrent.short_convolution import short_convolution
from pagoda_worker.models.forward_context import ForwardContext
from pagoda_worker.models.layers import Linear
from pagoda_worker.models.model import RecurrentLayer, StateTensor
from pagoda_worker.models.recurrent_spec import DeltaNetSpec
from pagoda_worker.models.spec import DecoderSpec
from pagoda_worker.parallel.tensor_parallel import ALONE, TensorParallel


def delta_net_state(net: DeltaNetSpec) -> RecurrentLayer:
    """State of a layer: inputs of its convolution, and a matrix for each value head."""
    return RecurrentLayer(
        (
            StateTensor((net.conv_width - 1, net.num_channels)),
            StateTensor((net.num_value_heads, net.key_dim, net.value_dim), torch.float32),
        )
    )


class GatedDeltaNet(nn.Module):
    """Short convolution, gated delta rule, and a norm followed by a gate.

    Source: Yang et al. 2024 (arXiv 2412.06464), as in Qwen3-Next.
    """

    float32_parameters = frozenset({"decay_log", "step_bias"})
    """Parameters that keep float32, whatever the model's data type."""

    def __init__(
        self, *, spec: DecoderSpec, net: DeltaNetSpec, state: int, prefix: str = "", parallel: TensorParallel = ALONE
    ) -> None:
        """`state`: the layer's index among the recurrent layers."""
        super().__init__()
        self._parallel = parallel
        self._net = net
        self._state = state
        self._eps = spec.norm_eps
        heads, values = net.num_value_heads, net.num_value_heads * net.value_dim
        self.in_proj = Linear(
            in_features=spec.hidden_size,
            out_features=net.num_channels + values,
            bias=False,
            prefix=f"{prefix}.in_proj",
        )
        self.ba_proj = Linear(
            in_features=spec.hidden_size, out_features=2 * heads, bias=False, prefix=f"{prefix}.ba_proj"
        )
        self.conv_weight = nn.Parameter(torch.empty(net.num_channels, 1, net.conv_width), requires_grad=False)
        self.decay_log = nn.Parameter(torch.empty(heads), requires_grad=False)
        self.step_bias = nn.Parameter(torch.empty(heads), requires_grad=False)
        self.output_scale = nn.Parameter(torch.empty(net.value_dim), requires_grad=False)
        self.o_proj = Linear(in_features=values, out_features=spec.hidden_size, bias=False, prefix=f"{prefix}.o_proj")

    def forward(self, x: Tensor, context: ForwardContext, residual: Tensor | None = None) -> Tensor:
        """[num_tokens, hidden_size] to the same, added to `residual`; updates the sequences' states."""
        assert context.recurrent is not None, "a model with recurrent layers has states"
        num_tokens = x.shape[0]
        net, (inputs, matrices) = self._net, context.states[self._state]
        projected: Tensor = self.in_proj(x)
        mixed, gate = projected[:, : net.num_channels], projected[:, net.num_channels :]
        beta, step = self.ba_proj(x).float().chunk(2, dim=1)
        mixed = short_convolution(mixed, self.conv_weight.squeeze(1), inputs, context.recurrent)
        keys = net.num_key_heads * net.key_dim
        query, key, value = mixed[:, :keys], mixed[:, keys : 2 * keys], mixed[:, 2 * keys :]
        output = gated_delta_rule(
            query.reshape(num_tokens, -1, net.key_dim),
            key.reshape(num_tokens, -1, net.key_dim),
            value.reshape(num_tokens, -1, net.value_dim),
            -self.decay_log.exp() * F.softplus(step + self.step_bias),
            beta.sigmoid(),
            matrices,
            context.recurrent,
        )
        normed = F.rms_norm(output, output.shape[-1:], self.output_scale.float(), self._eps)
        gated = normed * F.silu(gate.float().reshape(num_tokens, -1, net.value_dim))
        return self._parallel.all_reduce(self.o_proj(gated.flatten(1).to(x.dtype), residual))

    def fused_weights(self) -> AttentionWeights | None:
        """See Attention."""
        return None
