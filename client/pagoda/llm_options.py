"""LLM's keyword arguments, with vLLM's names, as an EngineConfig. Starts nothing."""

import json
from dataclasses import fields
from typing import Any

from pagoda_common.config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig, SchedulerConfig
from pagoda_common.errors import ConfigError

ALIASES = {"scheduling_policy": "policy", "num_gpu_blocks_override": "num_blocks_override"}
"""vLLM's names where our config's differ."""
WITHOUT_EFFECT = frozenset(
    {"enforce_eager", "disable_log_stats", "disable_custom_all_reduce", "swap_space", "tokenizer_mode", "runner"}
)
"""Accepted, so that programs made for vLLM run."""


def engine_config_from_options(
    *, trust_remote_code: bool = False, tensor_parallel_size: int = 1, pipeline_parallel_size: int = 1, **options: Any
) -> EngineConfig:
    """The config that the arguments ask for; None takes a field's default.

    Raises:
        ConfigError: an argument is unknown, out of bounds or not supported; `field` names it.
    """
    if trust_remote_code:
        raise ConfigError(
            "trust_remote_code is not supported: no code of a checkpoint is run", field="trust_remote_code"
        )
    for name, size in (
        ("tensor_parallel_size", tensor_parallel_size),
        ("pipeline_parallel_size", pipeline_parallel_size),
    ):
        if size != 1:
            raise ConfigError(f"{name} is {size}, only 1 is supported", field=name)
    given = {
        ALIASES.get(name, name): _plain(value)
        for name, value in options.items()
        if name not in WITHOUT_EFFECT and value is not None
    }
    configs = {"model": ModelConfig, "cache": CacheConfig, "scheduler": SchedulerConfig, "parallel": ParallelConfig}
    built = {
        part: config(**{field.name: given.pop(field.name) for field in fields(config) if field.name in given})
        for part, config in configs.items()
    }
    if given:
        name = next(iter(given))
        raise ConfigError(f"unknown argument {name!r}", field=name)
    return EngineConfig(**built)


def _plain(value: Any) -> Any:
    """`value` as a config holds it: lists as tuples, classes by name, objects as JSON text."""
    if isinstance(value, list | tuple):
        return tuple(_plain(item) for item in value)
    if isinstance(value, type):
        return f"{value.__module__}:{value.__qualname__}"
    return json.dumps(value) if isinstance(value, dict) else value
