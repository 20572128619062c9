"""Models of one frontend: allowed entries, their meaning, and the message for each mistake."""

import argparse
import json
from typing import Any

import pytest

from pagoda_common.config.flags.flags import add_frontend_flags, frontend_config_from_args, frontend_config_to_argv
from pagoda_common.config.flags.settings import ServiceParser, misspelled, parse_service_args
from pagoda_common.config.frontend_config import FrontendConfig
from pagoda_common.config.frontend_models import KEYS, parse_models
from pagoda_common.errors import ConfigError

AT = "127.0.0.1:1"


def entry(**fields: Any) -> str:
    return json.dumps({"name": "b", "scheduler": "127.0.0.1:2", **fields})


def config(*entries: str, **fields: Any) -> FrontendConfig:
    return FrontendConfig(models=entries, **fields)


def test_an_entry_is_a_config_of_its_own() -> None:
    own = entry(aliases=["c", "d"], tool_call_parser="hermes", enable_auto_tool_choice=True, max_logprobs=5, model="/m")
    one, other = config(f"a = {AT}", own, reasoning_parser="deepseek_r1", api_key=("k",)).of_models
    assert (one.scheduler, one.served_model_name, one.model, one.models) == (AT, ("a",), "pagoda-tiny", ())
    assert (other.scheduler, other.served_model_name) == ("127.0.0.1:2", ("b", "c", "d"))
    assert (other.tool_call_parser, other.enable_auto_tool_choice, other.max_logprobs) == ("hermes", True, 5)
    assert (one.tool_call_parser, one.max_logprobs, other.model) == (None, 20, "/m")
    for each in (one, other):
        assert (each.reasoning_parser, each.api_key) == ("deepseek_r1", ("k",))


def test_a_frontend_of_one_model_is_its_own_config() -> None:
    plain = FrontendConfig()
    assert plain.of_models == (plain,)


def test_objects_may_be_given_as_such_or_as_text() -> None:
    for given in ({"top_k": 3}, '{"top_k": 3}'):
        [own] = parse_models([entry(override_generation_config=given)])
        assert json.loads(own["override_generation_config"]) == {"top_k": 3}


@pytest.mark.parametrize(
    ("entries", "told"),
    [
        (("a",), "models has 'a', must be NAME=HOST:PORT, or a JSON object with name and scheduler"),
        ((f"={AT}",), f"models has '={AT}', must be NAME=HOST:PORT, or a JSON object with name and scheduler"),
        (("a=",), "models has 'a=', must be NAME=HOST:PORT, or a JSON object with name and scheduler"),
        (('{"name": "a"}',), "must be NAME=HOST:PORT, or a JSON object with name and scheduler"),
        ((f"a={AT}", f"a={AT}"), "models names 'a' twice"),
        ((f"c={AT}", entry(aliases=["c"])), "models names 'c' twice"),
        ((entry(port=1),), f"models has the key 'port', must be one of {', '.join(KEYS)}"),
        ((entry(name=5),), "models has name 5, must be text"),
        ((entry(aliases="c"),), 'models has aliases "c", must be names'),
        ((entry(aliases=[""]),), 'models has aliases [""], must be names'),
        ((entry(max_logprobs=True),), "models has max_logprobs true, must be an integer"),
        ((entry(enable_auto_tool_choice="yes"),), 'models has enable_auto_tool_choice "yes", must be true or false'),
        (("{",), "models has '{', which is not JSON: "),
        (("a=h",), "models: a: scheduler is 'h', must be host:port"),
        (("a=h:1",), "models: a: scheduler is 'h:1', must be on loopback without TLS"),
        ((entry(max_logprobs=-2),), "models: b: max_logprobs is -2, must be at least -1"),
        ((entry(enable_auto_tool_choice=True),), "models: b: enable_auto_tool_choice is True, must be with tool"),
    ],
)
def test_how_a_mistake_is_told(entries: tuple[str, ...], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(*entries)
    assert told in caught.value.message
    assert caught.value.field == "models"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("scheduler", "127.0.0.1:9"),
        ("model", "m"),
        ("revision", "r"),
        ("tokenizer", "t"),
        ("served_model_name", ("s",)),
    ],
)
def test_what_each_model_has_is_not_given_for_all(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match="must be left out: each of models has its own") as caught:
        config(f"a={AT}", **{field: value})
    assert caught.value.field == field


def test_a_fault_of_the_frontend_is_told_as_such() -> None:
    with pytest.raises(ConfigError) as caught:
        config(f"a={AT}", port=-1)
    assert caught.value.message == "port is -1, must be between 0 and 65535"


def parsed(*words: str, **environment: str) -> FrontendConfig:
    parser = ServiceParser()
    add_frontend_flags(parser)
    return frontend_config_from_args(parse_service_args(parser, words, environment))


def test_flags_and_variables_say_the_same() -> None:
    entries = (f"a={AT}", entry(aliases=["c", "d"]))
    assert parsed("--models", *entries).models == entries
    assert parsed(PAGODA_MODELS=f"a={AT}, b={AT}").models == (f"a={AT}", f"b={AT}")
    listed = json.dumps([f"a={AT}", json.loads(entries[1])])
    assert parsed(PAGODA_MODELS=listed).of_models == config(*entries).of_models
    assert parsed(PAGODA_MODELS=entries[1]).of_models == config(entries[1]).of_models
    given = config(*entries)
    parser = argparse.ArgumentParser()
    add_frontend_flags(parser)
    assert frontend_config_from_args(parser.parse_args(frontend_config_to_argv(given))) == given


def test_a_variable_that_only_looks_like_json_is_words_between_commas() -> None:
    assert parsed(PAGODA_ALLOWED_HOSTS="[::1],b").allowed_hosts == ("[::1]", "b")


def test_the_variable_is_no_other_one_misspelt_for_services_without_the_flag() -> None:
    assert misspelled({"PAGODA_MODELS": f"a={AT}", "PAGODA_MODELL": "m"}, ["model"]) == {
        "PAGODA_MODELL": "PAGODA_MODEL"
    }
