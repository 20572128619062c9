"""Starts the ranks of a group as processes, and keeps them running. Knows flags; no torch, no gRPC."""

import argparse
import asyncio
import contextlib
import logging
import os
import sys

from pagoda_common.config.flags.flags import observability_config_to_argv, security_config_to_argv
from pagoda_common.config.observability_config import ObservabilityConfig
from pagoda_common.config.security_config import SecurityConfig
from pagoda_common.process.children import service_command
from pagoda_common.process.logging import log_life
from pagoda_common.process.supervisor import Service, Supervisor

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
STOP_MARGIN_S = 10.0
"""Seconds beyond its drain timeout before a rank is killed."""


def rank_host(args: argparse.Namespace) -> str | None:
    """Host at which ranks reach each other: loopback if all start here; None: as the scheduler reaches them."""
    own: str | None = args.rank_host
    if own is None and args.tensor_parallel_size == args.world_size > 1:
        return LOOPBACK
    return own


def rank_services(
    args: argparse.Namespace, *, security: SecurityConfig, observability: ObservabilityConfig
) -> tuple[Service, ...]:
    """One service per rank, rank-0, rank-1, ...: `args.rank` is the first.

    Each has its own device; ports of gRPC and metrics are consecutive. They divide the cores of a CPU, unless
    `args.threads` sets the threads of each.
    """
    count: int = args.tensor_parallel_size
    threads = args.threads or max(1, len(os.sched_getaffinity(0)) // count)
    argv = [f"--scheduler={args.scheduler}", f"--host={args.host}", f"--threads={threads}"]
    argv += [f"--group={args.group}", f"--world-size={args.world_size}", f"--drain-timeout={args.drain_timeout}"]
    if (host := rank_host(args)) is not None:
        argv.append(f"--rank-host={host}")
    argv += security_config_to_argv(security)
    argv += observability_config_to_argv(observability)
    command = service_command("pagoda_worker", argv)
    services = []
    for number in range(count):
        rank = args.rank + number
        own = [f"--rank={rank}", f"--device-index={(args.device_index or 0) + number}"]
        own.append(f"--port={args.port and args.port + number}")
        if args.advertise_address is not None:
            at, _, port = args.advertise_address.rpartition(":")
            own.append(f"--advertise-address={at}:{int(port) + number}")
        if args.metrics_port is not None:
            own.append(f"--metrics-port={args.metrics_port and args.metrics_port + number}")
        stop_timeout_s = args.drain_timeout + STOP_MARGIN_S
        services.append(Service(name=f"rank-{rank}", command=(*command, *own), stop_timeout_s=stop_timeout_s))
    return tuple(services)


async def run_ranks(services: tuple[Service, ...], stopped: asyncio.Event, *, with_names: bool) -> int:
    """Keep `services` running until `stopped`, then end them; returns the exit code. A rank that dies is restarted, and
    the others keep their weights.

    Args:
        with_names: prefix each line of a rank with its name. Not for JSON.
    """

    def output(name: str, line: str) -> None:
        with contextlib.suppress(OSError):  # a full disk ends no worker
            print(f"{name} | {line}" if with_names else line, file=sys.stderr, flush=True)

    supervisor = Supervisor(services=services, output=output)

    async def follow() -> None:
        await stopped.wait()
        log_life(logger, "ending %d ranks", len(services))
        supervisor.stop()

    following = asyncio.create_task(follow())
    try:
        return await supervisor.run()
    finally:
        following.cancel()
