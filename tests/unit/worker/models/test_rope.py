"""Rotations as transformers computes them, how long a sequence may be with a stretched one, and which experts' layers a
config names."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from pagoda_common.errors import ModelLoadError
from pagoda_worker.models.moe import qwen_moe
from pagoda_worker.models.rope import inverse_frequencies, max_positions, rope_spec, rope_specs_by_kind
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


LONG_FACTORS = {"short_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5], "long_factor": [2.0] * 4 + [5.0] * 4}


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "linear", "factor": 2.5},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0},
        {"rope_type": "yarn", "factor": 0.5},
        {"rope_type": "yarn", "factor": 4.0, "attention_factor": 0.3, "mscale": 0.8, "mscale_all_dim": 0.3},
        {"rope_type": "yarn", "factor": 4.0, "mscale": 0.8, "mscale_all_dim": 0.3},
        {"rope_type": "yarn", "factor": 4.0, "mscale": 0.8},
        {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16, "beta_slow": 2, "truncate": False},
        {"rope_type": "yarn", "factor": 4.0, "beta_fast": 0.5, "beta_slow": 0.4},
        {"rope_type": "yarn", "factor": 4.0, "partial_rotary_factor": 0.5},
        {"rope_type": "longrope", **LONG_FACTORS},
        {"rope_type": "longrope", "factor": 0.5, **LONG_FACTORS},
        {"rope_type": "longrope", "factor": 6.0, "attention_factor": 1.2, **LONG_FACTORS},
        {"rope_type": "proportional", "partial_rotary_factor": 0.25},
        {"rope_type": "proportional", "partial_rotary_factor": 0.5, "factor": 4.0},
    ],
    ids=str,
)
def test_frequencies_are_those_of_transformers(parameters: dict[str, Any]) -> None:
    given = {"rope_theta": 5000.0, "original_max_position_embeddings": 128} | parameters
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, max_position_embeddings=512, rope_parameters=given)
    expected, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, torch.device("cpu"), seq_len=512)
    read = rope_spec({"max_position_embeddings": 512, "rope_parameters": given})
    frequencies, scale = inverse_frequencies(read, read.rotary_dim(16), 512)
    assert frequencies.tolist() == pytest.approx(expected.tolist(), rel=1e-6)
    assert scale == pytest.approx(factor)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"rope_type": "xdrope", "factor": 2.0}, "rope type 'xdrope' is not supported; supported are default, linear"),
        ({"rope_type": "linear"}, "rope type linear needs factor in rope_parameters"),
        ({"rope_type": "longrope", "factor": 2.0, "long_factor": [1.0]}, "rope type longrope needs short_factor"),
        ({"rope_type": "default", "alpha": 1000.0}, "config.json has alpha 1000.0 among the rope parameters"),
        ({"full_attention": {}, "sliding_attention": None}, "rope_parameters differ between layer types"),
    ],
)
def test_a_rotation_that_is_not_known_in_full_is_refused(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        rope_spec({"max_position_embeddings": 512, "rope_parameters": parameters})


@pytest.mark.parametrize(
    ("config", "rope_type", "factor"),
    [
        ({"rope_scaling": {"type": "su", **LONG_FACTORS}, "original_max_position_embeddings": 128}, "longrope", 4.0),
        ({"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 256}}, "yarn", 2.0),
        ({"rope_scaling": {"rope_type": "yarn", "type": "linear", "factor": 3.0}}, "yarn", 3.0),
        ({"rope_scaling": {"type": "linear", "factor": 3.0}, "rope_parameters": {"factor": 5.0}}, "linear", 5.0),
        ({"rope_scaling": None, "rope_parameters": {"rope_type": "default", "factor": None}}, "default", None),
    ],
)
def test_old_names_and_missing_factors_are_understood(
    config: dict[str, Any], rope_type: str, factor: float | None
) -> None:
    read = rope_spec({"max_position_embeddings": 512, **config})
    assert (read.rope_type, dict(read.parameters).get("factor")) == (rope_type, factor)
