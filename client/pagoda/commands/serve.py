"""``pagoda serve``: frontend, scheduler and worker on this machine, kept running until Ctrl-C."""

import argparse
import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from pagoda.commands.arguments import CommandParser
from pagoda.options.vllm_options import add_vllm_flags, check_vllm_args
from pagoda.server.load_fault import find_load_fault
from pagoda.server.local_stack import LocalStack
from pagoda.server.output import drop_unwritable, show
from pagoda.server.startup_table import StartupTable
from pagoda_common.config.engine_config import EMBEDDED_MODEL
from pagoda_common.config.flags.flags import (
    add_serve_flags,
    config_errors,
    engine_config_from_args,
    frontend_config_from_args,
)
from pagoda_common.config.frontend_config import API_KEY_VARIABLE, FrontendConfig
from pagoda_common.process.children import can_listen, free_port
from pagoda_common.process.logging import configure_logging, escaped
from pagoda_common.process.plugins import run_plugins
from pagoda_common.process.supervisor import EXIT_CONFIG, Supervisor
from pagoda_common.rpc.local_token import left_token

logger = logging.getLogger(__name__)

KEY_VARIABLES = (API_KEY_VARIABLE, "VLLM_API_KEY")
"""Environment variables of the key; the first one takes precedence."""
EXAMPLE_QUESTION = "Tell me a story about a dog."
EXAMPLE_PROMPT = "Once upon a time"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of engine and frontend, and the scheduler's ports."""
    add_serve_flags(parser)
    group = parser.add_argument_group("processes")
    group.add_argument(
        "--scheduler-port",
        type=int,
        default=0,
        metavar="PORT",
        help="port of the scheduler, on loopback; 0 chooses one",
    )
    group.add_argument(
        "--scheduler-metrics-port",
        type=int,
        metavar="PORT",
        help="port of the scheduler's Prometheus metrics, on loopback: where a step's time goes",
    )
    group.add_argument(
        "--worker-metrics-port",
        type=int,
        metavar="PORT",
        help="port of the first worker's Prometheus metrics, on loopback; other workers use the next ports",
    )
    group.add_argument("--verbose", action="store_true", help="print the time of each part of the start, once ready")
    add_vllm_flags(parser)


def run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Serve until a signal or a failure; see `serve` for the exit code."""
    configure_logging("pagoda", os.environ.get("PAGODA_LOG_LEVEL", "info"), args.log_format)
    try:
        return asyncio.run(serve(plan(args, parser), StartupTable() if args.verbose else None))
    finally:
        drop_unwritable()


def plan(args: argparse.Namespace, parser: argparse.ArgumentParser) -> LocalStack:
    """The stack that the flags ask for; ends the process with code 2 when they are wrong."""
    with config_errors(parser):
        run_plugins()
        if idle := check_vllm_args(args):
            logger.info("%s", idle)
        frontend = frontend_config_from_args(args)
        if not frontend.api_key and (keys := os.environ.get("VLLM_API_KEY")):
            frontend = replace(frontend, api_key=tuple(keys.splitlines()))
        grpc_host = frontend.grpc_host or frontend.host
        is_named = not isinstance(parser, CommandParser) or parser.is_given("grpc_port")
        if not is_named and frontend.grpc_port and not can_listen(grpc_host, frontend.grpc_port):
            taken, frontend = frontend.grpc_port, replace(frontend, grpc_port=free_port(grpc_host))
            logger.info("port %d is taken: gRPC is served on %d (--grpc-port names one)", taken, frontend.grpc_port)
        return LocalStack.plan(
            engine=engine_config_from_args(args),
            frontend=frontend,
            scheduler_port=args.scheduler_port,
            metrics_port=args.scheduler_metrics_port,
            worker_metrics_port=args.worker_metrics_port,
        )


async def serve(stack: LocalStack, table: StartupTable | None = None) -> int:
    """Run the stack and announce when it is ready.

    Args:
        table: filled and printed then.

    Returns:
        0 after Ctrl-C or SIGTERM (130 or 143 when a second one forced the end), 2 when a service refused its
        configuration or the model cannot be loaded, 1 when a service could not be kept running.
    """
    has_json_logs = stack.engine.observability.log_format == "json"
    services = stack.services()
    output: Callable[[str, str], None] = print_json_line if has_json_logs else print_line
    if table is not None:
        services, output = table.marking(services), table.output(output)
    supervisor = Supervisor(services=services, output=output)
    started = time.monotonic()
    with stop_on_signals(supervisor), shared_token(stack):
        running = asyncio.create_task(supervisor.run())
        ready = asyncio.create_task(stack.wait_until_ready())
        fault = asyncio.create_task(find_load_fault(stack.frontend.scheduler, security=stack.engine.security))
        await asyncio.wait([running, ready, fault], return_when=asyncio.FIRST_COMPLETED)
        if ready.done():
            show(announcement(stack, seconds=time.monotonic() - started), sys.stdout)
            if table is not None:
                show(table.text(), sys.stdout)
        elif fault.done():
            logger.error("cannot serve %s: %s", stack.engine.model.model, fault.result())
            supervisor.stop()
        is_faulty = fault.done() and not ready.done()
        ready.cancel()
        fault.cancel()
        return await running or (EXIT_CONFIG if is_faulty else 0)


@contextlib.contextmanager
def shared_token(stack: LocalStack) -> Iterator[None]:
    """Let other programs of this user call the scheduler: workers that join, `pagoda top`, `LLM(address=…)`."""
    token, port = stack.engine.security.service_token, int(stack.frontend.scheduler.rpartition(":")[2])
    if not token:
        yield
        return
    with left_token(port, token) as is_found:
        if not is_found:
            logger.info("programs that call the scheduler need --service-token-file: no directory is this user's alone")
        yield


def announcement(stack: LocalStack, *, seconds: float) -> str:
    """The addresses of the server, and a command to try."""
    if stack.engine.model.model == EMBEDDED_MODEL:
        path = "chat/completions"
        body: dict[str, Any] = {"messages": [{"role": "user", "content": EXAMPLE_QUESTION}]}
    else:  # it may have no chat template
        path = "completions"
        body = {"prompt": EXAMPLE_PROMPT, "max_tokens": 32}
    request = json.dumps({"model": stack.model_name, "stream": True, **body}).replace("'", r"'\''")
    key = f' -H "Authorization: Bearer {key_shown(stack.frontend, os.environ)}"' if has_keys(stack.frontend) else ""
    page = "" if stack.frontend.disable_status_page else f"\n  status     {stack.url}/"
    return f"""
Pagoda serves {stack.model_name}; ready in {seconds:.1f} s.
  HTTP       {stack.url}/v1{page}
  gRPC       {stack.grpc_address} (pagoda.v1.Inference)
  scheduler  {stack.frontend.scheduler}
Try:
  curl -N {stack.url}/v1/{path} -H 'Content-Type: application/json'{key} \\
    -d '{request}'
Ctrl-C ends it.
"""


def has_keys(frontend: FrontendConfig) -> bool:
    """Whether clients must show an API key."""
    return bool(frontend.api_key or frontend.api_key_file)


def key_shown(frontend: FrontendConfig, environment: Mapping[str, str]) -> str:
    """The API key in the printed command: a variable that holds one, or a placeholder; never the key itself."""
    for name in KEY_VARIABLES:
        if environment.get(name, "").split(",")[0].strip() in frontend.api_key:
            return f"${name}"
    return "YOUR_API_KEY"


def print_line(service: str, line: str) -> None:
    """Show one line of a child's output, which need not name itself again."""
    module = service.partition("-")[0]
    show(f"{service:<9} | {escaped(line.replace(f' {module}: ', ' ', 1))}")


def print_json_line(service: str, line: str) -> None:
    """The same where lines are objects that name their service; what is no object becomes one."""
    if not line.startswith("{"):
        line = json.dumps({"service": service, "message": line}, ensure_ascii=False)
    print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def stop_on_signals(supervisor: Supervisor) -> Iterator[None]:
    """The first SIGINT or SIGTERM ends the services in order; a second one ends them at once."""
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM)
    is_stopping = False

    def on_signal(number: signal.Signals) -> None:
        nonlocal is_stopping
        if is_stopping:
            supervisor.kill(128 + number)
            return
        is_stopping = True
        show("\nEnding: open streams may finish. A second Ctrl-C ends at once.")
        supervisor.stop()

    for number in numbers:
        loop.add_signal_handler(number, on_signal, number)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
