"""``pagoda chat`` and ``pagoda complete``: talk to a running server in the terminal."""

import argparse
import os
import sys
from collections.abc import Callable, Iterator

from pagoda.openai_http import OpenAIServer
from pagoda_common.errors import PagodaError

DEFAULT_URL = "http://127.0.0.1:8000/v1"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Where the server is, and one message for scripts."""
    parser.add_argument("--url", default=DEFAULT_URL, help="the server's OpenAI API (default: %(default)s)")
    parser.add_argument("--model-name", metavar="NAME", help="the server's first model if not given")
    key = os.environ.get("OPENAI_API_KEY")
    parser.add_argument("--api-key", metavar="KEY", default=key, help="bearer token; OPENAI_API_KEY if not given")
    parser.add_argument("-q", "--quick", metavar="TEXT", help="send this one message, print the answer and end")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="longest answer")


def add_chat_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of both, and the system prompt."""
    add_arguments(parser)
    parser.add_argument("--system-prompt", metavar="TEXT", help="first message of the conversation")


def run_chat(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """A conversation: each line is a message, end of input ends it."""
    messages = [{"role": "system", "content": args.system_prompt}] if args.system_prompt else []

    def answer(server: OpenAIServer, model: str, text: str) -> None:
        question = {"role": "user", "content": text}
        reply = _show(server.stream_chat(messages=[*messages, question], model=model, **_parameters(args)))
        messages.extend([question, {"role": "assistant", "content": reply}])  # a failed question is forgotten

    return _loop(args, answer)


def run_complete(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Each line is a prompt of its own."""

    def answer(server: OpenAIServer, model: str, text: str) -> None:
        _show(server.stream_completion(prompt=text, model=model, **_parameters(args)))

    return _loop(args, answer)


def _loop(args: argparse.Namespace, answer: Callable[[OpenAIServer, str, str], None]) -> int:
    """Answer --quick, or one line of standard input after the other; an error ends only a --quick one."""
    server = OpenAIServer(base_url=args.url.rstrip("/"), api_key=args.api_key)
    try:
        model = args.model_name or server.first_model()
        if args.quick is not None:
            answer(server, model, args.quick)
            return 0
    except PagodaError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 1
    print(f"{model} at {args.url}; Ctrl-D ends.")
    while True:
        try:
            text = input("> ")
            if text.strip():
                answer(server, model, text)
        except PagodaError as error:
            print(f"error: {error.message}", file=sys.stderr)
        except (EOFError, KeyboardInterrupt):
            print()
            return 0


def _parameters(args: argparse.Namespace) -> dict[str, int]:
    return {} if args.max_tokens is None else {"max_tokens": args.max_tokens}


def _show(pieces: Iterator[str]) -> str:
    text = ""
    for piece in pieces:
        text += piece
        print(piece, end="", flush=True)
    print(flush=True)
    return text
