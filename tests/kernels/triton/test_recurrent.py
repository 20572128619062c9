"""The gated delta rule in Triton equals its reference."""

import pytest
import torch

from pagoda_kernels.recurrent.gated_delta_rule import gated_delta_rule, gated_delta_rule_reference
from tests.kernels.test_recurrent import make_batch, make_inputs
from tests.kernels.triton.outputs import nan_filled_outputs


@pytest.mark.parametrize("sizes", [{}, {"key_heads": 1, "value_heads": 1, "key_dim": 128, "value_dim": 100}])
@pytest.mark.parametrize("kept", [{}, {0: 5, 3: 7, 10: 8}])
def test_the_gated_delta_rule(sizes: dict[str, int], kept: dict[int, int]) -> None:
    query_lens = (1, 5, 9, 1)
    *inputs, states = make_inputs(sum(query_lens), **sizes)
    expected_states, batch = states.clone(), make_batch(query_lens, kept)
    expected = gated_delta_rule_reference(*inputs, expected_states, batch)  # type: ignore[call-arg]
    with nan_filled_outputs():
        actual = gated_delta_rule(*inputs, states, batch)  # type: ignore[call-arg]
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(states, expected_states, atol=2e-5, rtol=2e-5)
