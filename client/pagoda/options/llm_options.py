"""LLM's keyword arguments, with vLLM's names, as an EngineConfig. Starts nothing."""

import difflib
import json
import os
from dataclasses import fields
from typing import Any

from pagoda.config import PoolerConfig
from pagoda.options.vllm_options import BY_NAME
from pagoda_common.config.checkpoint.model_files import with_room_for_prompts
from pagoda_common.config.engine_config import (
    FIT_MEMORY,
    CacheConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from pagoda_common.config.flags.values import (
    parse_attention_backend,
    parse_dtype,
    parse_load_format,
    parse_model_impl,
)
from pagoda_common.config.lora_config import LoraConfig
from pagoda_common.config.observability_config import ObservabilityConfig
from pagoda_common.config.security_config import TOKEN_VARIABLE, SecurityConfig
from pagoda_common.config.speculative_config import speculative_config
from pagoda_common.errors import ConfigError

ALIASES = {"scheduling_policy": "policy", "num_gpu_blocks_override": "num_blocks_override"}
"""vLLM's names where our config's differ."""
CONFIGS = {
    "model": ModelConfig,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "lora": LoraConfig,
    "parallel": ParallelConfig,
    "security": SecurityConfig,
    "observability": ObservabilityConfig,
}
FIELDS = frozenset(field.name for config in CONFIGS.values() for field in fields(config)) - {"service_token"}
"""A token is no argument: the processes of a private engine have it from the environment, or from a file."""
FIELDS |= {"speculative_config"}
UNBOUNDED = {"max_num_queued_reqs": 0, "max_num_queued_tokens": 0}
"""The queue of a private engine, whose one client is the program that has started it."""


def engine_config_from_options(**options: Any) -> EngineConfig:
    """The config that the arguments ask for; None takes a field's default.

    Raises:
        ConfigError: an argument is unknown, out of bounds or not supported; `field` names it.
    """
    given: dict[str, Any] = {"service_token": os.environ.get(TOKEN_VARIABLE, ""), **UNBOUNDED}
    for name, value in options.items():
        field = ALIASES.get(name, name)
        if field in FIELDS:
            if value is not None:
                given[field] = _plain(value)
        elif name in BY_NAME:
            BY_NAME[name].check(value)
        else:
            close = difflib.get_close_matches(name, [*FIELDS, *ALIASES, *BY_NAME, "tokenizer", "address"], n=2)
            hint = f"; did you mean {' or '.join(close)}?" if close else ""
            raise ConfigError(f"unknown argument {name!r}{hint}", field=name)
    if isinstance(given.get("served_model_name"), str):
        given["served_model_name"] = (given["served_model_name"],)
    if "dtype" in given:
        given["dtype"] = parse_dtype(str(given["dtype"]))
    if "load_format" in given:
        given["load_format"] = parse_load_format(str(given["load_format"]))
    if "attention_backend" in given:
        given["attention_backend"] = parse_attention_backend(str(given["attention_backend"]))
    if "model_impl" in given:
        given["model_impl"] = parse_model_impl(str(given["model_impl"]))
    if given.get("max_model_len") == "auto":
        given["max_model_len"] = FIT_MEMORY
    parts: dict[str, Any] = {
        part: config(**{field.name: given[field.name] for field in fields(config) if field.name in given})
        for part, config in CONFIGS.items()
    }
    parts["scheduler"] = with_room_for_prompts(parts["scheduler"], parts["model"])
    return EngineConfig(
        **parts,
        speculative=speculative_config(given.get("speculative_config")),
    )


def _plain(value: Any) -> Any:
    """`value` as a config holds it: lists as tuples, classes by name, objects as JSON text."""
    if isinstance(value, list | tuple):
        return tuple(_plain(item) for item in value)
    if isinstance(value, PoolerConfig):
        return value.to_json()
    if isinstance(value, type):
        return f"{value.__module__}:{value.__qualname__}"
    return json.dumps(value) if isinstance(value, dict) else value
