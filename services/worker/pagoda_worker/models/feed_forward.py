"""Feed-forward layers: one for all tokens, or a mixture of experts. Knows tensors; no requests."""

from collections.abc import Callable
from statistics import NormalDist

import numpy as np
import torch
from torch import Tensor, nn

from pagoda_kernels.decoder.decoder_layers import FeedForwardWeights
from pagoda_kernels.layers.act_and_mul import ACTIVATIONS, ClampedSwiglu, act_and_mul
from pagoda_kernels.moe.experts import (
    ExpertWeights,
    GroupedExperts,
    Mixture,
    MixtureWeights,
    grouped_experts,
    has_mixture,
    mixture_reference,
)
from pagoda_kernels.moe.route_tokens import route_tokens
from pagoda_worker.lora.lora_rows import IntArray, LoraRows
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
        hidden_size: int | None = None,
        bias: bool | None = None,
        activation: ClampedSwiglu | None = None,
        sparsity: float = 0.0,
        prefix: str = "",
        parallel: TensorParallel = ALONE,
    ) -> None:
        """
        Args:
            hidden_size, bias, activation: override the spec's.
            sparsity: share of the gate's values that become zero if they are normally distributed.
            parallel: ranks over which the result is summed; None if the caller sums it.
        """
        super().__init__()
        self._parallel = parallel
        self.is_gated = spec.is_gated
        self.activation = activation or activation_name(spec.activation)
        self._gate_multiplier, self._multiplier = spec.mlp_multipliers
        self._cutoff = NormalDist().inv_cdf(sparsity) if sparsity else None
        has_bias, hidden = spec.mlp_bias if bias is None else bias, hidden_size or spec.hidden_size
        self.up_proj = Linear(
            in_features=hidden,
            out_features=intermediate_size * (2 if spec.is_gated else 1),
            bias=has_bias,
            prefix=f"{prefix}.up_proj",
        )
        self.down_proj = Linear(
            in_features=intermediate_size, out_features=hidden, bias=has_bias, prefix=f"{prefix}.down_proj"
        )

    def forward(self, x: Tensor, residual: Tensor | None = None, *, added: Tensor | None = None) -> Tensor:
        """[num_tokens, hidden_size] to the same, added to `residual`. `added`: to the projected gate and input."""
        x = self.up_proj(x, added)
        if self._gate_multiplier != 1.0:
            x[:, : x.shape[1] // 2] *= self._gate_multiplier
        if self._cutoff is not None:
            x = torch.cat((self._sparse(x[:, : x.shape[1] // 2], self._cutoff), x[:, x.shape[1] // 2 :]), dim=1)
        if self.is_gated or isinstance(self.activation, ClampedSwiglu):
            x = act_and_mul(x, self.activation)
        else:
            x = ACTIVATIONS[self.activation](x)
        if self._multiplier == 1.0:
            return self._parallel.all_reduce(self.down_proj(x, residual))
        output = self._parallel.all_reduce(self.down_proj(x)) * self._multiplier
        return output if residual is None else residual + output

    def _sparse(self, gate: Tensor, cutoff: float) -> Tensor:
        """The gate's values less `cutoff` standard deviations above their mean over all ranks, at least 0."""
        wide, count = gate.float(), gate.shape[1] * self._parallel.world_size
        mean = self._parallel.all_reduce(wide.sum(1, keepdim=True)) / count
        squares = self._parallel.all_reduce((wide - mean).square().sum(1, keepdim=True))
        return torch.relu(wide - (mean + (squares / count).sqrt() * cutoff)).to(gate.dtype)

    def fused_weights(self) -> FeedForwardWeights | None:
        """The layer's description for a call of all layers; None if that call does not support it."""
        gate_up, down = self.up_proj.fused_weights(), self.down_proj.fused_weights()
        if gate_up is None or down is None or not self.is_gated or self._parallel.world_size > 1:
            return None
        if isinstance(self.activation, ClampedSwiglu) or (self._gate_multiplier, self._multiplier) != (1.0, 1.0):
            return None
        if self._cutoff is not None:
            return None
        return FeedForwardWeights(gate_up=gate_up, down=down, activation=self.activation)


class MixtureOfExperts(nn.Module):
    """Each token uses the few experts that its router scores highest; their results are weighted and summed.

    In bfloat16 on a CPU one kernel computes all of it; else plain operations, one expert after the other.
    Source: Shazeer et al. 2017 (arXiv 1701.06538), Jiang et al. 2024 (arXiv 2401.04088).
    """

    float32_parameters = frozenset({"correction"})
    """Parameters that keep float32, whatever the model's data type."""
    lora: LoraRows | None = None
    """Adapter rows, as of every layer."""
    lora_name = ""

    def __init__(self, *, spec: DecoderSpec, moe: MoeSpec, prefix: str = "", parallel: TensorParallel = ALONE) -> None:
        super().__init__()
        self._parallel = parallel
        self._routing = moe.routing
        self._activation = moe.activation or activation_name(spec.activation)
        self._kernel: Mixture | None = None
        """The kernel for the whole mixture, on a CPU."""
        self._grouped: GroupedExperts | None = None
        """The kernel for the experts, on a GPU."""
        self._is_bound = False
        """Whether a kernel was already looked up for the current weights."""
        self._scales_input = moe.scales_input
        hidden = spec.hidden_size
        self.router = Linear(
            in_features=hidden, out_features=moe.num_experts, bias=moe.router_bias, prefix=f"{prefix}.router"
        )
        self.correction: nn.Parameter | None = None
        if moe.has_correction:
            self.correction = nn.Parameter(torch.empty(moe.num_experts), requires_grad=False)
        self.latent_in: Linear | None = None
        self.latent_out: Linear | None = None
        if (latent := moe.latent_size) != 0:
            places = f"{prefix}.latent_in", f"{prefix}.latent_out"
            self.latent_in = Linear(in_features=hidden, out_features=latent, bias=False, prefix=places[0])
            self.latent_out = Linear(in_features=latent, out_features=hidden, bias=False, prefix=places[1])
        self.experts = nn.ModuleList(
            FeedForward(
                spec=spec,
                intermediate_size=moe.intermediate_size,
                hidden_size=latent or None,
                bias=moe.expert_bias,
                activation=moe.activation,
                prefix=f"{prefix}.experts.{index}",
            )
            for index in range(moe.num_experts)
        )
        for expert in self.experts:
            if isinstance(expert, FeedForward) and expert.is_gated:
                expert.up_proj.is_of_experts = expert.down_proj.is_of_experts = True
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
        if not self._is_bound:
            self._bind()
        changed = None if self.lora is None else self.lora.rows_within(self.lora_name)
        if changed is not None and changed.size:
            output = self._with_adapters(x, changed)
        elif self._kernel is not None:
            alone = self._parallel.world_size == 1
            output = self._kernel(x, residual if alone else None)
            if alone:
                return output
        else:
            output = self._reference(x)
        output = self._parallel.all_reduce(output)
        return output if residual is None else residual + output

    def of_routed(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """The experts' output for tokens with given routing, of `x`'s shape and data type.

        Args:
            weights, chosen: as `route_tokens` gives them.
        """
        if not self._is_bound:
            self._bind()
        if self._kernel is not None:
            output = self._kernel.experts(x, weights, chosen)
        elif self._grouped is not None:
            output = self._grouped(x, weights, chosen).to(x.dtype)
        else:
            output = mixture_reference(x, weights, chosen, list(self.experts)).to(x.dtype)
        return self._parallel.all_reduce(output)

    def _with_adapters(self, x: Tensor, changed: IntArray) -> Tensor:
        """This rank's part if adapters change some rows: these expert by expert, the rest as usual."""
        assert self.lora is not None, "rows have adapters"
        rest = np.setdiff1d(np.arange(x.shape[0]), changed)
        output = torch.empty_like(x)
        if rest.size:
            rows = torch.from_numpy(rest).to(x.device)
            with self.lora.selected(rest):
                others = x.index_select(0, rows)
                output[rows] = self._reference(others) if self._kernel is None else self._kernel(others, None)
        rows = torch.from_numpy(changed).to(x.device)
        with self.lora.selected(changed):
            output[rows] = self._one_by_one(x.index_select(0, rows))
        return output

    def _one_by_one(self, x: Tensor) -> Tensor:
        """As `_reference`, for experts that must know their rows."""
        weights, chosen = route_tokens(
            self.router.multiply(x, out_dtype=torch.float32), self._routing, correction=self.correction
        )

        def of(index: int, expert: nn.Module) -> Callable[[Tensor], Tensor]:
            def run(rows: Tensor) -> Tensor:
                assert self.lora is not None, "rows have adapters"
                with self.lora.selected((chosen == index).any(dim=1).nonzero()[:, 0].cpu().numpy()):
                    return expert(rows)  # type: ignore[no-any-return]  # torch: Module calls are Any

            return run

        experts = [of(index, expert) for index, expert in enumerate(self.experts)]
        narrow = x if self.latent_in is None else self.latent_in(x)
        output = mixture_reference(narrow, weights, chosen, experts, scales_input=self._scales_input)
        return self._with_shared(x, output).to(x.dtype)

    def _reference(self, x: Tensor) -> Tensor:
        """This rank's part by separate operations; on a GPU all experts in one."""
        logits = self.router.multiply(x, out_dtype=torch.float32)
        weights, chosen = route_tokens(logits, self._routing, correction=self.correction)
        narrow = x if self.latent_in is None else self.latent_in(x)
        if self._grouped is not None:
            output = self._grouped(narrow, weights, chosen)
        else:
            output = mixture_reference(narrow, weights, chosen, list(self.experts), scales_input=self._scales_input)
        return self._with_shared(x, output).to(x.dtype)

    def _with_shared(self, x: Tensor, output: Tensor) -> Tensor:
        """The experts' output, as wide as `x`, plus that of the shared expert, float32."""
        if self.latent_out is not None:
            output = self.latent_out(output.to(x.dtype)).float()
        if self.shared_expert is not None:
            shared = self.shared_expert(x).float()
            output += shared if self.shared_gate is None else torch.sigmoid(self.shared_gate(x).float()) * shared
        return output

    def fused_weights(self) -> MixtureWeights | None:
        """Arguments of a kernel for the whole mixture; None if the kernel does not support it."""
        experts = [_expert_weights(expert) for expert in self.experts if isinstance(expert, FeedForward)]
        found = tuple(expert for expert in experts if expert is not None)
        router = self.router.fused_weights()
        gate = None if self.shared_gate is None else self.shared_gate.fused_weights()
        shared = None if self.shared_expert is None else _expert_weights(self.shared_expert)
        is_missing = router is None or (self.shared_gate is not None and gate is None)
        if router is None or is_missing or len(found) < len(self.experts) or self.latent_in is not None:
            return None
        if self.shared_expert is not None and (shared is None or self._activation != self.shared_expert.activation):
            return None
        return MixtureWeights(
            router=router,
            routing=self._routing,
            correction=self.correction,
            experts=found,
            activation=self._activation,
            scales_input=self._scales_input,
            shared=shared,
            shared_gate=gate,
        )

    @property
    def is_grouped(self) -> bool:
        """Whether routing needs no result on the host."""
        if not self._is_bound:
            self._bind()
        return self._grouped is not None

    def release_kernels(self) -> None:
        """Release weights that are about to be replaced."""
        self._kernel = self._grouped = None
        self._is_bound = False

    def _bind(self) -> None:
        """Look up the kernel for the current weights."""
        self._is_bound = True
        weights = self.fused_weights()
        if weights is None:
            return
        self._grouped = grouped_experts(weights)
        if self._grouped is None and self.router.weight.is_cpu and has_mixture(weights, self.router.dtype):
            self._kernel = Mixture(weights)


def _expert_weights(expert: FeedForward) -> ExpertWeights | None:
    if not expert.is_gated:
        return None
    gate_up, down = expert.up_proj.fused_weights(), expert.down_proj.fused_weights()
    return None if gate_up is None or down is None else ExpertWeights(gate_up=gate_up, down=down)
