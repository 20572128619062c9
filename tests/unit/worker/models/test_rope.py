"""How long a sequence may be with a stretched rotation, and which experts' layers a config names."""

from typing import Any

import pytest

from pagoda_common.errors import ModelLoadError
from pagoda_worker.models.moe import qwen_moe
from pagoda_worker.models.rope import inverse_frequencies, max_positions, rope_specs_by_kind
from pagoda_worker.models.spec import RopeSpec

YARN = {"original_max_position_embeddings": 512, "factor": 4.0}


def spec(rope_type: str) -> RopeSpec:
    return RopeSpec(theta=1e4, rope_type=rope_type, parameters=tuple(sorted(YARN.items())))


@pytest.mark.parametrize(("configured", "expected"), [(512, 2048), (2048, 2048), (4096, 4096)])
def test_yarn_stretches_what_is_configured_and_never_shortens_it(configured: int, expected: int) -> None:
    assert max_positions(spec("yarn"), configured) == expected


@pytest.mark.parametrize("rope_type", ["default", "linear", "dynamic", "llama3", "longrope"])
def test_no_other_rotation_changes_the_longest_sequence(rope_type: str) -> None:
    assert max_positions(spec(rope_type), 512) == 512


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [True] * 6),
        ({"decoder_sparse_step": 2}, [False, True, False, True, False, True]),
        ({"decoder_sparse_step": 3}, [False, False, True, False, False, True]),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [3]}, [False, True, False, False, False, True]),
        ({"mlp_only_layers": [0, 5]}, [False, True, True, True, True, False]),
    ],
)
def test_every_nth_layer_has_experts_but_for_those_that_are_dense(
    options: dict[str, Any], expected: list[bool]
) -> None:
    config = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, **options}
    moe = qwen_moe(config, 6)
    assert moe is not None
    assert list(moe.sparse_layers) == expected
    assert qwen_moe({**config, "num_experts": 0}, 6) is None


def test_longrope_has_a_factor_for_each_frequency() -> None:
    parameters = {"factor": 4.0, "original_max_position_embeddings": 512, "short_factor": (1.0,) * 4}
    long = RopeSpec(rope_type="longrope", parameters=tuple({**parameters, "long_factor": (2.0,) * 3}.items()))
    frequencies, _ = inverse_frequencies(long, 8, 512)
    assert frequencies.tolist() == pytest.approx([1.0, 0.1, 0.01, 0.001])
    with pytest.raises(ModelLoadError, match="longrope has 3 factors for 4 frequencies"):
        inverse_frequencies(long, 8, 513)


NESTED = {"sliding_attention": {"rope_theta": 7.0}, "full_attention": {"rope_theta": 8.0, "rope_type": "default"}}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, (2.0, 3.0)),
        ({"rope_theta": 5.0}, (2.0, 5.0)),
        ({"rope_local_base_freq": 6.0}, (6.0, 3.0)),
        ({"rope_parameters": NESTED, "rope_theta": 5.0, "rope_local_base_freq": 6.0}, (7.0, 8.0)),
        ({"rope_parameters": {"sliding_attention": None, "full_attention": None}}, (2.0, 3.0)),
        ({"rope_parameters": {"rope_theta": 9.0}}, (2.0, 9.0)),
    ],
    ids=str,
)
def test_layers_with_a_window_have_a_rotation_of_their_own(
    config: dict[str, Any], expected: tuple[float, float]
) -> None:
    default_thetas = {"sliding_attention": 2.0, "full_attention": 3.0}
    specs = rope_specs_by_kind({"max_position_embeddings": 512, **config}, default_thetas=default_thetas)
    assert (specs["sliding_attention"].theta, specs["full_attention"].theta) == expected


def test_only_layers_without_a_window_are_stretched() -> None:
    config = {"max_position_embeddings": 512, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    specs = rope_specs_by_kind(config, default_thetas={"sliding_attention": 2.0, "full_attention": 3.0})
    assert (specs["sliding_attention"].rope_type, specs["full_attention"].rope_type) == ("default", "linear")
    assert dict(specs["full_attention"].parameters)["factor"] == 8.0
