"""Flags from a YAML file and environment variables, with the command line's checks. Starts nothing."""

import argparse
import difflib
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from pagoda_common.config.flags.words import dashed

PREFIX = "PAGODA_"
_TRUE, _FALSE = frozenset({"1", "true", "yes", "on"}), frozenset({"0", "false", "no", "off"})
_NOT_SETTINGS = frozenset({"help", "version", "config"})
_OTHERS = frozenset(
    {
        *("PAGODA_API_KEY", "PAGODA_CPU_LEVEL", "PAGODA_HEARTBEAT_FD", "PAGODA_LOG_LEVEL"),
        *("PAGODA_MODELS", "PAGODA_OPERATOR_KEY", "PAGODA_SERVICE_TOKEN"),
    }
)
"""Variables that are no flags of every command."""
MISSPELLED = 0.85
"""How alike a variable and a setting's are where one is meant for the other."""
_ADDRESSES = ("tcp://", "udp://", "sctp://")


class SettingError(Exception):
    """A setting is unknown or has a wrong value; the message says where it stands."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


def option_actions(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """The parser's actions by each long name of theirs: "max-model-len", "no-async-scheduling"."""
    actions: dict[str, argparse.Action] = {}
    for action in parser._actions:
        for option in action.option_strings:
            if option.startswith("--") and action.dest not in _NOT_SETTINGS:
                actions[option[2:]] = action
    return actions


def file_defaults(path: str, actions: Mapping[str, argparse.Action]) -> dict[str, Any]:
    """Values by destination from the YAML mapping in `path`; keys are flags' names with - or _, null is left out.

    Raises:
        SettingError: the file cannot be read, or a key or value is wrong.
    """
    import yaml  # a thin image need not have it

    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise SettingError(f"cannot read the config file {path}: {reason}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise SettingError(f"{path} must hold a mapping of flags to values, got a {type(content).__name__}")
    defaults: dict[str, Any] = {}
    for key, value in content.items():
        name = str(key).lstrip("-").replace("_", "-")
        action = actions.get(name)
        if action is None:
            close = difflib.get_close_matches(name, actions, n=2)
            hint = f"; did you mean {' or '.join(close)}?" if close else ""
            raise SettingError(f"{path}: unknown key {key!r}{hint}")
        if value is not None:
            defaults[action.dest] = _convert(action, name, value, f"{path}: {key}")
    return defaults


def environment_defaults(environment: Mapping[str, str], actions: Mapping[str, argparse.Action]) -> dict[str, Any]:
    """Values by destination from PAGODA_<FLAG>; other variables that begin so are not of interest.

    A list is separated by commas, or is in JSON. What Kubernetes sets for a Service called pagoda (PAGODA_PORT=tcp://…)
    is left out.

    Raises:
        SettingError: a value is wrong.
    """
    defaults: dict[str, Any] = {}
    for name, action in actions.items():
        variable = PREFIX + name.replace("-", "_").upper()
        text = environment.get(variable)
        if text is None or text == "" or text.startswith(_ADDRESSES):
            continue
        value: Any = text
        if _is_switch(action):
            if text.lower() not in _TRUE | _FALSE:
                raise SettingError(f"{variable} is {text!r}, must be true or false")
            value = text.lower() in _TRUE
        elif _is_list(action):
            value = _items(text)
        defaults[action.dest] = _convert(action, name, value, variable)
    return defaults


def misspelled(environment: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    """The PAGODA_ variables that are almost one of `names` (flags without dashes), and which they almost are."""
    known = [name.replace("-", "_").upper() for name in names]
    near: dict[str, str] = {}
    for variable, value in environment.items():
        name = variable.removeprefix(PREFIX)
        if name == variable or name in known or variable in _OTHERS or value.startswith(_ADDRESSES):
            continue
        close = difflib.get_close_matches(name, known, n=1, cutoff=MISSPELLED)
        near |= {variable: PREFIX + close[0]} if close else {}
    return near


class ServiceParser(argparse.ArgumentParser):
    """The flags of a service that stands alone. An error is one line, without the usage: a service is started again and
    again, and each start would print it."""

    def error(self, message: str) -> NoReturn:
        """End the process with code 2 and one line."""
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}\n")


def parse_service_args(
    parser: argparse.ArgumentParser,
    words: Sequence[str] | None = None,
    environment: Mapping[str, str] = os.environ,
) -> argparse.Namespace:
    """The flags of a service that stands alone: `words` (the command line) beats PAGODA_<FLAG>, as containers set it.

    A child of ``pagoda serve`` takes what its parent hands it: PAGODA_PORT is the parent's port, not the child's.
    A wrong value ends the process with code 2.
    """
    words = sys.argv[1:] if words is None else words
    actions = option_actions(parser)
    actions.pop("die-with-parent", None)
    is_child = any(word.partition("=")[0] == "--die-with-parent" for word in words)
    try:
        given = {} if is_child else environment_defaults(environment, actions)
    except SettingError as error:
        parser.error(error.message)
    built_in_model = parser.get_default("model")
    parser.set_defaults(**given)
    for variable, meant in ({} if is_child else misspelled(environment, actions)).items():
        print(f"{parser.prog}: warning: {variable} sets nothing; did you mean {meant}?", file=sys.stderr)
    args = parser.parse_args(dashed(words, parser._option_string_actions)[0])
    if getattr(args, "model_argument", None) is not None and args.model == given.get("model", object()):
        args.model = built_in_model
    return args


def _items(text: str) -> list[Any]:
    """The items of a list: a JSON list, one JSON object, or words between commas."""
    if text.lstrip().startswith(("[", "{")):
        with suppress(ValueError):
            value = json.loads(text)
            return value if isinstance(value, list) else [value]
    return [part.strip() for part in text.split(",") if part.strip()]


def _is_switch(action: argparse.Action) -> bool:
    return action.nargs == 0


def _is_list(action: argparse.Action) -> bool:
    return action.nargs in ("+", "*") or isinstance(action, argparse._AppendAction)


def _convert(action: argparse.Action, name: str, value: Any, where: str) -> Any:
    """`value` as the flag `name` would have stored it."""
    if _is_switch(action):
        if not isinstance(value, bool):
            raise SettingError(f"{where} is {value!r}, must be true or false")
        is_negated = name.startswith("no-") and f"--{name[3:]}" in action.option_strings
        return value is not is_negated
    if _is_list(action):
        return [_convert_one(action, item, where) for item in (value if isinstance(value, list) else [value])]
    return _convert_one(action, value, where)


def _convert_one(action: argparse.Action, value: Any, where: str) -> Any:
    if isinstance(value, bool):
        raise SettingError(f"{where} is {value!r}, must not be true or false")
    text = json.dumps(value) if isinstance(value, dict | list) else str(value)
    try:
        # argparse has no type for its callables
        converted = text if action.type is None else action.type(text)  # type: ignore[operator]
    except (argparse.ArgumentTypeError, TypeError, ValueError) as error:
        is_ours = isinstance(error, argparse.ArgumentTypeError)
        kind = getattr(action.type, "__name__", "value")
        raise SettingError(f"{where}: {error}" if is_ours else f"{where} is {text!r}, must be a {kind}") from None
    if action.choices is not None and converted not in action.choices:
        raise SettingError(f"{where} is {text!r}, must be one of {', '.join(map(str, action.choices))}")
    return converted
