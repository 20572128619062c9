"""``pagoda completion SHELL``: what makes a shell complete the command, its flags and their choices."""

import argparse

from argcomplete.shell_integration import shellcode

SHELLS = ("bash", "zsh", "fish")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which shell."""
    parser.add_argument("shell", choices=SHELLS, help='such as: eval "$(pagoda completion bash)"')


def run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Print it."""
    print(shellcode(["pagoda"], shell=args.shell))
    return 0
