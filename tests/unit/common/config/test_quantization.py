"""Names of quantizations."""

import pytest

from pagoda_common.config.engine_config import ModelConfig
from pagoda_common.config.quantization import OnlineQuantization, parse_quantization
from pagoda_common.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "name"),
    [("int8", "int8"), ("int8_per_channel_weight_only", "int8"), ("int4", "int4-g128")]
    + [(f"int{bits}-g{size}", f"int{bits}-g{size}") for bits in (4, 8) for size in (32, 64, 128)],
)
def test_a_scheme_has_bits_and_groups(text: str, name: str) -> None:
    scheme = parse_quantization(text)
    assert isinstance(scheme, OnlineQuantization)
    assert scheme.name == name


def test_methods_of_checkpoints_have_the_checkpoints_names() -> None:
    assert [parse_quantization(text) for text in ("awq_marlin", "gptq", "compressed-tensors", "fp8")] == [
        "awq",
        "gptq",
        "compressed-tensors",
        "fp8",
    ]
    assert [parse_quantization(text) for text in (None, "", "auto", "none")] == [None] * 4


@pytest.mark.parametrize("text", ["fp16", "int3", "int4-g16", "int4-g", "int8-g16", "int8-g1280", "aqlm"])
def test_other_names_are_refused_with_those_there_are(text: str) -> None:
    with pytest.raises(ConfigError, match=f"quantization is '{text}', must be one of int8, .*gptq_marlin") as caught:
        ModelConfig(quantization=text)
    assert caught.value.field == "quantization"
