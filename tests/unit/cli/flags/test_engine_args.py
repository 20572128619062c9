"""EngineArgs: vLLM's dataclass of arguments, as flags and as keywords of LLM."""

import argparse
from dataclasses import asdict

import pytest

from pagoda import AsyncEngineArgs, EngineArgs
from pagoda.options.llm_options import engine_config_from_options
from pagoda_common.errors import ConfigError


def test_flags_become_arguments_become_a_config() -> None:
    parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
    given = EngineArgs.from_cli_args(
        parser.parse_args(["--model", "pagoda-tiny", "--max-model-len", "256", "--max-num-seqs", "3"])
    )
    config = given.create_engine_config()
    assert (config.model.model, config.model.max_model_len, config.scheduler.max_num_seqs) == ("pagoda-tiny", 256, 3)
    assert engine_config_from_options(**asdict(given)) == config


def test_what_is_not_given_is_the_default_and_what_is_wrong_is_named() -> None:
    assert AsyncEngineArgs(model="other").create_engine_config() == engine_config_from_options(model="other")
    with pytest.raises(ConfigError, match="max_num_seqs"):
        EngineArgs(max_num_seqs=0).create_engine_config()
    with pytest.raises(TypeError, match="max_num_sequences"):
        EngineArgs(max_num_sequences=1)


def test_names_of_vllm_are_arguments_as_well() -> None:
    given = EngineArgs(scheduling_policy="priority", num_gpu_blocks_override=9).create_engine_config()
    assert (given.scheduler.policy, given.cache.num_blocks_override) == ("priority", 9)
