"""Options of recurrent layers: which sizes are refused, and what each rank has of them."""

from dataclasses import replace

import pytest

from pagoda_common.errors import ConfigError, ModelLoadError
from pagoda_worker.models.recurrent_spec import DeltaNetSpec, Mamba2Spec, MambaSpec, RecurrentSpec, ShortConvSpec

DELTA = DeltaNetSpec(num_key_heads=3, num_value_heads=6, key_dim=5, value_dim=7, conv_width=2)
MAMBA = MambaSpec(num_channels=6, state_size=1, conv_width=2, step_rank=1)
MAMBA2 = Mamba2Spec(num_heads=6, head_dim=5, num_groups=3, state_size=4, conv_width=2, norm_groups=3)
CONV = ShortConvSpec(num_channels=6, conv_width=2)


@pytest.mark.parametrize(
    ("spec", "names"),
    [
        (DELTA, ["num_key_heads", "num_value_heads", "key_dim", "value_dim"]),
        (MAMBA, ["num_channels", "state_size", "step_rank"]),
        (MAMBA2, ["num_heads", "head_dim", "num_groups", "state_size"]),
        (CONV, ["num_channels"]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_sizes_are_at_least_1_and_the_convolutions_2(spec: RecurrentSpec, names: list[str]) -> None:
    for name, value in [*((name, 0) for name in names), ("conv_width", 1)]:
        with pytest.raises(ModelLoadError, match="convolution"):
            replace(spec, **{name: value})


def test_the_least_sizes_are_allowed() -> None:
    DeltaNetSpec(num_key_heads=1, num_value_heads=1, key_dim=1, value_dim=1, conv_width=2)
    MambaSpec(num_channels=1, state_size=1, conv_width=2, step_rank=1)
    Mamba2Spec(num_heads=1, head_dim=1, num_groups=1, state_size=1, conv_width=2)
    ShortConvSpec(num_channels=1, conv_width=2)


def test_heads_share_groups_evenly() -> None:
    with pytest.raises(ModelLoadError, match="7 value heads cannot share 3 key heads"):
        replace(DELTA, num_value_heads=7)
    with pytest.raises(ModelLoadError, match="7 Mamba heads cannot share 3 groups"):
        replace(MAMBA2, num_heads=7)
    with pytest.raises(ModelLoadError, match="30 values cannot be normalised in 4 groups"):
        replace(MAMBA2, norm_groups=4)


@pytest.mark.parametrize("count", [1, 4, 6])
def test_multipliers_are_of_all_five_parts(count: int) -> None:
    with pytest.raises(ModelLoadError, match=f"ssm_multipliers are {count}, must be 5"):
        replace(MAMBA2, part_multipliers=(1.0,) * count)
    replace(MAMBA2, part_multipliers=(1.0,) * 5)
    replace(MAMBA2, part_multipliers=())


def test_a_rank_has_its_share() -> None:
    assert DELTA.of_rank(3) == replace(DELTA, num_key_heads=1, num_value_heads=2)
    assert MAMBA.of_rank(3) == replace(MAMBA, num_channels=2)
    assert CONV.of_rank(3) == replace(CONV, num_channels=2)
    assert MAMBA2.of_rank(3) == replace(MAMBA2, num_heads=2, num_groups=1, norm_groups=1)
    single = replace(MAMBA2, num_groups=1, norm_groups=1)
    assert single.of_rank(2) == replace(single, num_heads=3, shares_norm=True)
    for spec in (DELTA, MAMBA, MAMBA2, CONV):
        assert spec.of_rank(1) == spec


def test_what_ranks_cannot_share_evenly_is_refused() -> None:
    for spec, name in (
        (DELTA, "linear_num_key_heads, 3"),
        (MAMBA, "the number of Mamba channels, 6"),
        (CONV, "the channels of the short convolution, 6"),
        (MAMBA2, "the number of Mamba heads, 6"),
    ):
        with pytest.raises(ConfigError, match=f"world_size is 4, must divide {name}"):
            spec.of_rank(4)
    with pytest.raises(ConfigError, match="world_size is 2, must divide the number of Mamba groups, 3"):
        MAMBA2.of_rank(2)
    with pytest.raises(ConfigError, match="world_size is 2, must divide its norm's groups, 3"):
        replace(MAMBA2, num_groups=1).of_rank(2)


def test_rows_are_those_of_the_parts_of_each_parameter() -> None:
    keys, values = (15, True), (42, True)
    assert DELTA.num_channels == 15 + 15 + 42
    assert DELTA.parts("in_proj", 3) == (keys, keys, values, values)
    assert DELTA.parts("conv_weight", 3) == (keys, keys, values)
    assert DELTA.parts("ba_proj", 3) == ((6, True), (6, True))
    assert DELTA.parts("decay_log", 3) == DELTA.parts("step_bias", 3) == ((6, True),)
    channels = (6, True)
    assert MAMBA.parts("in_proj", 2) == (channels, channels)
    for name in ("conv_weight", "conv_bias", "step_proj", "step_bias", "decay_log", "skip"):
        assert MAMBA.parts(name, 2) == (channels,)
    assert CONV.parts("in_proj", 2) == (channels, channels, channels)
    assert CONV.parts("conv_weight", 2) == CONV.parts("conv_bias", 2) == (channels,)
    for spec in (DELTA, MAMBA, MAMBA2, CONV):
        assert spec.parts("norm", 2) == ()


def test_a_single_group_of_mamba_2_is_on_every_rank() -> None:
    assert MAMBA2.sizes == (30, 30, 12, 12, 6)
    assert MAMBA2.num_channels == 54
    channels = ((30, True), (12, True), (12, True))
    assert MAMBA2.parts("in_proj", 3) == ((30, True), *channels, (6, True))
    assert MAMBA2.parts("conv_weight", 3) == MAMBA2.parts("conv_bias", 3) == channels
    assert MAMBA2.parts("norm_weight", 3) == ((30, True),)
    for name in ("decay_log", "step_bias", "skip"):
        assert MAMBA2.parts(name, 3) == ((6, True),)
    single = replace(MAMBA2, num_groups=1)
    assert single.parts("conv_weight", 3) == ((30, True), (4, False), (4, False))
