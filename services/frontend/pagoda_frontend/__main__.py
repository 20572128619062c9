"""``python -m pagoda_frontend --scheduler host:port``: the frontend as a process."""

import argparse
import asyncio
import logging
import os
from dataclasses import replace

import uvloop

from pagoda_common.config.flags.flags import (
    add_child_flags,
    add_frontend_flags,
    config_errors,
    frontend_config_from_args,
)
from pagoda_common.config.flags.settings import ServiceParser, parse_service_args
from pagoda_common.config.frontend_config import API_KEY_VARIABLE, OPERATOR_KEY_VARIABLE, FrontendConfig
from pagoda_common.process.children import die_with_parent, raise_file_limit
from pagoda_common.process.heartbeat import beat
from pagoda_common.process.idle_memory import without_collections
from pagoda_common.process.logging import configure_logging, log_life
from pagoda_common.process.plugins import run_plugins
from pagoda_common.process.startup_marks import enable_marks, mark
from pagoda_common.rpc.service import stop_signals

logger = logging.getLogger(__name__)


async def serve(config: FrontendConfig) -> int:
    """Serve until SIGTERM or SIGINT, then drain; the exit code. Raises CannotListen."""
    with without_collections():
        from pagoda_frontend.http.server import FrontendServer

    mark("imports")
    with stop_signals() as stop:
        server = FrontendServer(config=config)
        await server.start()
        beating = asyncio.create_task(beat())
        stopped = asyncio.create_task(stop.wait())
        failed = asyncio.create_task(server.wait_failed())
        await asyncio.wait({stopped, failed}, return_when=asyncio.FIRST_COMPLETED)
        if not stop.is_set():
            logger.error("the HTTP server ended")
            await server.close()
            return 1
        failed.cancel()
        log_life(logger, "draining, up to %g s", config.drain_timeout_s)
        await server.drain(config.drain_timeout_s)
        beating.cancel()
        log_life(logger, "bye")
        return 0


def make_parser() -> argparse.ArgumentParser:
    """The flags of the frontend."""
    parser = ServiceParser(prog="pagoda-frontend", description="OpenAI HTTP and gRPC in front of a scheduler")
    add_frontend_flags(parser)
    add_child_flags(parser)
    return parser


def main() -> int:
    """Entry point of ``pagoda-frontend``."""
    parser = make_parser()
    args = parse_service_args(parser)
    if args.die_with_parent is not None:
        die_with_parent(args.die_with_parent)
    raise_file_limit()
    enable_marks(os.environ)
    mark("start of Python")
    is_child = args.die_with_parent is not None
    configure_logging("frontend", os.environ.get("PAGODA_LOG_LEVEL", "info"), args.log_format, is_child=is_child)
    with config_errors(parser):
        run_plugins()
        config = frontend_config_from_args(args)
        keys = os.environ.get(API_KEY_VARIABLE) or os.environ.get("VLLM_API_KEY") or ""
        if not config.api_key:
            config = replace(config, api_key=tuple(keys.splitlines()))  # `pagoda serve` hands on several, one a line
        if not config.operator_key:
            config = replace(config, operator_key=tuple(os.environ.get(OPERATOR_KEY_VARIABLE, "").splitlines()))
        exit_code: int = uvloop.run(serve(config))
    return exit_code


if __name__ == "__main__":
    raise SystemExit(main())
