"""Feed-forward layers: one for all tokens, or a mixture of experts. Knows tensors; no requests."""

import torch
from torch import Tensor, nn

from pagoda_kernels.decoder.decoder_layers import FeedForwardWeights
from pagoda_kernels.layers.act_and_mul import ACTIVATIONS, ClampedSwiglu, act_and_mul
from pagoda_kernels.moe.route_tokens import route_tokens
from pagoda_worker.models.layers import Linear, activation_name
from pagoda_worker.models.spec import DecoderSpec, MoeSpec
from pagoda_worker.parallel.tensor_parallel import ALONE, TensorParallel


class FeedForward(nn.Module):
    """down(act(gate(x)) * up(x)), or fc2(act(fc1(x)))."""

    def __init__(
        self,
        *,
        spec: DecoderSpec,
        intermediate_size: int,
        bias: bool | None = None,
        activation: ClampedSwiglu | None = None,
        prefix: str = "",
        parallel: TensorParallel = ALONE,
    ) -> None:
        """
        Args:
            bias, activation: where they are not the spec's.
            parallel: over whom the result is summed; a caller that sums it itself gives none.
        """
        super().__init__()
        self._parallel = parallel
        self._is_gated = spec.is_gated
        self._activation = activation or activation_name(spec.activation)
        has_bias = spec.mlp_bias if bias is None else bias
        self.up_proj = Linear(
            in_features=spec.hidden_size,
            out_features=intermediate_size * (2 if spec.is_gated else 1),
            bias=has_bias,
            prefix=f"{prefix}.up_proj",
        )
        self.down_proj = Linear(
            in_features=intermediate_size, out_features=spec.hidden_size, bias=has_bias, prefix=f"{prefix}.down_proj"
        )

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """[num_tokens, hidden_size] to the same, added to `residual`."""
        x = self.up_proj(x)
        if self._is_gated or isinstance(self._activation, ClampedSwiglu):
            x = act_and_mul(x, self._activation)
        else:
            x = ACTIVATIONS[self._activation](x)
        return self._parallel.all_reduce(self.down_proj(x, residual))

    def fused_weights(self) -> FeedForwardWeights | None:
        """For layers in one call; None: it does something that they do not."""
        gate_up, down = self.up_proj.fused_weights(), self.down_proj.fused_weights()
        if gate_up is None or down is None or not self._is_gated or self._parallel.world_size > 1:
            return None
        if isinstance(self._activation, ClampedSwiglu):
            return None
        return FeedForwardWeights(gate_up=gate_up, down=down, activation=self._activation)


class MixtureOfExperts(nn.Module):
    """Each token goes to the few experts that its router scores highest; their results are weighted and summed.

    Plain operations, one expert after the other: the specification that a fused kernel would have to meet.
    Source: Shazeer et al. 2017 (arXiv 1701.06538), Jiang et al. 2024 (arXiv 2401.04088).
    """

    float32_parameters = frozenset({"correction"})
    """They keep float32, whatever the model's data type."""

    def __init__(self, *, spec: DecoderSpec, moe: MoeSpec, prefix: str = "", parallel: TensorParallel = ALONE) -> None:
        super().__init__()
        self._parallel = parallel
        self._routing = moe.routing
        self._scales_input = moe.scales_input
        hidden = spec.hidden_size
        self.router = Linear(
            in_features=hidden, out_features=moe.num_experts, bias=moe.router_bias, prefix=f"{prefix}.router"
        )
        self.correction: nn.Parameter | None = None
        if moe.has_correction:
            self.correction = nn.Parameter(torch.empty(moe.num_experts), requires_grad=False)
        self.experts = nn.ModuleList(
            FeedForward(
                spec=spec,
                intermediate_size=moe.intermediate_size,
                bias=moe.expert_bias,
                activation=moe.activation,
                prefix=f"{prefix}.experts.{index}",
            )
            for index in range(moe.num_experts)
        )
        self.shared_expert: FeedForward | None = None
        self.shared_gate: Linear | None = None
        if moe.shared_intermediate_size:
            self.shared_expert = FeedForward(
                spec=spec, intermediate_size=moe.shared_intermediate_size, prefix=f"{prefix}.shared_expert"
            )
            if moe.shared_is_gated:
                gate_prefix = f"{prefix}.shared_gate"
                self.shared_gate = Linear(in_features=hidden, out_features=1, bias=False, prefix=gate_prefix)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """[num_tokens, hidden_size] to the same, added to `residual`."""
        weights, chosen = route_tokens(self.router(x), self._routing, correction=self.correction)
        weights = weights.to(x.dtype)
        output = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            tokens, ranks = torch.nonzero(chosen == index, as_tuple=True)
            if tokens.numel():
                weight = weights[tokens, ranks, None]
                computed = expert(x[tokens] * weight) if self._scales_input else expert(x[tokens]) * weight
                output.index_add_(0, tokens, computed)
        if self.shared_expert is not None:
            shared = self.shared_expert(x)
            output += shared if self.shared_gate is None else torch.sigmoid(self.shared_gate(x)) * shared
        output = self._parallel.all_reduce(output)
        return output if residual is None else residual + output
