"""Mixtures of experts, in C++ and grouped for a GPU, against the specification in float32, in each form of matrices."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from pagoda_kernels.decoder.decoder_layers import set_num_helpers
from pagoda_kernels.layers.act_and_mul import ClampedSwiglu, act_and_mul_reference
from pagoda_kernels.linear.compressed_weight import compress_weight
from pagoda_kernels.linear.linear_weights import LinearWeights
from pagoda_kernels.linear.packed_linear import pack_weight
from pagoda_kernels.linear.quantized_matrix import PackedMatrix, pack, quantize
from pagoda_kernels.linear.scaled_matrix import ScaledMatrix
from pagoda_kernels.moe import experts as experts_module
from pagoda_kernels.moe.experts import (
    ExpertWeights,
    GroupedExperts,
    Mixture,
    MixtureWeights,
    RoutedExperts,
    grouped_experts,
    has_mixture,
    mixture_reference,
    routed_experts,
)
from pagoda_kernels.moe.route_tokens import Routing, route_tokens
from pagoda_kernels.native.library import load_native, native
from pagoda_kernels.selection import use_references

BF16 = torch.bfloat16
Hold = Callable[[Tensor], tuple[Tensor | PackedMatrix, Tensor]]
"""A matrix as the kernel takes it, and what is in it."""


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    torch.manual_seed(0)
    load_native()
    if native("mixture_of_experts") is None:
        pytest.skip("this CPU has no AVX512-BF16, or this machine no compiler")
    yield
    use_references(())
    set_num_helpers(0)


def drawn(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape) * scale).to(BF16)


def packed(weight: Tensor) -> tuple[Tensor, Tensor]:
    return pack_weight(weight), weight


def compressed(weight: Tensor) -> tuple[Tensor, Tensor]:
    found = compress_weight(weight)
    assert found is not None
    return found, weight


def quantized(bits: int) -> Hold:
    def hold(weight: Tensor) -> tuple[PackedMatrix, Tensor]:
        matrix = quantize(weight, bits=bits, group_size=32)
        return pack(matrix), matrix.dequantize()

    return hold


class Plain:
    """A mixture in float32, and the same for the kernel."""

    def __init__(
        self,
        *,
        hidden: int = 64,
        size: int = 96,
        num_experts: int = 6,
        routing: Routing | None = None,
        activation: str | ClampedSwiglu = "silu",
        has_bias: bool = False,
        has_shared: bool = False,
        is_gated: bool = False,
        scales_input: bool = False,
        has_correction: bool = False,
        hold: Hold = packed,
    ) -> None:
        self.routing = routing or Routing(top_k=2)
        self.activation, self.scales_input = activation, scales_input
        self.router = drawn(num_experts, hidden, scale=0.3)
        self.correction = torch.randn(num_experts) if has_correction else None
        scale = hidden**-0.5
        count = num_experts + has_shared
        held_up = [hold(drawn(2 * size, hidden, scale=scale)) for _ in range(count)]
        held_down = [hold(drawn(hidden, size, scale=size**-0.5)) for _ in range(count)]
        self.up, self.down = [weight for _, weight in held_up], [weight for _, weight in held_down]
        self.up_bias = [drawn(2 * size) if has_bias else None for _ in range(count)]
        self.down_bias = [drawn(hidden) if has_bias else None for _ in range(count)]
        self.gate = drawn(1, hidden, scale=scale) if is_gated else None
        self.has_shared = has_shared
        expert_weights = [
            ExpertWeights(
                gate_up=linear(held_up[i][0], self.up[i], self.up_bias[i]),
                down=linear(held_down[i][0], self.down[i], self.down_bias[i]),
            )
            for i in range(count)
        ]
        self.weights = MixtureWeights(
            router=linear(pack_weight(self.router), self.router, None),
            routing=self.routing,
            correction=self.correction,
            experts=tuple(expert_weights[:num_experts]),
            activation=activation,
            scales_input=scales_input,
            shared=expert_weights[-1] if has_shared else None,
            shared_gate=None if self.gate is None else linear(pack_weight(self.gate), self.gate, None),
        )
        self.mixture = Mixture(self.weights)

    def expert(self, index: int, x: Tensor) -> Tensor:
        """One expert's result in float32, rounded to bfloat16 where the kernel rounds."""
        wide = x.float() @ self.up[index].float().t()
        if (bias := self.up_bias[index]) is not None:
            wide = wide + bias.float()
        gated = act_and_mul_reference(wide.to(BF16).float(), self.activation).to(BF16)
        out = gated.float() @ self.down[index].float().t()
        if (bias := self.down_bias[index]) is not None:
            out = out + bias.float()
        return out.to(BF16).float()

    def reference(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """[num_tokens, hidden] float32."""
        logits = x.float() @ self.router.float().t()
        weights, chosen = route_tokens(logits, self.routing, correction=self.correction)
        num_experts = len(self.weights.experts)
        experts = [lambda rows, index=index: self.expert(index, rows) for index in range(num_experts)]
        out = mixture_reference(x, weights, chosen, experts, scales_input=self.scales_input)
        if self.has_shared:
            shared = self.expert(-1, x)
            out += shared if self.gate is None else torch.sigmoid(x.float() @ self.gate.float().t()) * shared
        return out if residual is None else residual.float() + out


def linear(matrix: Tensor | PackedMatrix, weight: Tensor, bias: Tensor | None) -> LinearWeights:
    return LinearWeights(matrix=matrix, bias=bias, out_features=weight.shape[0], in_features=weight.shape[1])


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours.float(), theirs, rtol=0.02, atol=0.02)


VARIANTS = {
    "softmax": {},
    "shared": {"has_shared": True},
    "gated shared": {"has_shared": True, "is_gated": True},
    "deepseek": {
        "routing": Routing(
            top_k=2, scoring="sigmoid", num_groups=3, top_groups=2, group_score="top2", scale=2.5, is_normalized=True
        ),
        "has_correction": True,
        "has_shared": True,
    },
    "best groups": {"routing": Routing(top_k=2, num_groups=3, top_groups=1, is_normalized=False, scale=1.5)},
    "llama 4": {
        "routing": Routing(top_k=1, scoring="top_sigmoid", is_normalized=False),
        "scales_input": True,
        "has_shared": True,
    },
    "gpt-oss": {"activation": ClampedSwiglu(limit=1.5, alpha=1.702, up_offset=1.0), "has_bias": True},
    "norm_min": {"routing": Routing(top_k=2, norm_min=3.0)},
    "odd sizes": {"hidden": 70, "size": 34, "num_experts": 5, "routing": Routing(top_k=3)},
}


@pytest.mark.parametrize("num_tokens", [1, 5, 64, 700])
@pytest.mark.parametrize("name", VARIANTS)
def test_a_mixture_is_what_its_options_say(name: str, num_tokens: int) -> None:
    plain = Plain(**VARIANTS[name])
    x = drawn(num_tokens, plain.router.shape[1])
    close(plain.mixture(x), plain.reference(x))


@pytest.mark.parametrize("hold", [compressed, quantized(8), quantized(4)], ids=["compressed", "int8", "int4"])
@pytest.mark.parametrize("num_tokens", [1, 3, 40])
def test_matrices_may_be_held_in_any_form(hold: Hold, num_tokens: int) -> None:
    plain = Plain(hold=hold, num_experts=8, routing=Routing(top_k=3), has_shared=True)
    x = drawn(num_tokens, 64)
    close(plain.mixture(x), plain.reference(x))


@pytest.mark.parametrize("num_helpers", [0, 1])
def test_a_token_is_the_same_to_the_bit_in_every_batch(num_helpers: int) -> None:
    plain = Plain(num_experts=40, routing=Routing(top_k=4), has_shared=True, is_gated=True)
    x = drawn(90, 64)
    together = plain.mixture(x)
    set_num_helpers(num_helpers)
    assert torch.equal(plain.mixture(x[:16]), together[:16])
    for row in (0, 41, 89):
        assert torch.equal(plain.mixture(x[row : row + 1]), together[row : row + 1])


def test_more_tokens_of_an_expert_than_one_block_takes() -> None:
    """All that is added to a token is its own, also where tokens go through the experts some at a time."""
    plain = Plain(num_experts=2, routing=Routing(top_k=2), has_shared=True, is_gated=True)
    x, residual = drawn(2500, 64), drawn(2500, 64)
    close(plain.mixture(x, residual), plain.reference(x, residual))


def test_a_residual_is_added_and_left_as_it_is() -> None:
    plain = Plain(has_shared=True)
    x, residual = drawn(9, 64), drawn(9, 64)
    before = residual.clone()
    close(plain.mixture(x, residual), plain.reference(x, residual))
    assert torch.equal(residual, before)


def test_tokens_that_something_else_has_routed() -> None:
    plain = Plain()
    x = drawn(6, 64)
    chosen = torch.randint(6, (6, 3)).sort(dim=-1).values
    weights = torch.rand(6, 3)
    expected = torch.zeros(6, 64)
    for token in range(6):
        for rank in range(3):
            expected[token] += weights[token, rank] * plain.expert(int(chosen[token, rank]), x[token : token + 1])[0]
    close(plain.mixture.experts(x, weights, chosen), expected)


def test_views_are_computed_as_their_copies() -> None:
    """Parts of wider tensors, and choices and weights of any type and order."""
    plain = Plain(has_shared=True)
    x, residual = drawn(64, 6).t(), drawn(12, 128)[::2, ::2]
    expected = plain.mixture(x.contiguous(), residual.contiguous())
    assert torch.equal(plain.mixture(x, residual), expected)
    chosen, weights = torch.randint(6, (3, 6)).t(), torch.rand(3, 6).bfloat16().t()
    expected = plain.mixture.experts(x.contiguous(), weights.float().contiguous(), chosen.contiguous())
    assert torch.equal(plain.mixture.experts(x, weights, chosen), expected)


def test_no_token_gives_nothing() -> None:
    assert Plain().mixture(drawn(0, 64)).shape == (0, 64)


def test_a_mixture_that_is_set_aside_or_in_float32_has_no_kernel() -> None:
    weights = Plain().weights
    assert has_mixture(weights, BF16)
    assert not has_mixture(weights, torch.float32)
    use_references(["mixture_of_experts"])
    assert not has_mixture(weights, BF16)


def unread(linear: LinearWeights) -> list[LinearWeights]:
    """The same in forms that the C++ kernel does not read."""
    return [replace(linear, is_plain=True), replace(linear, in_features=linear.in_features - 1)]


def test_every_matrix_of_a_mixture_must_have_a_form_that_the_kernel_reads() -> None:
    weights = Plain(has_shared=True, is_gated=True).weights
    assert weights.shared is not None
    assert weights.shared_gate is not None
    assert has_mixture(weights, BF16)
    changed = [replace(weights, router=one) for one in unread(weights.router)]
    changed += [replace(weights, shared_gate=one) for one in unread(weights.shared_gate)]
    for field in ("gate_up", "down"):
        last, shared = weights.experts[-1], weights.shared
        for one in unread(getattr(last, field)):
            changed.append(replace(weights, experts=(*weights.experts[:-1], replace(last, **{field: one}))))
        changed += [replace(weights, shared=replace(shared, **{field: one})) for one in unread(getattr(shared, field))]
    assert [has_mixture(one, BF16) for one in changed] == [False] * 12


def test_experts_of_tokens_that_are_routed_elsewhere() -> None:
    plain = Plain(has_bias=True)
    experts = plain.weights.experts
    found = routed_experts(experts, activation="silu", dtype=BF16)
    assert isinstance(found, RoutedExperts)
    x, weights = drawn(7, 64), torch.rand(7, 2)
    chosen = torch.stack([torch.randperm(6)[:2] for _ in range(7)])
    assert torch.equal(found(x, weights, chosen), plain.mixture.experts(x, weights, chosen))
    for field in ("gate_up", "down"):
        for one in unread(getattr(experts[-1], field)):
            changed = (*experts[:-1], replace(experts[-1], **{field: one}))
            assert routed_experts(changed, activation="silu", dtype=BF16) is None, field
    assert routed_experts(experts, activation="silu", dtype=torch.float32) is None
    use_references(["mixture_of_experts"])
    assert routed_experts(experts, activation="silu", dtype=BF16) is None


def floats(number: int) -> Tensor:
    return drawn(64 if number % 2 == 0 else 32, 32, scale=0.2)


def small_floats(group_size: int, bits: int = 8) -> Callable[[int], ScaledMatrix]:
    def hold(number: int) -> ScaledMatrix:
        num_outputs = 64 if number % 2 == 0 else 32
        if bits == 4:
            codes = torch.randint(256, (num_outputs, 16), dtype=torch.uint8)
            return ScaledMatrix(codes, torch.full((num_outputs, 1), 127, dtype=torch.uint8), group_size)
        codes = torch.randn(num_outputs, 32).to(torch.float8_e4m3fn)
        return ScaledMatrix(codes, 0.2 * torch.rand(num_outputs, -(-32 // group_size)), group_size)

    return hold


def grouped(
    holds: list[Callable[[int], Tensor | ScaledMatrix]],
    *,
    num_biases: int = 0,
    is_plain: bool = True,
    scales_input: bool = False,
) -> tuple[MixtureWeights, GroupedExperts | None]:
    """Experts of which each is held as `holds` says; the first of all matrices have a bias."""
    experts, count = [], 0
    for hold in holds:
        pair = []
        for number, rows in enumerate((64, 32)):
            bias = drawn(rows) if count < num_biases else None
            matrix = hold(number)
            pair.append(LinearWeights(matrix=matrix, bias=bias, out_features=rows, in_features=32, is_plain=is_plain))
            count += 1
        experts.append(ExpertWeights(gate_up=pair[0], down=pair[1]))
    router = LinearWeights(matrix=drawn(len(holds), 32), bias=None, out_features=len(holds), in_features=32)
    weights = MixtureWeights(
        router=router,
        routing=Routing(top_k=2),
        correction=None,
        experts=tuple(experts),
        activation="silu",
        scales_input=scales_input,
    )
    return weights, grouped_experts(weights)


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is a grouped kernel; the references compute."""
    monkeypatch.setattr(experts_module, "triton_kernel", lambda name, tensor: object())


@pytest.mark.parametrize(
    ("holds", "options", "is_read"),
    [
        ([floats, floats], {}, True),
        ([floats, floats], {"num_biases": 4}, True),
        ([floats, floats], {"num_biases": 3}, False),
        ([floats, floats], {"is_plain": False}, False),
        ([small_floats(32), small_floats(32)], {}, True),
        ([small_floats(32), small_floats(16)], {}, False),
        ([small_floats(32), small_floats(32, bits=4)], {}, False),
        ([floats, small_floats(32)], {}, False),
    ],
)
def test_a_gpu_reads_experts_of_one_form(
    holds: list[Callable[[int], Tensor | ScaledMatrix]], options: dict[str, Any], is_read: bool, on_a_gpu: None
) -> None:
    assert (grouped(holds, **options)[1] is not None) is is_read


def test_without_the_kernel_experts_are_not_grouped() -> None:
    assert grouped([floats, floats])[1] is None


@pytest.mark.parametrize("scales_input", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 7, 200])
@pytest.mark.parametrize("hold", [floats, small_floats(32)])
def test_grouped_experts_are_the_mixture_s(
    hold: Callable[[int], Tensor | ScaledMatrix], num_tokens: int, scales_input: bool, on_a_gpu: None
) -> None:
    given, found = grouped([hold] * 3, num_biases=6, scales_input=scales_input)
    assert found is not None
    x, weights = drawn(num_tokens, 32), torch.rand(num_tokens, 2)
    chosen = torch.stack([torch.randperm(3)[:2] for _ in range(num_tokens)])

    def expert(one: ExpertWeights) -> Callable[[Tensor], Tensor]:
        def compute(rows: Tensor) -> Tensor:
            for step, linear in enumerate((one.gate_up, one.down)):
                matrix = linear.matrix
                wide = matrix.dequantize() if isinstance(matrix, ScaledMatrix) else matrix
                assert isinstance(wide, Tensor)
                assert linear.bias is not None
                rows = torch.nn.functional.linear(rows.float(), wide.float(), linear.bias.float())
                rows = act_and_mul_reference(rows, "silu").to(BF16) if step == 0 else rows
            return rows

        return compute

    expected = mixture_reference(x, weights, chosen, [expert(one) for one in given.experts], scales_input=scales_input)
    torch.testing.assert_close(found(x, weights, chosen), expected, rtol=0.02, atol=0.05)
