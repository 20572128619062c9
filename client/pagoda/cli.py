"""The ``pagoda`` command."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pagoda import __version__
from pagoda.commands import chat, collect_env, demo, health, serve
from pagoda_common.logging import configure_logging


@dataclass(frozen=True, slots=True)
class Command:
    """One subcommand."""

    name: str
    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace, argparse.ArgumentParser], int]


COMMANDS = (
    Command("serve", "run frontend, scheduler and worker on this machine", serve.add_arguments, serve.run),
    Command("demo", "start everything, stream one answer, end", demo.add_arguments, demo.run),
    Command("chat", "talk to a running server", chat.add_chat_arguments, chat.run_chat),
    Command("complete", "let a running server continue texts", chat.add_arguments, chat.run_complete),
    Command("health", "ask a service for its health (gRPC)", health.add_arguments, health.run),
    Command("collect-env", "describe this machine for a bug report", collect_env.add_arguments, collect_env.run),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code. Wrong flags end the process with code 2."""
    parser = argparse.ArgumentParser(prog="pagoda", description="Pagoda, an LLM serving engine of three gRPC services.")
    parser.add_argument("--version", action="version", version=f"pagoda {__version__}")
    subparsers = parser.add_subparsers(metavar="command", required=True)
    for command in COMMANDS:
        subparser = subparsers.add_parser(
            command.name,
            help=command.help,
            description=f"{command.help[0].upper()}{command.help[1:]}.",
            allow_abbrev=False,
        )
        command.add_arguments(subparser)
        subparser.set_defaults(command=command, parser=subparser)
    args = parser.parse_args(argv)
    configure_logging("pagoda", os.environ.get("PAGODA_LOG_LEVEL", "info"))
    chosen: Command = args.command
    return chosen.run(args, args.parser)


if __name__ == "__main__":
    sys.exit(main())
