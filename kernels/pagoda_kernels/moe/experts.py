"""The products of the chosen experts, and a whole mixture: router, experts, shared expert."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pagoda_kernels.layers.act_and_mul import ClampedSwiglu, act_and_mul, activation_arguments
from pagoda_kernels.linear.linear_weights import LinearWeights, native_weights
from pagoda_kernels.linear.scaled_matrix import ScaledMatrix
from pagoda_kernels.moe.grouped_linear import ExpertMatrices, grouped_linear, sort_by_expert
from pagoda_kernels.moe.route_tokens import SCORINGS, Routing
from pagoda_kernels.native.library import native
from pagoda_kernels.selection import triton_kernel

OPERATIONS = ("mixture_of_experts", "packed_linear", "quantized_linear", "act_and_mul")
"""Operations that the C++ kernel replaces: it computes products and gates the same, bit by bit."""
BLOCK_ROWS = (16, 32, 64, 128)
"""Rows of a block on a GPU: the first that holds what an expert has on average, or the last."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertWeights:
    """down(activation(gate(x)) * up(x))."""

    gate_up: LinearWeights
    """Rows of gate, then rows of up."""
    down: LinearWeights


@dataclass(frozen=True, kw_only=True, slots=True)
class MixtureWeights:
    """A mixture of experts."""

    router: LinearWeights
    routing: Routing
    correction: Tensor | None
    """[num_experts] float32; as in `route_tokens`."""
    experts: tuple[ExpertWeights, ...]
    activation: str | ClampedSwiglu
    """Activation of all experts; a name in ACTIVATIONS."""
    scales_input: bool = False
    """A token's weight is on what goes into its expert, not on what comes out."""
    shared: ExpertWeights | None = None
    """Sees every token."""
    shared_gate: LinearWeights | None = None
    """[1, hidden_size]: its sigmoid is on what the shared expert gives."""

    @property
    def linears(self) -> tuple[LinearWeights, ...]:
        """Every matrix."""
        experts = self.experts if self.shared is None else (*self.experts, self.shared)
        gate = () if self.shared_gate is None else (self.shared_gate,)
        return (self.router, *gate, *(linear for expert in experts for linear in (expert.gate_up, expert.down)))


def mixture_reference(
    x: Tensor,
    weights: Tensor,
    chosen: Tensor,
    experts: Sequence[Callable[[Tensor], Tensor]],
    *,
    scales_input: bool = False,
) -> Tensor:
    """The specification of the experts' part: their results, weighted and summed in float32.

    Args:
        x: [num_tokens, hidden_size].
        weights, chosen: [num_tokens, top_k] float32 and int64, as `route_tokens` gives them.
        experts: [n, hidden_size] to the same, one each.

    Returns:
        [num_tokens, hidden_size] float32.

    Source: Shazeer et al. 2017 (arXiv 1701.06538), Jiang et al. 2024 (arXiv 2401.04088).
    """
    output = x.new_zeros(x.shape, dtype=torch.float32)
    for index, expert in enumerate(experts):
        tokens, ranks = torch.nonzero(chosen == index, as_tuple=True)
        if not tokens.numel():
            continue
        weight = weights[tokens, ranks, None]
        if scales_input:
            output.index_add_(0, tokens, expert((x[tokens].float() * weight).to(x.dtype)).float())
        else:
            output.index_add_(0, tokens, expert(x[tokens]).float() * weight)
    return output


class RoutedExperts:
    """The experts' part in C++, on a CPU, in bfloat16, of tokens that something else has routed.

    Weights are used where they are, and are not to be replaced while this is in use. One caller at a time.
    """

    def __init__(
        self, experts: Sequence[ExpertWeights], *, activation: str | ClampedSwiglu, scales_input: bool = False
    ) -> None:
        """
        Raises:
            RuntimeError: there is no kernel for it (see `routed_experts`).
        """
        make = native("mixture_of_experts")
        if make is None:
            raise RuntimeError("this library of C++ kernels has no mixture_of_experts")
        self._kept = experts
        """The kernel has no more than pointers."""
        pairs = [(native_weights(expert.gate_up), native_weights(expert.down)) for expert in experts]
        self.kernel = make(pairs, *activation_arguments(activation), scales_input)

    def __call__(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """As `mixture_reference`, with the sum rounded to bfloat16."""
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        self.kernel.forward(x.contiguous(), chosen.contiguous(), weights.float().contiguous(), None, out)
        return out


class Mixture:
    """A mixture in C++, on a CPU, in bfloat16: the matrices of each expert are read once a call, for all of its tokens.

    Weights are used where they are, and are not to be replaced while this is in use. One caller at a time.
    """

    def __init__(self, weights: MixtureWeights) -> None:
        """
        Raises:
            RuntimeError: there is no kernel for it (see `has_mixture`).
        """
        self.experts = RoutedExperts(weights.experts, activation=weights.activation, scales_input=weights.scales_input)
        """The experts' part alone."""
        self._kept = weights
        """The kernel has no more than pointers."""
        self.kernel = self.experts.kernel
        """For `DecoderLayers`."""
        routing = weights.routing
        self.kernel.set_router(
            native_weights(weights.router),
            routing.top_k,
            SCORINGS.index(routing.scoring),
            routing.is_normalized,
            routing.norm_min,
            routing.norm_added,
            routing.scale,
            routing.num_groups,
            routing.top_groups,
            routing.group_score == "top2",
            weights.correction,
        )
        if weights.shared is not None:
            gate = None if weights.shared_gate is None else native_weights(weights.shared_gate)
            self.kernel.set_shared(native_weights(weights.shared.gate_up), native_weights(weights.shared.down), gate)

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """residual + mixture(x); all [num_tokens, hidden_size] bfloat16.

        A row of the result depends on that row of x alone, to the bit. What an expert gives is rounded; the weighted
        sum, with the shared expert's part and the residual, is taken in float32 and rounded once.
        """
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        self.kernel.forward_all(x.contiguous(), None if residual is None else residual.contiguous(), out)
        return out


class GroupedExperts:
    """The experts' part on a GPU: rows sorted by expert, one grouped product for all gates, one for all results.

    The device tells the host nothing on the way, so a graph can record it. Weights are used where they are.
    """

    def __init__(
        self, gate_up: ExpertMatrices, down: ExpertMatrices, *, activation: str | ClampedSwiglu, scales_input: bool
    ) -> None:
        self._gate_up, self._down = gate_up, down
        self._activation, self._scales_input = activation, scales_input

    def __call__(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """As `mixture_reference`: [num_tokens, hidden_size] float32."""
        num_tokens, top_k = chosen.shape
        num_experts = len(self._gate_up.weights)
        fitting = (rows for rows in BLOCK_ROWS if num_tokens * top_k <= rows * num_experts)
        block_rows = next(fitting, BLOCK_ROWS[-1])
        rows = sort_by_expert(chosen, num_experts, block_rows=block_rows)
        if self._scales_input:  # a row for each choice
            x = (x[:, None].float() * weights[:, :, None]).to(x.dtype).flatten(0, 1)
            wide = grouped_linear(x, self._gate_up, rows, top_k=1)
        else:
            wide = grouped_linear(x, self._gate_up, rows, top_k=top_k)
        out = grouped_linear(act_and_mul(wide, self._activation), self._down, rows, top_k=0)
        of_choices = out[rows.slots].view(num_tokens, top_k, -1).float()
        return of_choices.sum(dim=1) if self._scales_input else (of_choices * weights[:, :, None]).sum(dim=1)


def grouped_experts(weights: MixtureWeights) -> GroupedExperts | None:
    """For a CUDA device; None: the matrices are held in a form that no grouped kernel reads, or it is set aside."""
    return _grouped(weights.experts, weights.activation, scales_input=weights.scales_input)


def routed_experts(
    experts: Sequence[ExpertWeights], *, activation: str, dtype: torch.dtype
) -> RoutedExperts | GroupedExperts | None:
    """For tokens that something else routes; None: there is no kernel for the device, the form or the type.

    Args:
        activation: a name in ACTIVATIONS.
        dtype: of weights and tokens.
    """
    linears = [linear for expert in experts for linear in (expert.gate_up, expert.down)]
    first = linears[0].matrix
    if not (first if isinstance(first, Tensor) else first.codes).is_cpu:
        return _grouped(experts, activation, scales_input=False)
    return RoutedExperts(experts, activation=activation) if _has_kernel(linears, dtype) else None


def _grouped(
    experts: Sequence[ExpertWeights], activation: str | ClampedSwiglu, *, scales_input: bool
) -> GroupedExperts | None:
    gate_up = _plain_matrices([expert.gate_up for expert in experts])
    down = _plain_matrices([expert.down for expert in experts])
    if gate_up is None or down is None or triton_kernel("grouped_linear", gate_up.weight_addresses) is None:
        return None
    return GroupedExperts(gate_up, down, activation=activation, scales_input=scales_input)


def _plain_matrices(linears: Sequence[LinearWeights]) -> ExpertMatrices | None:
    matrices = [linear.matrix for linear in linears if linear.is_plain]
    tensors = [matrix for matrix in matrices if isinstance(matrix, Tensor)]
    scaled = [matrix for matrix in matrices if isinstance(matrix, ScaledMatrix)]
    biases = [linear.bias for linear in linears if linear.bias is not None]
    if len(linears) not in (len(tensors), len(scaled)) or len(biases) not in (0, len(linears)):
        return None
    if len({(matrix.bits, matrix.group_size) for matrix in scaled}) > 1:
        return None
    return ExpertMatrices.of(tensors or scaled, biases)


def has_mixture(weights: MixtureWeights, dtype: torch.dtype) -> bool:
    """Whether this can be a Mixture: no kernel is missing or set aside, and the shapes fit.

    Args:
        dtype: of weights and tokens.
    """
    return _has_kernel(weights.linears, dtype)


def _has_kernel(linears: Sequence[LinearWeights], dtype: torch.dtype) -> bool:
    if dtype != torch.bfloat16 or not all(map(native, OPERATIONS)):
        return False
    return not any(linear.is_plain or linear.in_features % 2 for linear in linears)
