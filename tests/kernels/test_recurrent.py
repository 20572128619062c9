"""Recurrent layers: kernels equal their references, whatever the batch, and however tokens are cut into chunks."""

from typing import Any

import numpy as np
import pytest
import torch

from pagoda_kernels.native.library import load_native
from pagoda_kernels.recurrent.batch import RecurrentBatch
from pagoda_kernels.recurrent.gate_and_norm import gate_and_norm, gate_and_norm_reference
from pagoda_kernels.recurrent.gated_delta_rule import gated_delta_rule, gated_delta_rule_reference
from pagoda_kernels.recurrent.selective_scan import selective_scan, selective_scan_reference
from pagoda_kernels.recurrent.short_convolution import short_convolution, short_convolution_reference
from pagoda_kernels.recurrent.state_space_scan import state_space_scan, state_space_scan_reference

CPU = torch.device("cpu")
QUERY_LENS = (1, 5, 17, 1, 64)


@pytest.fixture(autouse=True, scope="module")
def kernels() -> None:
    assert load_native(), "this machine has a compiler"


def make_batch(query_lens: tuple[int, ...], kept: dict[int, int] | None = None) -> RecurrentBatch:
    """Each sequence in a row of its own; `kept`: rows for the states after some tokens."""
    kept_rows = None
    if kept:
        kept_rows = np.full(sum(query_lens), -1, dtype=np.int64)
        for token, row in kept.items():
            kept_rows[token] = row
    rows = np.arange(len(query_lens))[::-1].copy()
    return RecurrentBatch(query_lens=np.array(query_lens), rows=rows, device=CPU, kept_rows=kept_rows)


def make_inputs(
    num_tokens: int, *, key_heads: int = 2, value_heads: int = 4, key_dim: int = 20, value_dim: int = 12
) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    return (
        draw(num_tokens, key_heads, key_dim),
        draw(num_tokens, key_heads, key_dim),
        draw(num_tokens, value_heads, value_dim),
        -draw(num_tokens, value_heads).exp(),
        draw(num_tokens, value_heads).sigmoid(),
        draw(9, value_heads, key_dim, value_dim),
    )


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"key_heads": 1, "value_heads": 1, "key_dim": 128, "value_dim": 128},
        {"key_dim": 16, "value_dim": 64},
        {"key_dim": 33, "value_dim": 1},
        {"value_heads": 6, "value_dim": 100},
    ],
)
@pytest.mark.parametrize("kept", [{}, {0: 5, 3: 7, 22: 8}])
def test_the_gated_delta_rule_equals_its_reference(sizes: dict[str, int], kept: dict[int, int]) -> None:
    *inputs, states = make_inputs(sum(QUERY_LENS), **sizes)
    before, expected_states, batch = states.clone(), states.clone(), make_batch(QUERY_LENS, kept)
    expected = gated_delta_rule_reference(*inputs, expected_states, batch)  # type: ignore[call-arg]  # as many as it takes
    actual = gated_delta_rule(*inputs, states, batch)  # type: ignore[call-arg]  # as many as it takes
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(states, expected_states, atol=2e-5, rtol=2e-5)
    assert torch.equal(states[6], before[6]), "rows of no one stay as they are"


def test_queries_and_keys_that_are_nearly_zero_do_not_reach_length_one() -> None:
    query, key, *inputs, states = make_inputs(4)
    expected_states, batch = states.clone(), make_batch((1, 3))
    moving = (1e-3 * query, 1e-3 * key, *inputs)
    expected = gated_delta_rule_reference(*moving, expected_states, batch)  # type: ignore[call-arg]  # as many as it takes
    actual = gated_delta_rule(*moving, states, batch)  # type: ignore[call-arg]  # as many as it takes
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(states, expected_states, atol=2e-5, rtol=2e-5)


WIDTHS = (7, 8, 9, 16, 17, 24, 25, 32, 33, 40, 47, 48, 49, 63, 64, 80)
"""Of a state's rows: one to four vectors of 8 or 16 lanes, each with and without a rest."""


@pytest.mark.parametrize("width", WIDTHS)
def test_rows_of_every_number_of_vectors_in_the_delta_rule(width: int) -> None:
    *inputs, states = make_inputs(4, key_dim=9, value_dim=width)
    expected_states, batch = states.clone(), make_batch((1, 3))
    expected = gated_delta_rule_reference(*inputs, expected_states, batch)  # type: ignore[call-arg]  # as many as it takes
    actual = gated_delta_rule(*inputs, states, batch)  # type: ignore[call-arg]  # as many as it takes
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(states, expected_states, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("cuts", [(64,), (1,) * 64, (7, 50, 7)])
def test_chunks_change_no_bit(cuts: tuple[int, ...]) -> None:
    *inputs, states = make_inputs(64)
    whole_states = states.clone()
    whole = gated_delta_rule(*inputs, whole_states, make_batch((64,)))  # type: ignore[call-arg]  # as many as it takes
    parts = [torch.split(one, cuts) for one in inputs]
    outputs = [gated_delta_rule(*part, states, make_batch((part[0].shape[0],))) for part in zip(*parts, strict=True)]
    assert torch.equal(torch.cat(outputs), whole)
    assert torch.equal(states, whole_states)


def make_scan(
    num_tokens: int, *, heads: int = 6, groups: int = 2, head_dim: int = 12, state_size: int = 20
) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
    """What moves with the tokens, then the states; and the parameters of heads."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    moving = (
        draw(num_tokens, heads, head_dim),
        draw(num_tokens, groups, state_size),
        draw(num_tokens, groups, state_size),
        4 * draw(num_tokens, heads),
        draw(9, heads, state_size, head_dim),
    )
    return moving, {"step_bias": draw(heads), "decay_log": draw(heads), "skip": draw(heads)}


SCANS: list[dict[str, Any]] = [
    {},
    {"heads": 2, "groups": 1, "head_dim": 64, "state_size": 128},
    {"heads": 3, "groups": 3, "head_dim": 100, "state_size": 33},
    {"head_dim": 1, "state_size": 1},
]


@pytest.mark.parametrize("sizes", SCANS)
@pytest.mark.parametrize("kept", [{}, {0: 5, 3: 7, 22: 8}])
@pytest.mark.parametrize("steps", [(0.0, float("inf")), (0.1, 1.5)])
def test_the_state_space_scan_equals_its_reference(
    sizes: dict[str, int], kept: dict[int, int], steps: tuple[float, float]
) -> None:
    (*moving, states), heads = make_scan(sum(QUERY_LENS), **sizes)
    before, expected_states, batch = states.clone(), states.clone(), make_batch(QUERY_LENS, kept)
    options = heads | {"steps": steps}
    expected = state_space_scan_reference(*moving, expected_states, batch, **options)  # type: ignore[call-arg]  # as many as it takes
    actual = state_space_scan(*moving, states, batch, **options)  # type: ignore[call-arg]  # as many as it takes
    torch.testing.assert_close(actual, expected, atol=5e-5, rtol=5e-5)
    torch.testing.assert_close(states, expected_states, atol=5e-5, rtol=5e-5)
    assert torch.equal(states[6], before[6]), "rows of no one stay as they are"


@pytest.mark.parametrize("width", WIDTHS)
def test_rows_of_every_number_of_vectors_in_the_scan(width: int) -> None:
    (*moving, states), heads = make_scan(4, head_dim=width, state_size=9)
    expected_states, batch = states.clone(), make_batch((1, 3))
    expected = state_space_scan_reference(*moving, expected_states, batch, **heads)  # type: ignore[call-arg]  # as many as it takes
    actual = state_space_scan(*moving, states, batch, **heads)  # type: ignore[call-arg]  # as many as it takes
    torch.testing.assert_close(actual, expected, atol=5e-5, rtol=5e-5)
    torch.testing.assert_close(states, expected_states, atol=5e-5, rtol=5e-5)


CUTS = [(64,), (1,) * 64, (7, 50, 7), (1, 62, 1), (32, 16, 16)]


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("head_dim", [12, 100])
def test_chunks_change_no_bit_of_a_scan(cuts: tuple[int, ...], head_dim: int) -> None:
    (*moving, states), heads = make_scan(64, head_dim=head_dim)
    whole_states = states.clone()
    whole = state_space_scan(*moving, whole_states, make_batch((64,)), **heads)  # type: ignore[call-arg]  # as many as it takes
    parts = zip(*(torch.split(one, cuts) for one in moving), strict=True)
    outputs = [state_space_scan(*part, states, make_batch((part[0].shape[0],)), **heads) for part in parts]
    assert torch.equal(torch.cat(outputs), whole)
    assert torch.equal(states, whole_states)


def make_selective(num_tokens: int, channels: int, state_size: int) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """What moves with the tokens, then the states; and the parameters of channels."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    sizes = ((num_tokens, channels), (num_tokens, state_size), (num_tokens, state_size), (num_tokens, channels))
    moving = [draw(*size) for size in (*sizes, (9, channels, state_size))]
    decay_log = draw(channels, state_size)
    return moving, {"step_bias": draw(channels), "decay_log": decay_log, "skip": draw(channels)}


@pytest.mark.parametrize(("channels", "state_size"), [(12, 16), (5, 3), (1, 1)])
@pytest.mark.parametrize(
    ("query_lens", "kept"), [(QUERY_LENS, {}), (QUERY_LENS, {0: 5, 3: 7, 22: 8}), ((1, 1, 1), {1: 7})]
)
def test_the_selective_scan_equals_its_reference(
    query_lens: tuple[int, ...], kept: dict[int, int], channels: int, state_size: int
) -> None:
    (x, b, c, step, states), options = make_selective(sum(query_lens), channels, state_size)
    before, expected_states, batch = states.clone(), states.clone(), make_batch(query_lens, kept)
    expected = selective_scan_reference(x, b, c, step, expected_states, batch, **options)
    actual = selective_scan(x, b, c, step, states, batch, **options)
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(states, expected_states, atol=2e-5, rtol=2e-5)
    assert torch.equal(states[6], before[6]), "rows of no one stay as they are"


@pytest.mark.parametrize("cuts", CUTS)
def test_chunks_change_no_bit_of_a_selective_scan(cuts: tuple[int, ...]) -> None:
    """Of channels that fill vectors; of others PyTorch computes the last ones in another way."""
    (x, b, c, step, states), options = make_selective(64, 32, 16)
    whole_states = states.clone()
    whole = selective_scan(x, b, c, step, whole_states, make_batch((64,)), **options)
    outputs, start = [], 0
    for length in cuts:
        part = slice(start, start + length)
        batch = make_batch((length,))
        outputs.append(selective_scan(x[part], b[part], c[part], step[part], states, batch, **options))
        start += length
    assert torch.equal(torch.cat(outputs), whole)
    assert torch.equal(states, whole_states)


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [2, 3, 4, 7])
def test_chunks_change_no_bit_of_a_convolution(cuts: tuple[int, ...], dtype: torch.dtype, width: int) -> None:
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(64, 60, generator=generator).to(dtype)
    x, weight, bias = wide[:, 5:42], torch.randn(37, width).to(dtype), torch.randn(37).to(dtype)
    states = torch.randn(9, width - 1, 37).to(dtype)
    whole_states, expected_states = states.clone(), states.clone()
    whole = short_convolution(x, weight, whole_states, make_batch((64,)), bias=bias)
    parts = torch.split(x, cuts)
    outputs = [short_convolution(one, weight, states, make_batch((one.shape[0],)), bias=bias) for one in parts]
    assert torch.equal(torch.cat(outputs), whole)
    assert torch.equal(states, whole_states)
    expected = short_convolution_reference(x, weight, expected_states, make_batch((64,)), bias=bias)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(whole, expected, atol=tolerance, rtol=tolerance)
    assert torch.equal(whole_states, expected_states)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("size", "num_groups"), [(96, 2), (40, 1), (37, 1), (300, 4)])
@pytest.mark.parametrize("form", ["gate first", "norm first", "no norm"])
def test_a_gate_and_a_norm(dtype: torch.dtype, size: int, num_groups: int, form: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(19, size, generator=generator)
    gate = torch.randn(19, size + 9, generator=generator).to(dtype)[:, 4 : size + 4]
    weight = None if form == "no norm" else torch.randn(size, generator=generator).to(dtype)
    options = {"num_groups": num_groups, "is_gate_first": form == "gate first"}
    actual = gate_and_norm(x, gate, weight, 0.1, **options)  # type: ignore[arg-type]
    expected = gate_and_norm_reference(x, gate, weight, 0.1, **options)  # type: ignore[arg-type]
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)
    alone = [gate_and_norm(x[i : i + 1], gate[i : i + 1], weight, 0.1, **options) for i in range(19)]  # type: ignore[arg-type]
    assert torch.equal(torch.cat(alone), actual)


@pytest.mark.parametrize("has_silu", [True, False])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("is_native", [True, False])
@pytest.mark.parametrize("query_lens", [QUERY_LENS, (1, 1, 1), (2,), (3, 1)])
def test_a_short_convolution_sees_the_inputs_before_the_chunk(
    query_lens: tuple[int, ...], is_native: bool, has_bias: bool, has_silu: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    width, channels, num_tokens = 4, 6, sum(query_lens)
    weight = torch.randn(channels, width, generator=generator)
    states = torch.randn(9, width - 1, channels, generator=generator)
    x = torch.randn(num_tokens, channels, generator=generator)
    kept = {0: 7} if num_tokens == len(query_lens) else {num_tokens - 2: 8, 0: 7}
    batch, before = make_batch(query_lens, kept), states.clone()
    bias = torch.randn(channels, generator=generator) if has_bias else None
    function = short_convolution if is_native else short_convolution_reference
    output = function(x, weight, states, batch, bias=bias, has_silu=has_silu)
    start = 0
    for row, length in zip(batch.rows.tolist(), query_lens, strict=True):
        inputs = torch.cat((before[row], x[start : start + length]))
        for token in range(length):
            seen = inputs[token : token + width]
            expected = (seen * weight.t()).sum(0) + (0 if bias is None else bias)
            expected = torch.nn.functional.silu(expected) if has_silu else expected
            torch.testing.assert_close(output[start + token], expected, atol=1e-5, rtol=1e-5)
            if start + token in kept:
                assert torch.equal(states[kept[start + token]], seen[1:])
        assert torch.equal(states[row], inputs[-(width - 1) :])
        start += length


@pytest.mark.parametrize("name", ["delta rule", "state space", "selective", "convolution"])
def test_a_state_may_be_kept_in_the_first_row_of_all(name: str) -> None:
    """Rows begin with 0, and -1 keeps none."""
    batch = RecurrentBatch(
        query_lens=np.array([3]), rows=np.array([2]), device=CPU, kept_rows=np.array([0, -1, 1], dtype=np.int64)
    )
    first = RecurrentBatch(query_lens=np.array([1]), rows=np.array([2]), device=CPU)

    def run(num_tokens: int, of: RecurrentBatch) -> torch.Tensor:
        if name == "delta rule":
            *inputs, states = make_inputs(3)
            gated_delta_rule(*(one[:num_tokens] for one in inputs), states, of)  # type: ignore[call-arg]  # as many as it takes
        elif name == "state space":
            (*moving, states), heads = make_scan(3)
            state_space_scan(*(one[:num_tokens] for one in moving), states, of, **heads)  # type: ignore[call-arg]  # as many as it takes
        elif name == "selective":
            (*moving, states), heads = make_selective(3, 32, 16)
            selective_scan(*(one[:num_tokens] for one in moving), states, of, **heads)  # type: ignore[call-arg]  # as many as it takes
        else:
            generator = torch.Generator().manual_seed(0)
            x, weight, states = (torch.randn(size, generator=generator) for size in ((3, 20), (20, 4), (9, 3, 20)))
            short_convolution(x[:num_tokens], weight, states, of)
        return states

    after_all, after_one = run(3, batch), run(1, first)
    assert torch.equal(after_all[0], after_one[2])
    assert torch.equal(after_all[1], after_all[2])
    assert torch.equal(after_all[3:], after_one[3:])
