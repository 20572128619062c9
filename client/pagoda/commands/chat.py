"""``pagoda chat`` and ``pagoda complete``: talk to a running server in the terminal."""

import argparse
import os
import sys
from collections.abc import Callable, Generator
from contextlib import closing
from typing import Any
from urllib.parse import urlsplit

from pagoda.http.openai_http import OpenAIServer
from pagoda_common.errors import PagodaError

DEFAULT_URL = "http://127.0.0.1:8000/v1"
SAMPLING = ("max_tokens", "temperature", "top_p", "seed")
"""Flags that are parameters of the request."""


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """Where the server is."""
    group = parser.add_argument_group("server")
    group.add_argument("--url", default=DEFAULT_URL, help="the server's OpenAI API (default: %(default)s)")
    group.add_argument(
        "--model", "--model-name", dest="model_name", metavar="NAME", help="model; the server's first one if not given"
    )
    group.add_argument("--api-key", metavar="KEY", help="bearer token; OPENAI_API_KEY if not given")


HELP = "/help shows this, /clear forgets the conversation, /exit (or Ctrl-D) ends."


def add_complete_arguments(parser: argparse.ArgumentParser) -> None:
    """Where the server is, and one message for scripts."""
    add_server_arguments(parser)
    group = parser.add_argument_group("conversation")
    group.add_argument("-q", "--quick", metavar="TEXT", help="send this message, print the answer and end")
    group.add_argument("--max-tokens", type=int, metavar="N", help="maximum length of an answer")
    group.add_argument(
        "--temperature", type=float, metavar="T", help="temperature; the model's default if not given; 0 is greedy"
    )
    group.add_argument("--top-p", type=float, metavar="P", help="top-p; the model's default if not given")
    group.add_argument("--seed", type=int, metavar="N", help="seed of sampling")


def add_chat_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of both, and the system prompt."""
    add_complete_arguments(parser)
    parser.add_argument("--system-prompt", metavar="TEXT", help="first message of the conversation")


def run_chat(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """A conversation: each line is a message or a command, Ctrl-C ends an answer, end of input ends it all."""
    first = [{"role": "system", "content": args.system_prompt}] if args.system_prompt else []
    messages = list(first)

    def clear() -> None:
        messages[:] = first

    def answer(server: OpenAIServer, model: str, text: str) -> bool:
        question = {"role": "user", "content": text}
        pieces = server.stream_chat(
            messages=[*messages, question], model=model, on_reasoning=_show_reasoning, **_parameters(args)
        )
        reply, is_whole = _show(pieces)
        messages.extend([question, {"role": "assistant", "content": reply}])  # a failed question is forgotten
        return is_whole

    return _loop(args, answer, clear=clear)


def run_complete(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Each line is a prompt of its own; Ctrl-C ends its continuation."""

    def answer(server: OpenAIServer, model: str, text: str) -> bool:
        return _show(server.stream_completion(prompt=text, model=model, **_parameters(args)))[1]

    return _loop(args, answer)


def open_server(args: argparse.Namespace) -> OpenAIServer:
    """The server that `add_server_arguments` names; a URL without a path gets the usual /v1."""
    url = args.url.rstrip("/")
    base_url = url if urlsplit(url).path else f"{url}/v1"
    return OpenAIServer(base_url=base_url, api_key=args.api_key or os.environ.get("OPENAI_API_KEY"))


def _loop(
    args: argparse.Namespace,
    answer: Callable[[OpenAIServer, str, str], bool],
    clear: Callable[[], None] | None = None,
) -> int:
    """Answer --quick, or one line of standard input after the other; an error ends only a --quick one.

    Args:
        clear: forgets the conversation; with it there are commands.
    """
    server = open_server(args)
    model = args.model_name or server.first_model()
    if args.quick is not None:
        if not answer(server, model, args.quick):
            raise KeyboardInterrupt
        return 0
    hint = "" if clear is None else ", /help lists commands"
    print(f"{model} at {args.url}; Ctrl-C ends an answer, Ctrl-D ends{hint}.")
    while True:
        try:
            text = input("> ")
        except (EOFError, KeyboardInterrupt):
            print()
            return 0
        word = text.strip()
        if clear is not None and word.startswith("/"):
            if word in ("/exit", "/quit"):
                return 0
            if word == "/clear":
                clear()
                print("The conversation starts again.")
            else:
                print(HELP if word == "/help" else f"There is no command {word}.\n{HELP}")
            continue
        try:
            if text.strip():
                answer(server, model, text)
        except PagodaError as error:
            print(f"error: {error.message}", file=sys.stderr)


def _parameters(args: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(args, name) for name in SAMPLING if getattr(args, name) is not None}


def _show_reasoning(text: str) -> None:
    """On standard error, so that an answer that is piped on is the answer alone."""
    print(f"\x1b[2m{text}\x1b[0m" if sys.stderr.isatty() else text, end="", file=sys.stderr, flush=True)


def _show(pieces: Generator[str, None, None]) -> tuple[str, bool]:
    """Print the pieces as they come.

    Returns:
        The text, and whether it is whole: Ctrl-C ends it early, and with it the request.
    """
    text, is_whole = "", True
    with closing(pieces):
        try:
            for piece in pieces:
                text += piece
                print(piece, end="", flush=True)
        except KeyboardInterrupt:
            is_whole = False
    print(flush=True)
    return text, is_whole
