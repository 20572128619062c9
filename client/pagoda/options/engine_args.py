"""EngineArgs: LLM's keyword arguments as a dataclass, and as flags for other programs, as in vLLM."""

import argparse
from dataclasses import asdict, fields, make_dataclass
from typing import Any, Self

from pagoda.options.llm_options import ALIASES, FIELDS, engine_config_from_options
from pagoda.options.vllm_options import OPTIONS, define_vllm_flags
from pagoda_common.config.engine_config import EngineConfig
from pagoda_common.config.flags.flags import add_engine_flags, add_worker_flags

_NAMES = ("model", *sorted((FIELDS | ALIASES.keys()) - {"model"}))
_Fields: Any = make_dataclass("_Fields", [(name, Any, None) for name in _NAMES])


class EngineArgs(_Fields):  # type: ignore[misc]  # its fields are made from the table of options
    """The engine's arguments; None takes the default: `LLM(**asdict(EngineArgs(model="pagoda-tiny")))`."""

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add the engine's flags, and vLLM's flags that have no effect here, to `parser`."""
        add_engine_flags(parser, with_model_argument=False)
        add_worker_flags(parser)
        define_vllm_flags(parser)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """The arguments of parsed flags.

        Raises:
            ConfigError: a flag asks for something that is not supported.
        """
        for option in OPTIONS:  # LLM(**vars(args)) checks them itself
            option.check(getattr(args, option.name, None))
        return cls(**{field.name: getattr(args, field.name, None) for field in fields(cls)})

    def keywords(self) -> dict[str, Any]:
        """The given arguments, as keyword arguments of LLM and AsyncLLM."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def create_engine_config(self, usage_context: object = None) -> EngineConfig:
        """The configuration of these arguments.

        Args:
            usage_context: accepted as in vLLM, and ignored.

        Raises:
            ConfigError: a value is out of bounds.
        """
        return engine_config_from_options(**asdict(self))


class AsyncEngineArgs(EngineArgs):
    """The same for AsyncLLM."""
