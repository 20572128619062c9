"""--structured-outputs-config: options that hold for every request, from flags and from LLM's arguments."""

import argparse

import pytest

from pagoda.options.llm_options import engine_config_from_options
from pagoda_common.config.flags.flags import add_engine_flags, engine_config_from_args, engine_config_to_argv
from pagoda_common.config.structured_outputs_config import StructuredOutputsDefaults, structured_outputs_defaults
from pagoda_common.errors import ConfigError
from pagoda_common.params.structured_outputs import StructuredOutputsParams

COMPACT = {"backend": "xgrammar", "disable_any_whitespace": True}


def test_options_come_from_arguments_and_from_flags() -> None:
    config = engine_config_from_options(model="pagoda-tiny", structured_outputs_config=COMPACT)
    wanted = StructuredOutputsDefaults(disable_any_whitespace=True)
    assert structured_outputs_defaults(config.model.structured_outputs_config) == wanted
    parser = argparse.ArgumentParser()
    add_engine_flags(parser)
    same = engine_config_from_args(parser.parse_args(engine_config_to_argv(config)))
    assert same.model.structured_outputs_config == config.model.structured_outputs_config


def test_they_hold_for_constraints_that_do_not_ask_for_them() -> None:
    defaults = structured_outputs_defaults('{"disable_additional_properties": true}')
    applied = defaults.applied_to(StructuredOutputsParams(json={}, disable_any_whitespace=True))
    assert applied == StructuredOutputsParams(json={}, disable_any_whitespace=True, disable_additional_properties=True)
    assert defaults.applied_to(None) is None
    params = StructuredOutputsParams(json={})
    assert structured_outputs_defaults("").applied_to(params) is params


@pytest.mark.parametrize(
    "text", ["", "{}", '{"backend": "outlines", "disable_fallback": true}', '{"reasoning_parser": ""}']
)
def test_what_has_no_effect_is_accepted(text: str) -> None:
    assert structured_outputs_defaults(text) == StructuredOutputsDefaults()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "must be a JSON object"),
        ('{"spaces": 1}', "unknown key 'spaces', must be one of disable_any_whitespace"),
        ('{"disable_any_whitespace": "yes"}', 'disable_any_whitespace is "yes", must be true or false'),
        ('{"reasoning_parser": "qwen3"}', "reasoning_parser is not supported: --reasoning-parser names it"),
        ('{"enable_in_reasoning": true}', "enable_in_reasoning is not supported"),
    ],
)
def test_a_wrong_object_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        structured_outputs_defaults(text)
    assert raised.value.field == "structured_outputs_config"
