"""--speculative-config: vLLM's keys, messages that name what is wrong, and the way from flags to the worker."""

import argparse
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from pagoda import SamplingParams
from pagoda.llm.metrics import GenerationCounts, Vector, snapshot
from pagoda.options.llm_options import engine_config_from_options
from pagoda.v1 import types_pb2
from pagoda_common.config.flags.flags import (
    add_engine_flags,
    config_errors,
    engine_config_from_args,
    engine_config_to_argv,
)
from pagoda_common.config.speculative_config import SpeculativeConfig, speculative_config, takes_drafts
from pagoda_common.errors import ConfigError
from pagoda_common.metrics.engine_metrics import EngineCollector
from pagoda_scheduler.rpc.convert import worker_config_to_proto
from pagoda_worker.rpc.convert import engine_config_from_proto

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
EXPECTED = SpeculativeConfig(num_speculative_tokens=4, prompt_lookup_max=4, prompt_lookup_min=2)


def parsed(*argv: str) -> SpeculativeConfig:
    parser = argparse.ArgumentParser()
    add_engine_flags(parser)
    with config_errors(parser):
        return engine_config_from_args(parser.parse_args(argv)).speculative


def test_a_config_comes_through_flags_options_and_the_wire() -> None:
    config = engine_config_from_options(model="pagoda-tiny", speculative_config=NGRAM)
    assert config.speculative == EXPECTED
    assert parsed(*engine_config_to_argv(config)) == EXPECTED
    assert engine_config_from_proto(worker_config_to_proto(config)).speculative == EXPECTED


@pytest.mark.parametrize("model", ["ngram", "[ngram]"])
def test_a_model_called_ngram_is_the_method(model: str) -> None:
    given = {**{name: value for name, value in NGRAM.items() if name != "method"}, "model": model}
    assert speculative_config(given) == EXPECTED


def test_without_it_there_are_no_drafts() -> None:
    config = engine_config_from_options(model="pagoda-tiny", speculative_config=None)
    assert not config.speculative.is_on
    assert not any("speculative" in word for word in engine_config_to_argv(config))
    assert not engine_config_from_proto(worker_config_to_proto(config)).speculative.is_on


@pytest.mark.parametrize(
    ("given", "bounds"), [({}, (5, 5)), ({"prompt_lookup_max": 3}, (3, 3)), ({"prompt_lookup_min": 2}, (2, 2))]
)
def test_one_bound_is_the_others_default(given: dict[str, int], bounds: tuple[int, int]) -> None:
    config = speculative_config({"method": "ngram", "num_speculative_tokens": 2, **given})
    assert (config.prompt_lookup_max, config.prompt_lookup_min) == bounds


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({**NGRAM, "method": "eagle"}, "eagle is not supported: drafts come from the text"),
        ({"method": "ngram"}, "num_speculative_tokens is None, must be between 1 and 64"),
        ({**NGRAM, "num_speculative_tokens": 0}, "num_speculative_tokens is 0, must be between 1 and 64"),
        ({**NGRAM, "num_speculative_tokens": True}, "num_speculative_tokens is True"),
        ({**NGRAM, "prompt_lookup_min": 5}, "prompt_lookup_min is 5, must be at most prompt_lookup_max .4."),
        ({**NGRAM, "prompt_lookup_max": 99}, "prompt_lookup_max is 99, must be between 1 and 32"),
        ({**NGRAM, "model": "small"}, "a draft model is not supported"),
        ({**NGRAM, "method": "guess"}, "method is 'guess', must be one of ngram"),
        ({**NGRAM, "lookup": 3}, "unknown key 'lookup', must be one of method, num_speculative_tokens"),
        ("[1]", "must be a JSON object"),
    ],
)
def test_what_is_wrong_is_named(given: dict[str, Any] | str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        speculative_config(given)
    assert caught.value.field == "speculative_config"


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, True),
        ({"temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "logprobs": 3, "n": 2, "seed": 1}, True),
        ({"stop_token_ids": [4], "ignore_eos": True}, True),
        ({"repetition_penalty": 1.1}, False),
        ({"frequency_penalty": 0.1}, False),
        ({"min_tokens": 2}, False),
        ({"allowed_token_ids": [1, 2]}, False),
    ],
)
def test_who_takes_drafts(params: dict[str, Any], expected: bool) -> None:
    assert takes_drafts(SamplingParams(**params)) is expected


def test_metrics_have_vllms_names() -> None:
    drafts = types_pb2.SpeculationLoad(
        num_drafts=3, num_draft_tokens=8, num_accepted_tokens=5, num_accepted_tokens_per_pos=[3, 2]
    )
    load = types_pb2.EngineLoad(speculation=drafts)
    registry = CollectorRegistry()
    registry.register(EngineCollector(load=lambda: load, model_name="m"))
    text = generate_latest(registry).decode()
    labels = 'engine="0",model_name="m"'
    assert f"vllm:spec_decode_num_drafts_total{{{labels}}} 3.0" in text
    assert f"vllm:spec_decode_num_draft_tokens_total{{{labels}}} 8.0" in text
    assert f"vllm:spec_decode_num_accepted_tokens_total{{{labels}}} 5.0" in text
    assert f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{labels},position="1"}} 2.0' in text
    per_pos = snapshot(load, GenerationCounts(), model_name="m")[-1]
    assert isinstance(per_pos, Vector)
    assert per_pos.values == [3, 2]
    quiet = CollectorRegistry()
    quiet.register(EngineCollector(load=types_pb2.EngineLoad, model_name="m"))
    assert b"spec_decode" not in generate_latest(quiet)
