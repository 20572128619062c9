"""``pagoda demo``: starts all services on free ports, streams one answer, and ends."""

import argparse
import asyncio
import collections
import sys
import time
from collections.abc import Callable

from pagoda.commands.serve import EXAMPLE_QUESTION, plan, stop_on_signals
from pagoda.commands.serve import add_arguments as add_serve_arguments
from pagoda.http.openai_http import OpenAIServer
from pagoda.server.load_fault import find_load_fault
from pagoda.server.local_stack import LocalStack
from pagoda.server.startup_table import StartupTable
from pagoda_common.errors import PagodaError
from pagoda_common.process.supervisor import Supervisor

LOG_LINES_SHOWN = 40
START_TIMEOUT_S = 600.0
"""A big checkpoint may take minutes to load; what takes longer is broken."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of `pagoda serve`, with free ports, and the question."""
    add_serve_arguments(parser)
    parser.set_defaults(port=0, grpc_port=0)
    parser.add_argument("--prompt", default=EXAMPLE_QUESTION, help="question (default: %(default)s)")
    parser.add_argument(
        "--max-tokens", type=int, default=200, help="maximum length of the answer (default: %(default)s)"
    )


def run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """0 when an answer came and all services ended well."""
    table = StartupTable() if args.verbose else None
    stack = plan(args, parser).for_this_process()
    return asyncio.run(demo(stack, prompt=args.prompt, max_tokens=args.max_tokens, table=table))


async def demo(stack: LocalStack, *, prompt: str, max_tokens: int, table: StartupTable | None = None) -> int:
    """Run the stack for one answer. The services' logs are shown only when something went wrong."""
    lines: collections.deque[str] = collections.deque(maxlen=LOG_LINES_SHOWN)
    services = stack.services()
    output = _keeper(lines)
    if table is not None:
        services, output = table.marking(services), table.output(output)
    supervisor = Supervisor(services=services, output=output)
    print("Starting frontend, scheduler and worker …", flush=True)
    started = time.monotonic()
    has_text = False
    with stop_on_signals(supervisor):
        running = asyncio.create_task(supervisor.run())
        ready = asyncio.create_task(stack.wait_until_ready(on_reason=print_reason))
        fault = asyncio.create_task(find_load_fault(stack.frontend.scheduler, security=stack.engine.security))
        await asyncio.wait([running, ready, fault], timeout=START_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
        if ready.done():
            print(f"Ready in {time.monotonic() - started:.1f} s: {stack.url}\n", flush=True)
            if table is not None:
                print(table.text(), flush=True)
            has_text = await asyncio.to_thread(_talk, stack, prompt, max_tokens)
        ready.cancel()
        fault.cancel()
        supervisor.stop()
        code = await running
    if has_text and code == 0:
        return 0
    print("The services' last lines:", *lines, "No answer came." if not has_text else "", sep="\n", file=sys.stderr)
    return code or 1


def _keeper(lines: collections.deque[str]) -> Callable[[str, str], None]:
    """Keeps a service's output in `lines`."""
    return lambda name, line: lines.append(f"{name:<9} | {line}")


def print_reason(reason: str) -> None:
    """Say why it takes a while."""
    print(f"  {reason}", flush=True)


def _talk(stack: LocalStack, prompt: str, max_tokens: int) -> bool:
    """Print one exchange; whether any text came."""
    print(f"> {prompt}\n", flush=True)
    server = OpenAIServer(base_url=f"{stack.url}/v1", api_key=next(iter(stack.frontend.api_key), None))
    messages = [{"role": "user", "content": prompt}]
    has_text = False
    try:
        for text in server.stream_chat(messages=messages, model=stack.model_name, max_tokens=max_tokens):
            print(text, end="", flush=True)
            has_text = has_text or bool(text.strip())
    except PagodaError as error:
        print(f"\nerror: {error.message}", file=sys.stderr)
        return False
    print("\n", flush=True)
    return has_text
