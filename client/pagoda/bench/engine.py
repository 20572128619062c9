"""The private engine of an offline benchmark: its flags, its start, and the file of its figures."""

import argparse
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from pagoda.llm.llm import LLM
from pagoda.options.llm_options import CONFIGS, FIELDS
from pagoda.options.vllm_options import add_vllm_flags, check_vllm_args
from pagoda_common.config.flags.flags import add_engine_flags, add_worker_flags, config_errors, engine_config_from_args
from pagoda_common.errors import PagodaError


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that `make_llm` reads."""
    add_engine_flags(parser)
    add_worker_flags(parser)
    add_vllm_flags(parser)


def make_llm(args: argparse.Namespace, parser: argparse.ArgumentParser) -> LLM:
    """An LLM on a private engine with the flags' configuration; wrong flags end the process with code 2."""
    with config_errors(parser):
        check_vllm_args(args)
        config = engine_config_from_args(args)
        options = {
            field.name: getattr(getattr(config, part), field.name)
            for part, kind in CONFIGS.items()
            for field in fields(kind)
            if field.name in FIELDS
        }
        return LLM(**options, speculative_config=config.speculative.to_json())


def save_json(path: str | None, figures: dict[str, Any]) -> None:
    """Write `figures` to `path` if there is one.

    Raises:
        PagodaError: it cannot be written.
    """
    if path is None:
        return
    try:
        Path(path).write_text(json.dumps(figures, indent=4) + "\n", encoding="utf-8")
    except OSError as error:
        raise PagodaError(f"cannot write the figures: {error}") from None
