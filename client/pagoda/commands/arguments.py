"""Command-line parsing for all of ``pagoda``'s commands: settings from file and environment, errors in one line."""

import argparse
import difflib
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from pagoda.options.vllm_options import REFUSED_FLAGS
from pagoda_common.config.flags.settings import (
    SettingError,
    environment_defaults,
    file_defaults,
    misspelled,
    option_actions,
)
from pagoda_common.config.flags.words import as_typed, dashed

CONFIG_FLAG = "--config"
MAX_USAGE_FLAGS = 8
"""Commands with more flags have them in the help alone, not in the usage line."""


class PartialHelp(argparse.Action):
    """--help shows all flags; --help=WORD shows the groups of that name, or else the flags that contain the word."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        """Show it and end the process."""
        if values is None:
            parser.print_help()
        else:
            parser.print_part(values)
        parser.exit()


class CommandParser(argparse.ArgumentParser):
    """A parser whose options may also come from ``--config FILE`` and from PAGODA_<FLAG> variables.

    The command line beats the file, the file beats the environment, the environment beats the defaults.
    """

    environment: Mapping[str, str] = os.environ
    """Where PAGODA_<FLAG> variables are looked up."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)
        self._add_arguments: Callable[[argparse.ArgumentParser], None] | None = None
        self._takes_settings = False
        self.typed: dict[str, str] = {}
        """Flags that were typed with underscores or by another name, by their own."""
        self._words: list[str] = []
        self._settings: dict[str, Any] = {}

    def is_given(self, dest: str) -> bool:
        """Whether the command line, the file or the environment has the flag; known once they are parsed."""
        flags = [flag for flag, action in self._option_string_actions.items() if action.dest == dest]
        return dest in self._settings or any(word.partition("=")[0] in flags for word in self._words)

    def fill_later(self, add_arguments: Callable[[argparse.ArgumentParser], None]) -> None:
        """Call `add_arguments` when something is parsed."""
        self._add_arguments = add_arguments

    def fill(self) -> None:
        """Add the flags now, and ``--config``: from then on flags come from settings as well."""
        if self._add_arguments is None:
            return
        self.add_argument(
            *("-h", "--help"),
            action=PartialHelp,
            nargs="?",
            default=argparse.SUPPRESS,
            metavar="WORD",
            help="show all flags, or only the group or the flags with this name",
        )
        self._add_arguments(self)
        self._add_arguments, self._takes_settings = None, True
        if len(self._option_string_actions) > MAX_USAGE_FLAGS:
            values = "".join(f" {_shown(action)}" for action in self._get_positional_actions())
            self.usage = f"{self.prog}{values} [flags]"
        self.add_argument(
            CONFIG_FLAG,
            metavar="FILE",
            help="YAML file of flags (max-model-len: 8k); overrides PAGODA_<FLAG>, and the command line overrides it",
        )

    def print_part(self, word: str) -> None:
        """Show the groups whose title has `word`, or else the flags whose name has it."""
        sought = word.lower().replace("_", "-")
        groups = [group for group in self._action_groups if sought in (group.title or "").lower()]
        shown = [(group.title, group._group_actions) for group in groups]
        if not shown:
            flags = [action for action in self._actions if any(sought in option for option in action.option_strings)]
            shown = [(f"flags with {word}", flags)] if flags else []
        if not shown:
            own = self._action_groups[2:]  # after argparse's positional arguments and options
            titles = ", ".join(group.title or "" for group in own if group._group_actions)
            self.error(f"no group of flags and no flag is called {word!r}; the groups are: {titles}")
        formatter = self._get_formatter()
        for title, actions in shown:
            formatter.start_section(title)
            formatter.add_arguments(actions)
            formatter.end_section()
        print(formatter.format_help(), end="")

    def error(self, message: str) -> NoReturn:
        """End the process with code 2 and one line."""
        if match := re.fullmatch(
            r"argument command: invalid choice: '([^']*)' \(choose from (.*)\)", message, re.DOTALL
        ):
            close = difflib.get_close_matches(match[1], re.findall(r"[\w-]+", match[2]), n=2)
            hint = f"; did you mean {' or '.join(close)}?" if close else ""
            message = f"there is no command {match[1]!r}{hint}"
        self.exit(2, f"{self.prog}: error: {as_typed(message, self.typed)} (see {self.prog} --help)\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse, after the settings became the defaults of the flags."""
        self.fill()
        if not self._takes_settings:
            return super().parse_known_args(args, namespace)
        args, self.typed = dashed(list(args or ()), self._option_string_actions)
        self._note_short_names(args)
        given = self._read_settings(args)
        self._words, self._settings = args, given
        built_in = {dest: self.get_default(dest) for dest in given}
        for action in option_actions(self).values():
            action.required = action.required and action.dest not in given
        self.set_defaults(**given)
        parsed, unknown = super().parse_known_args(args, namespace)
        # A model as first argument beats one from file or environment, which came in as if --model had been given.
        if getattr(parsed, "model_argument", None) is not None and parsed.model == given.get("model", object()):
            parsed.model = built_in["model"]
        return parsed, unknown

    def _note_short_names(self, words: Sequence[str]) -> None:
        """Have messages name a flag by its second name (-tp) where that was typed."""
        for word in words:
            if word == "--":
                return
            flag = word.partition("=")[0]
            action = self._option_string_actions.get(flag)
            if action is not None and flag != action.option_strings[0] and not flag.startswith("--no-"):
                self.typed.setdefault(action.option_strings[0], self.typed.get(flag, flag))

    def refuse_unknown(self, words: Sequence[str]) -> NoReturn:
        """End the process because of the unknown `words`, with a hint if there is one."""
        word = next((word for word in words if word.startswith("-")), words[0])
        flag = word.partition("=")[0]
        if (reason := REFUSED_FLAGS.get(flag)) is not None:
            self.error(f"{flag} is not supported: {reason}")
        shown = [name for name, action in self._option_string_actions.items() if action.help != argparse.SUPPRESS]
        close = difflib.get_close_matches(flag, shown, n=2) if flag.startswith("-") else []
        hint = f"; did you mean {' or '.join(close)}?" if close else ""
        self.error(f"unknown argument {word!r}{hint}")

    def _read_settings(self, words: list[str]) -> dict[str, Any]:
        actions = option_actions(self)
        try:
            defaults = environment_defaults(self.environment, actions)
            path = _last_value(words, CONFIG_FLAG)
            if path is not None:
                defaults |= file_defaults(path, actions)
        except SettingError as error:
            self.error(error.message)
        for variable, meant in misspelled(self.environment, actions).items():
            print(f"{self.prog}: warning: {variable} sets nothing; did you mean {meant}?", file=sys.stderr)
        return defaults


def _shown(action: argparse.Action) -> str:
    """A positional argument in the usage line."""
    name = action.metavar if isinstance(action.metavar, str) else action.dest
    return {"?": f"[{name}]", "*": f"[{name} ...]", "+": f"{name} ..."}.get(str(action.nargs), name)


def _last_value(words: list[str], flag: str) -> str | None:
    """The value given for `flag` before any "--"; argparse itself reports a missing value."""
    value = None
    for place, word in enumerate(words):
        if word == "--":
            break
        if word == flag and place + 1 < len(words):
            value = words[place + 1]
        elif word.startswith(flag + "="):
            value = word.partition("=")[2]
    return value
