"""The ``pagoda`` command."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from pagoda import __version__
from pagoda.commands.arguments import CommandParser
from pagoda_common.errors import ConfigError, ModelLoadError, PagodaError
from pagoda_common.process.logging import configure_logging

EXIT_INTERRUPTED = 130
"""Ended by Ctrl-C, as shells count."""
EXIT_BROKEN_PIPE = 141
"""No one reads the output any more."""
COMPLETING = "_ARGCOMPLETE"
"""Set by a shell that asks for completions."""


@dataclass(frozen=True, slots=True)
class Command:
    """One subcommand. Its module is imported when it is chosen: images do not have what benchmarks need."""

    name: str
    """Two words for a command of a group."""
    help: str
    module: str
    """In pagoda.commands."""
    suffix: str = ""
    """Suffix of its functions' names, if a module has several commands."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add its flags."""
        add: Callable[[argparse.ArgumentParser], None] = self._function(f"add{self.suffix}_arguments")
        add(parser)

    def run(self, args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
        """Do it; the exit code."""
        run: Callable[[argparse.Namespace, argparse.ArgumentParser], int] = self._function(f"run{self.suffix}")
        return run(args, parser)

    def _function(self, name: str) -> Any:
        return getattr(import_module(f"pagoda.commands.{self.module}"), name)


COMMANDS = (
    Command("serve", "run frontend, scheduler and worker on this machine", "serve"),
    Command("demo", "start all services, stream one answer, and end", "demo"),
    Command("chat", "talk to a running server", "chat", "_chat"),
    Command("complete", "continue texts with a running server", "chat", "_complete"),
    Command("run-batch", "answer a file of requests (OpenAI batch format)", "run_batch"),
    Command("bench serve", "measure a running server", "bench_serve"),
    Command("bench throughput", "measure an engine's throughput", "bench_throughput"),
    Command("bench latency", "measure an engine's time for one batch", "bench_latency"),
    Command("top", "watch a running engine in the terminal", "top"),
    Command("health", "ask a service for its health (gRPC)", "health"),
    Command("collect-env", "describe this machine for a bug report", "collect_env"),
    Command("completion", "print the shell completion of pagoda", "completion"),
)
GROUPS = {"bench": "measure a server or an engine"}


def make_parser() -> CommandParser:
    """The parser of all commands; the parsed arguments have `command` and its own `parser`."""
    parser = CommandParser(prog="pagoda", description="Pagoda, an LLM serving engine of three gRPC services.")
    parser.add_argument("--version", action="version", version=f"pagoda {__version__}")
    subparsers = parser.add_subparsers(metavar="command", required=True)
    groups: dict[str, Any] = {}
    for command in COMMANDS:
        group, _, name = command.name.rpartition(" ")
        if group and group not in groups:
            group_parser = subparsers.add_parser(group, help=GROUPS[group], description=_sentence(GROUPS[group]))
            groups[group] = group_parser.add_subparsers(metavar="command", required=True)
        among = groups[group] if group else subparsers
        description = _sentence(command.help)
        subparser = among.add_parser(name, help=command.help, description=description, add_help=False)
        subparser.fill_later(command.add_arguments)
        subparser.set_defaults(command=command, parser=subparser)
        if COMPLETING in os.environ:
            subparser.fill()
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code. Wrong flags end the process with code 2."""
    parser = make_parser()
    if COMPLETING in os.environ:
        import argcomplete  # only shells need it

        argcomplete.autocomplete(parser)
    args, unknown = parser.parse_known_args(sys.argv[1:] if argv is None else list(argv))
    if unknown:
        args.parser.refuse_unknown(unknown)
    configure_logging("pagoda", os.environ.get("PAGODA_LOG_LEVEL", "info"))
    chosen: Command = args.command
    try:
        return chosen.run(args, args.parser)
    except PagodaError as error:
        print(f"{args.parser.prog}: error: {error.message}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError | ModelLoadError) else 1
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        sys.stdout = None  # or the interpreter fails to flush it at its end
        return EXIT_BROKEN_PIPE


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


if __name__ == "__main__":
    sys.exit(main())
