"""EngineArgs: LLM's keyword arguments as a dataclass, and as flags of a program of one's own, as vLLM has them."""

import argparse
from dataclasses import asdict, fields, make_dataclass
from typing import Any, Self

from pagoda.llm.options import FIELDS, engine_config_from_options
from pagoda_common.config.engine_config import EngineConfig
from pagoda_common.config.flags import add_engine_flags, add_worker_flags

_Fields: Any = make_dataclass("_Fields", [(name, Any, None) for name in sorted(FIELDS)], kw_only=True)


class EngineArgs(_Fields):  # type: ignore[misc]  # its fields are made from the table of options
    """The engine's arguments; None takes the default: `LLM(**asdict(EngineArgs(model="pagoda-tiny")))`."""

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """`parser` with the engine's flags."""
        add_engine_flags(parser)
        add_worker_flags(parser)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """The arguments that flags gave."""
        given = {field.name: getattr(args, field.name, None) for field in fields(cls)}
        named = getattr(args, "model_argument", None)
        return cls(**given | ({"model": named} if named is not None else {}))

    def create_engine_config(self) -> EngineConfig:
        """What the arguments ask for.

        Raises:
            ConfigError: a value is out of bounds.
        """
        return engine_config_from_options(**asdict(self))


class AsyncEngineArgs(EngineArgs):
    """The same for AsyncLLM."""
