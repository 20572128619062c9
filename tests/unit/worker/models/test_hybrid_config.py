"""What config.json says about recurrent layers, with sizes that do not fit each other."""

import math
from typing import Any

import pytest

from pagoda_common.errors import ModelLoadError
from pagoda_worker.models.hybrid_config import mamba2_of, mixers_of, step_limits

SIZES = {"mamba_n_heads": 6, "mamba_d_head": 10, "mamba_n_groups": 3, "mamba_d_state": 7, "mamba_d_conv": 5}


def test_each_layer_has_a_mixer() -> None:
    kinds = ["mamba", "attention", "linear_attention", "full_attention", "conv"]
    assert mixers_of(kinds, 5) == ("recurrent", "attention", "recurrent", "attention", "recurrent")
    for num_layers in (4, 6):
        with pytest.raises(ModelLoadError, match=f"layer types are 5 for {num_layers} layers"):
            mixers_of(kinds, num_layers)
    with pytest.raises(ModelLoadError, match="layer type 'sliding' is not supported; supported are linear_attention"):
        mixers_of(["mamba", "sliding"], 2)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, (0.0, math.inf)),
        ([0, 0], (0.0, 0.0)),
        ([0.5, 2], (0.5, 2.0)),
        ([0.0, {"__float__": "Infinity"}], (0.0, math.inf)),
    ],
)
def test_limits_of_steps(given: list[Any] | None, expected: tuple[float, float]) -> None:
    assert step_limits({"time_step_limit": given}) == expected
    assert step_limits({}) == (0.0, math.inf)


@pytest.mark.parametrize("given", [[1.0], [0.0, 1.0, 2.0], [2.0, 1.0], [-1.0, 1.0], [math.nan, 1.0]])
def test_limits_of_steps_that_are_none_are_refused(given: list[float]) -> None:
    with pytest.raises(ModelLoadError, match=r"time_step_limit is .*, must be two numbers from 0 on, rising"):
        step_limits({"time_step_limit": given})


def test_sizes_of_a_mamba_2_layer() -> None:
    net = mamba2_of(SIZES, hidden_size=30)
    assert (net.num_heads, net.head_dim, net.num_groups, net.state_size, net.conv_width) == (6, 10, 3, 7, 5)
    assert (net.norm_groups, net.conv_bias, net.in_bias, net.out_bias) == (3, True, False, False)
    biased = mamba2_of({**SIZES, "mamba_proj_bias": True, "mamba_conv_bias": False}, hidden_size=30)
    assert (biased.conv_bias, biased.in_bias, biased.out_bias) == (False, True, True)
    assert mamba2_of({**SIZES, "mamba_expand": 4, "mamba_d_head": "auto"}, hidden_size=30).head_dim == 20
    assert mamba2_of({**SIZES, "mamba_d_head": "auto"}, hidden_size=30, num_values=90).head_dim == 15
    assert mamba2_of(SIZES, hidden_size=30, norm="none").norm == "none"


@pytest.mark.parametrize(
    ("config", "heads"),
    [({}, "6 Mamba heads of 10"), ({"mamba_d_head": "auto"}, "6 Mamba heads of 11"), ({"mamba_n_heads": 0}, "0 Mamba")],
)
def test_heads_make_all_values_of_a_mamba_2_layer(config: dict[str, Any], heads: str) -> None:
    with pytest.raises(ModelLoadError, match=f"{heads} .*values are not 70 values"):
        mamba2_of({**SIZES, **config}, hidden_size=35)
