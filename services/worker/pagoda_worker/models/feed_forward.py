"""Feed-forward layers: one for all tokens, or a mixture of experts. Knows tensors; no requests."""

import torch
from torch import Tensor, nn

from pagoda_kernels.decoder.decoder_layers import FeedForwardWeights
from pagoda_kernels.layers.act_and_mul import ACTIVATIONS, act_and_mul
from pagoda_worker.models.layers import Linear, activation_name
from pagoda_worker.models.spec import DecoderSpec, MoeSpec
from pagoda_worker.parallel.tensor_parallel import ALONE, TensorParallel


class FeedForward(nn.Module):
    """down(act(gate(x)) * up(x)), or fc2(act(fc1(x)))."""

    def __init__(
        self, *, spec: DecoderSpec, intermediate_size: int, prefix: str = "", parallel: TensorParallel = ALONE
    ) -> None:
        """`parallel`: over whom the result is summed; a caller that sums it itself gives none."""
        super().__init__()
        self._parallel = parallel
        self._is_gated = spec.is_gated
        self._activation = activation_name(spec.activation)
        self.up_proj = Linear(
            in_features=spec.hidden_size,
            out_features=intermediate_size * (2 if spec.is_gated else 1),
            bias=spec.mlp_bias,
            prefix=f"{prefix}.up_proj",
        )
        self.down_proj = Linear(
            in_features=intermediate_size,
            out_features=spec.hidden_size,
            bias=spec.mlp_bias,
            prefix=f"{prefix}.down_proj",
        )

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """[num_tokens, hidden_size] to the same, added to `residual`."""
        x = self.up_proj(x)
        x = act_and_mul(x, self._activation) if self._is_gated else ACTIVATIONS[self._activation](x)
        return self._parallel.all_reduce(self.down_proj(x, residual))

    def fused_weights(self) -> FeedForwardWeights | None:
        """For layers in one call; None: it does something that they do not."""
        gate_up, down = self.up_proj.fused_weights(), self.down_proj.fused_weights()
        if gate_up is None or down is None or not self._is_gated or self._parallel.world_size > 1:
            return None
        return FeedForwardWeights(gate_up=gate_up, down=down, activation=self._activation)


class MixtureOfExperts(nn.Module):
    """Each token goes to the few experts that its router scores highest; their results are weighted and summed.

    Plain operations, one expert after the other: the specification that a fused kernel would have to meet.
    Source: Shazeer et al. 2017 (arXiv 1701.06538), Jiang et al. 2024 (arXiv 2401.04088).
    """

    def __init__(self, *, spec: DecoderSpec, moe: MoeSpec, prefix: str = "", parallel: TensorParallel = ALONE) -> None:
        super().__init__()
        self._parallel = parallel
        self._top_k = moe.num_experts_per_token
        self._is_normalized = moe.is_normalized
        hidden, experts = spec.hidden_size, range(moe.num_experts)
        self.router = Linear(in_features=hidden, out_features=moe.num_experts, bias=False, prefix=f"{prefix}.router")
        self.experts = nn.ModuleList(
            FeedForward(spec=spec, intermediate_size=moe.intermediate_size, prefix=f"{prefix}.experts.{index}")
            for index in experts
        )
        self.shared_expert: FeedForward | None = None
        self.shared_gate: Linear | None = None
        if moe.shared_intermediate_size:
            self.shared_expert = FeedForward(
                spec=spec, intermediate_size=moe.shared_intermediate_size, prefix=f"{prefix}.shared_expert"
            )
            self.shared_gate = Linear(in_features=hidden, out_features=1, bias=False, prefix=f"{prefix}.shared_gate")

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """[num_tokens, hidden_size] to the same, added to `residual`."""
        probabilities = self.router(x).float().softmax(dim=-1)
        weights, chosen = probabilities.topk(self._top_k, dim=-1)  # [num_tokens, top_k]
        if self._is_normalized:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        weights = weights.to(x.dtype)
        output = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            tokens, ranks = torch.nonzero(chosen == index, as_tuple=True)
            if tokens.numel():
                output.index_add_(0, tokens, expert(x[tokens]) * weights[tokens, ranks, None])
        if self.shared_expert is not None and self.shared_gate is not None:
            output += torch.sigmoid(self.shared_gate(x)) * self.shared_expert(x)
        output = self._parallel.all_reduce(output)
        return output if residual is None else residual + output
