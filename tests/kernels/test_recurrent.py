"""Recurrent layers: kernels equal their references, whatever the batch, and however tokens are cut into chunks."""

import numpy as np
import pytest
import torch

from pagoda_kernels.native.library import load_native
from pagoda_kernels.recurrent.batch import RecurrentBatch
from pagoda_kernels.recurrent.gated_delta_rule import gated_delta_rule, gated_delta_rule_reference
from pagoda_kernels.recurrent.short_convolution import short_convolution

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
    expected = gated_delta_rule_reference(*inputs, expected_states, batch)  # type: ignore[call-arg]
    actual = gated_delta_rule(*inputs, states, batch)  # type: ignore[call-arg]
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(states, expected_states, atol=2e-5, rtol=2e-5)
    assert torch.equal(states[6], before[6]), "rows of no one stay as they are"


@pytest.mark.parametrize("cuts", [(64,), (1,) * 64, (7, 50, 7)])
def test_chunks_change_no_bit(cuts: tuple[int, ...]) -> None:
    *inputs, states = make_inputs(64)
    whole_states = states.clone()
    whole = gated_delta_rule(*inputs, whole_states, make_batch((64,)))  # type: ignore[call-arg]
    parts = [torch.split(one, cuts) for one in inputs]
    outputs = [gated_delta_rule(*part, states, make_batch((part[0].shape[0],))) for part in zip(*parts, strict=True)]
    assert torch.equal(torch.cat(outputs), whole)
    assert torch.equal(states, whole_states)


@pytest.mark.parametrize("query_lens", [QUERY_LENS, (1, 1, 1), (2,), (3, 1)])
def test_a_short_convolution_sees_the_inputs_before_the_chunk(query_lens: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    width, channels, num_tokens = 4, 6, sum(query_lens)
    weight = torch.randn(channels, width, generator=generator)
    states = torch.randn(9, width - 1, channels, generator=generator)
    x = torch.randn(num_tokens, channels, generator=generator)
    kept = {0: 7} if num_tokens == len(query_lens) else {num_tokens - 2: 8, 0: 7}
    batch, before = make_batch(query_lens, kept), states.clone()
    output = short_convolution(x, weight, states, batch)
    start = 0
    for row, length in zip(batch.rows.tolist(), query_lens, strict=True):
        inputs = torch.cat((before[row], x[start : start + length]))
        for token in range(length):
            seen = inputs[token : token + width]
            expected = torch.nn.functional.silu((seen * weight.t()).sum(0))
            torch.testing.assert_close(output[start + token], expected, atol=1e-5, rtol=1e-5)
            if start + token in kept:
                assert torch.equal(states[kept[start + token]], seen[1:])
        assert torch.equal(states[row], inputs[-(width - 1) :])
        start += length
