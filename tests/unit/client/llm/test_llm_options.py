"""LLM's keyword arguments as a config: what a private engine has by default, and what arguments become."""

import inspect
from typing import Any

import pytest

from pagoda import LLM
from pagoda.llm import llm as llm_module
from pagoda.options.llm_options import engine_config_from_options
from pagoda_common.config.engine_config import FIT_MEMORY, EngineConfig
from pagoda_common.errors import ConfigError


def test_the_queue_of_a_private_engine_has_no_bound() -> None:
    scheduler = engine_config_from_options().scheduler
    assert (scheduler.max_num_queued_reqs, scheduler.max_num_queued_tokens) == (0, 0)
    bounded = engine_config_from_options(max_num_queued_reqs=5, max_num_queued_tokens=7).scheduler
    assert (bounded.max_num_queued_reqs, bounded.max_num_queued_tokens) == (5, 7)


def test_what_is_not_given_or_none_is_the_config_s_default() -> None:
    config, default = engine_config_from_options(max_num_seqs=None, enable_prefix_caching=None), EngineConfig()
    assert config.scheduler.max_num_seqs == default.scheduler.max_num_seqs
    assert config.cache == default.cache
    assert config.parallel == default.parallel


def test_values_take_the_form_that_a_config_holds() -> None:
    config = engine_config_from_options(
        max_model_len="auto",
        dtype="half",
        load_format="hf",
        served_model_name="name",
        scheduling_policy="priority",
        num_gpu_blocks_override=9,
        speculative_config={"method": "ngram", "num_speculative_tokens": 3},
    )
    assert config.model.max_model_len == FIT_MEMORY
    assert (config.model.dtype, config.model.load_format) == ("float16", "auto")
    assert config.model.served_model_name == ("name",)
    assert config.scheduler.policy == "priority"
    assert config.cache.num_blocks_override == 9
    assert config.speculative.num_speculative_tokens == 3


def test_every_named_argument_of_an_llm_reaches_its_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    class Reached(Exception):
        """Ends the constructor."""

    def record(model: str, **options: Any) -> None:
        raise Reached(options | {"model": model})

    monkeypatch.setattr(llm_module, "AsyncLLM", record)
    parameters = inspect.signature(LLM).parameters
    names = [name for name, one in parameters.items() if one.kind is not inspect.Parameter.VAR_KEYWORD]
    given: dict[str, Any] = {name: object() for name in (*names, "block_size")}
    with pytest.raises(Reached) as reached:
        LLM(**given)
    assert reached.value.args == (given,)
    with pytest.raises(Reached) as reached:
        LLM()
    assert reached.value.args == ({name: parameters[name].default for name in names},)


def test_an_unknown_argument_is_answered_with_the_nearest_ones() -> None:
    with pytest.raises(ConfigError, match="unknown argument 'max_num_seq'; did you mean max_num_seqs"):
        engine_config_from_options(max_num_seq=3)
