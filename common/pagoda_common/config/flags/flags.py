"""Command-line flags, read in both directions (argv to config, config to argv) from the tables of tables.py.

A process that starts another one passes its config on with `engine_config_to_argv` and `frontend_config_to_argv`;
there is no second list of flags. Defaults live in the configs.
"""

import argparse
import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import MISSING, fields
from typing import Any, Literal, TypeAlias, TypeVar, get_args, get_origin, get_type_hints

from pagoda_common.config.checkpoint.model_files import with_room_for_prompts
from pagoda_common.config.engine_config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig, SchedulerConfig
from pagoda_common.config.flags.tables import (
    ADDRESS_FLAGS,
    CACHE_FLAGS,
    FRONTEND_FLAGS,
    IDENTITY_FLAGS,
    LORA_FLAGS,
    MODEL_FLAGS,
    OBSERVABILITY_FLAGS,
    PARALLEL_FLAGS,
    SCHEDULER_FLAGS,
    SECURITY_FLAGS,
    SPECULATIVE_FLAG,
    Flag,
)
from pagoda_common.config.frontend_config import DEFAULT_SCHEDULER_ADDRESS, FrontendConfig
from pagoda_common.config.lora_config import LoraConfig
from pagoda_common.config.observability_config import ObservabilityConfig
from pagoda_common.config.security_config import TOKEN_VARIABLE, SecurityConfig
from pagoda_common.config.speculative_config import speculative_config
from pagoda_common.errors import CannotListen, ConfigError

AnyConfig: TypeAlias = (
    ModelConfig
    | CacheConfig
    | SchedulerConfig
    | LoraConfig
    | ParallelConfig
    | FrontendConfig
    | SecurityConfig
    | ObservabilityConfig
)
Config = TypeVar("Config", bound=AnyConfig)


def add_engine_flags(parser: argparse.ArgumentParser, *, with_model_argument: bool = True) -> None:
    """Add the engine's flags: read them with `engine_config_from_args`.

    Args:
        with_model_argument: the model may also be the first argument.
    """
    if with_model_argument:
        _add_model_argument(parser)
    _add(parser, "model", ModelConfig, MODEL_FLAGS)
    _add(parser, "cache", CacheConfig, CACHE_FLAGS)
    _add(parser, "scheduling", SchedulerConfig, SCHEDULER_FLAGS)
    _add(parser, "LoRA adapters", LoraConfig, LORA_FLAGS)
    group, flag = parser.add_argument_group("speculative decoding"), SPECULATIVE_FLAG
    group.add_argument(*flag.options, dest=flag.field, default="", metavar=flag.metavar, help=flag.help)
    add_security_flags(parser)
    add_observability_flags(parser)


def add_frontend_flags(parser: argparse.ArgumentParser) -> None:
    """Add the frontend's flags: read them with `frontend_config_from_args`."""
    _add_model_argument(parser)
    _add(parser, "frontend", FrontendConfig, FRONTEND_FLAGS)
    add_security_flags(parser)
    add_observability_flags(parser)


def add_security_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of TLS and tokens: read them with `security_config_from_args`. Engine and frontend have them."""
    _add(parser, "security", SecurityConfig, SECURITY_FLAGS)


def add_observability_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of logs and traces: read them with `observability_config_from_args`."""
    _add(parser, "observability", ObservabilityConfig, OBSERVABILITY_FLAGS)


def add_worker_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the process that starts the workers: `engine_config_from_args` reads them as well."""
    _add(parser, "workers", ParallelConfig, PARALLEL_FLAGS)


def add_serve_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of engine, workers and frontend, each once, but no scheduler's address: the caller starts it."""
    _add_model_argument(parser)
    _add(parser, "addresses", FrontendConfig, ADDRESS_FLAGS)
    add_engine_flags(parser, with_model_argument=False)
    add_worker_flags(parser)
    known = {flag.field for flag in (*IDENTITY_FLAGS, *ADDRESS_FLAGS)} | {"scheduler", "models"}
    _add(parser, "frontend", FrontendConfig, tuple(flag for flag in FRONTEND_FLAGS if flag.field not in known))


def add_listen_flags(parser: argparse.ArgumentParser, *, port: int) -> None:
    """Add --host and --port of an internal service; `port` is the default, 0 takes a free one."""
    group = parser.add_argument_group("listening")
    group.add_argument("--host", default="127.0.0.1", help="interface to listen on (default: %(default)s)")
    group.add_argument("--port", type=int, default=port, help="port; 0 takes a free one (default: %(default)s)")


def add_scheduler_address_flag(parser: argparse.ArgumentParser) -> None:
    """Add --scheduler, for processes without a FrontendConfig."""
    default = DEFAULT_SCHEDULER_ADDRESS
    parser.add_argument(
        "--scheduler", metavar="HOST:PORT", default=default, help="address of the scheduler (default: %(default)s)"
    )


def add_child_flags(parser: argparse.ArgumentParser) -> None:
    """Add --die-with-parent, which `process.spawn_service` gives; args.die_with_parent is a pid or None."""
    parser.add_argument(
        "--die-with-parent",
        type=int,
        nargs="?",
        const=os.getppid(),
        metavar="PID",
        help="end at once when the parent process (or PID, if it is the parent) is gone",
    )


def engine_config_from_args(args: argparse.Namespace) -> EngineConfig:
    """The config that the engine's flags ask for.

    Raises:
        ConfigError: a value is out of bounds; see `config_errors`.
    """
    model = _build(ModelConfig, MODEL_FLAGS, args)
    return EngineConfig(
        model=model,
        cache=_build(CacheConfig, CACHE_FLAGS, args),
        scheduler=with_room_for_prompts(_build(SchedulerConfig, SCHEDULER_FLAGS, args), model),
        speculative=speculative_config(args.speculative_config),
        lora=_build(LoraConfig, LORA_FLAGS, args),
        parallel=_build(ParallelConfig, PARALLEL_FLAGS, args),
        security=security_config_from_args(args),
        observability=observability_config_from_args(args),
    )


def frontend_config_from_args(args: argparse.Namespace) -> FrontendConfig:
    """The config that the frontend's flags ask for.

    Raises:
        ConfigError: a value is out of bounds; see `config_errors`.
    """
    security, observability = security_config_from_args(args), observability_config_from_args(args)
    return _build(FrontendConfig, FRONTEND_FLAGS, args, security=security, observability=observability)


def observability_config_from_args(args: argparse.Namespace) -> ObservabilityConfig:
    """The config that the flags of logs and traces ask for.

    Raises:
        ConfigError: a value is out of bounds; see `config_errors`.
    """
    return _build(ObservabilityConfig, OBSERVABILITY_FLAGS, args)


def security_config_from_args(args: argparse.Namespace) -> SecurityConfig:
    """The config that the flags of TLS and tokens ask for, with the token of the environment.

    Raises:
        ConfigError: flags do not fit each other; see `config_errors`.
    """
    return _build(SecurityConfig, SECURITY_FLAGS, args, service_token=os.environ.get(TOKEN_VARIABLE, ""))


def engine_config_to_argv(config: EngineConfig) -> list[str]:
    """A scheduler's flags that give `config` again, without `parallel`; values that are defaults are left out."""
    return [
        *_argv(config.model, MODEL_FLAGS),
        *_argv(config.cache, CACHE_FLAGS),
        *_argv(config.scheduler, SCHEDULER_FLAGS),
        *_argv(config.lora, LORA_FLAGS),
        *([f"{SPECULATIVE_FLAG.options[0]}={config.speculative.to_json()}"] if config.speculative.is_on else []),
        *security_config_to_argv(config.security),
        *observability_config_to_argv(config.observability),
    ]


def frontend_config_to_argv(config: FrontendConfig) -> list[str]:
    """Flags that give `config` again; values that are defaults are left out."""
    return [
        *_argv(config, FRONTEND_FLAGS),
        *security_config_to_argv(config.security),
        *observability_config_to_argv(config.observability),
    ]


def observability_config_to_argv(config: ObservabilityConfig) -> list[str]:
    """Flags that give `config` again; values that are defaults are left out."""
    return _argv(config, OBSERVABILITY_FLAGS)


def security_config_to_argv(config: SecurityConfig) -> list[str]:
    """Flags that give `config` again, but for a token of the environment, which children inherit."""
    return _argv(config, SECURITY_FLAGS)


@contextmanager
def config_errors(parser: argparse.ArgumentParser) -> Iterator[None]:
    """End the process with a line instead of a traceback: with code 2 after a ConfigError, because a restart would not
    help, and with code 1 after CannotListen."""
    try:
        yield
    except ConfigError as error:
        parser.error(flag_message(error, parser))
    except CannotListen as error:
        parser.exit(1, f"{parser.prog}: error: {error}\n")


def flag_message(error: ConfigError, parser: argparse.ArgumentParser) -> str:
    """The error's message; the field that it begins with is called as its flag, but the model, often no flag."""
    field = error.field or ""
    action = next((action for action in parser._actions if action.dest == field and action.option_strings), None)
    if action is None or field == "model" or not re.match(rf"{re.escape(field)}\b", error.message):
        return error.message
    return action.option_strings[0] + error.message[len(field) :]


def _defaults(config: type[Config]) -> dict[str, Any]:
    return {field.name: field.default for field in fields(config) if field.default is not MISSING}


def _add_model_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model_argument", nargs="?", metavar="model", help="directory or hub id of the checkpoint")


def _add(parser: argparse.ArgumentParser, title: str, config: type[Config], flags: Sequence[Flag]) -> None:
    group = parser.add_argument_group(title)
    defaults, hints = _defaults(config), get_type_hints(config)
    for flag in flags:
        default, hint = defaults[flag.field], hints[flag.field]
        shown = "" if default is None or default in ("", ()) or isinstance(default, bool) else " (default: %(default)s)"
        if isinstance(default, tuple) and default:
            shown = f" (default: {' '.join(map(str, default)).replace('%', '%%')})"
        options: dict[str, Any] = {"dest": flag.field, "help": flag.help + shown, "default": default}
        if isinstance(default, bool):
            options["action"] = argparse.BooleanOptionalAction if default else "store_true"
        else:
            choices = get_args(hint) if get_origin(hint) is Literal else None
            options |= {"type": flag.parse, "choices": choices, "metavar": flag.metavar}
            options |= {"nargs": "+"} if isinstance(default, tuple) else {}
        group.add_argument(*flag.options, **options)


def _build(config: type[Config], flags: Sequence[Flag], args: argparse.Namespace, **others: Any) -> Config:
    """`others`: values of fields without a flag."""
    given = {flag.field: getattr(args, flag.field) for flag in flags if hasattr(args, flag.field)}
    named = getattr(args, "model_argument", None)
    if "model" in given and named is not None:
        if given["model"] not in (named, _defaults(config)["model"]):
            raise ConfigError(f"model is given twice, as {named!r} and as {given['model']!r}", field="model")
        given["model"] = named
    values: dict[str, Any] = {name: _words(value) for name, value in given.items()}
    return config(**values, **others)


def _words(given: Any) -> Any:
    """`given`, as a tuple if it is of a flag that takes several; one that is a JSON list is its items, as in vLLM."""
    if not isinstance(given, list):
        return given
    if len(given) == 1 and isinstance(given[0], str) and given[0].startswith("["):
        with suppress(ValueError):
            items = json.loads(given[0])
            given = items if all(isinstance(item, str) for item in items) else given
    return tuple(given)


def _argv(config: AnyConfig, flags: Sequence[Flag]) -> list[str]:
    argv: list[str] = []
    defaults = _defaults(type(config))
    for flag in flags:
        value, name = getattr(config, flag.field), flag.options[0]
        if value == defaults[flag.field]:
            continue
        if isinstance(value, bool):
            argv.append(name if value else name.replace("--", "--no-", 1))
        elif isinstance(value, tuple):
            is_plain = not any(item.startswith(("-", "[")) for item in value)
            argv += [name, *value] if is_plain else [f"{name}={json.dumps(value)}"]
        else:
            argv.append(f"{name}={value}")  # one word, so that a value may begin with a dash
    return argv
