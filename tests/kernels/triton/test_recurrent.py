"""The gated delta rule and the state space scan in Triton equal their references."""

import pytest
import torch

from pagoda_kernels.recurrent.gated_delta_rule import gated_delta_rule, gated_delta_rule_reference
from pagoda_kernels.recurrent.state_space_scan import state_space_scan, state_space_scan_reference
from tests.kernels.test_recurrent import make_batch, make_inputs, make_scan
from tests.kernels.triton.outputs import nan_filled_outputs


@pytest.mark.parametrize("sizes", [{}, {"key_heads": 1, "value_heads": 1, "key_dim": 128, "value_dim": 100}])
@pytest.mark.parametrize("kept", [{}, {0: 5, 3: 7, 10: 8}])
def test_the_gated_delta_rule(sizes: dict[str, int], kept: dict[int, int]) -> None:
    query_lens = (1, 5, 9, 1)
    *inputs, states = make_inputs(sum(query_lens), **sizes)
    expected_states, batch = states.clone(), make_batch(query_lens, kept)
    expected = gated_delta_rule_reference(*inputs, expected_states, batch)  # type: ignore[call-arg]  # as many as it takes
    with nan_filled_outputs():
        actual = gated_delta_rule(*inputs, states, batch)  # type: ignore[call-arg]  # as many as it takes
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(states, expected_states, atol=2e-5, rtol=2e-5)


def test_queries_and_keys_that_are_nearly_zero_do_not_reach_length_one() -> None:
    query, key, *inputs, states = make_inputs(4)
    expected_states, batch = states.clone(), make_batch((1, 3))
    moving = (1e-3 * query, 1e-3 * key, *inputs)
    expected = gated_delta_rule_reference(*moving, expected_states, batch)  # type: ignore[call-arg]  # as many as it takes
    actual = gated_delta_rule(*moving, states, batch)  # type: ignore[call-arg]  # as many as it takes
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(states, expected_states, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("sizes", [{}, {"heads": 2, "groups": 1, "head_dim": 64, "state_size": 100}])
@pytest.mark.parametrize("kept", [{}, {0: 5, 3: 7, 10: 8}])
@pytest.mark.parametrize("steps", [(0.0, float("inf")), (0.1, 1.5)])
def test_the_state_space_scan(sizes: dict[str, int], kept: dict[int, int], steps: tuple[float, float]) -> None:
    query_lens = (1, 5, 9, 1)
    (*moving, states), heads = make_scan(sum(query_lens), **sizes)
    expected_states, batch = states.clone(), make_batch(query_lens, kept)
    options = heads | {"steps": steps}
    expected = state_space_scan_reference(*moving, expected_states, batch, **options)  # type: ignore[call-arg]  # as many as it takes
    with nan_filled_outputs():
        actual = state_space_scan(*moving, states, batch, **options)  # type: ignore[call-arg]  # as many as it takes
    torch.testing.assert_close(actual, expected, atol=5e-5, rtol=5e-5)
    torch.testing.assert_close(states, expected_states, atol=5e-5, rtol=5e-5)


@pytest.mark.parametrize("given", [-80.0, -20.0, -8.0, -7.0, -6.5, 0.0, 19.0, 21.0, 300.0])
def test_a_step_keeps_its_digits(given: float) -> None:
    (*moving, states), heads = make_scan(1)
    moving[3] = torch.full_like(moving[3], given)
    heads |= {"step_bias": torch.zeros(6), "skip": torch.zeros(6)}
    states.zero_()
    expected_states = states.clone()
    state_space_scan_reference(*moving, expected_states, make_batch((1,)), **heads)  # type: ignore[call-arg]  # as many as it takes
    state_space_scan(*moving, states, make_batch((1,)), **heads)  # type: ignore[call-arg]  # as many as it takes
    torch.testing.assert_close(states, expected_states, atol=0.0, rtol=2e-4)
