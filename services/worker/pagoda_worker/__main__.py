"""``python -m pagoda_worker``: the worker's process."""

import argparse
import asyncio
import logging
import os
import socket

import uvloop
from prometheus_client import CollectorRegistry

from pagoda_common.config.flags.flags import (
    add_child_flags,
    add_listen_flags,
    add_observability_flags,
    add_scheduler_address_flag,
    add_security_flags,
    config_errors,
    observability_config_from_args,
    security_config_from_args,
)
from pagoda_common.config.flags.settings import ServiceParser, parse_service_args
from pagoda_common.config.observability_config import ObservabilityConfig
from pagoda_common.config.security_config import UNGUARDED, SecurityConfig, host_of, is_local, is_loopback
from pagoda_common.errors import ConfigError
from pagoda_common.metrics.server import process_registry, serve_metrics
from pagoda_common.process.children import die_with_parent
from pagoda_common.process.heartbeat import beat
from pagoda_common.process.idle_memory import exempt_what_exists, release_memory_when_idle, without_collections
from pagoda_common.process.logging import configure_logging, log_life
from pagoda_common.process.memory import keep_freed_memory
from pagoda_common.process.plugins import run_plugins
from pagoda_common.process.startup_marks import enable_marks, mark
from pagoda_common.rpc.local_socket import new_local_address
from pagoda_common.rpc.local_token import with_found_token
from pagoda_common.version import VERSION
from pagoda_kernels.native.trust import protect_caches
from pagoda_worker.parallel.local_ranks import rank_host, rank_services, run_ranks
from pagoda_worker.threads import set_wait_policy

logger = logging.getLogger("pagoda_worker")

SERVICE = "pagoda.v1.Worker"
STOP_GRACE_S = 1.0
"""Seconds for open calls to finish at shutdown. No request is lost: the scheduler requeues running ones."""
_BOUNDS = (
    *(("threads", 1), ("group", 0), ("rank", 0), ("world_size", 1), ("tensor_parallel_size", 1)),
    *(("device_index", 0), ("drain_timeout", 0)),
)
"""Minimum values of flags."""


async def serve(args: argparse.Namespace, security: SecurityConfig, observability: ObservabilityConfig) -> None:
    """Serve until SIGTERM or SIGINT, then drain running requests and exit."""
    # Torch is imported after the flags are read and OpenMP's variables are set.
    mark("start of Python")
    with without_collections():
        from pagoda.v1 import scheduler_pb2, worker_pb2_grpc
        from pagoda_common.rpc.service import RpcServer, stop_signals
        from pagoda_kernels.native.library import stop_compiling
        from pagoda_worker.memory.device import claim_device
        from pagoda_worker.memory.memory_ahead import touch_memory_at_rest
        from pagoda_worker.metrics import WorkerCollector, WorkerMetrics
        from pagoda_worker.parallel.tensor_parallel import TensorParallel
        from pagoda_worker.rpc.registration import CAPABILITIES, Registration
        from pagoda_worker.rpc.servicer import WorkerServicer
        from pagoda_worker.worker import Worker

    mark("imports")
    server = RpcServer(services=(SERVICE,), security=security.server, enable_channelz=observability.enable_channelz)
    parallel = TensorParallel(rank=args.rank, world_size=args.world_size, host=_own_host(args))
    device_index = args.rank if args.device_index is None else args.device_index
    worker = Worker(
        num_threads=args.threads,
        shares_machine=is_local(args.scheduler),
        parallel=parallel,
        device_index=device_index,
    )
    registry = CollectorRegistry()
    metrics = WorkerMetrics(registry=registry) if args.metrics_port is not None else None

    async def set_serving(is_serving: bool) -> None:
        if is_serving:
            exempt_what_exists(collects=False)
        await server.set_serving(is_serving)

    servicer = WorkerServicer(worker=worker, set_serving=set_serving, metrics=metrics)
    worker_pb2_grpc.add_WorkerServicer_to_server(servicer, server.grpc_server)
    with stop_signals() as stopped:
        if args.metrics_port is not None:
            registry.register(WorkerCollector(worker=worker))
            bound = serve_metrics(process_registry(registry), host=args.host, port=args.metrics_port)
            logger.info("metrics on http://%s:%d/metrics", args.host, bound)
        local_address = _local_address(args, security)
        port = await server.start(host=args.host, port=args.port, local_address=local_address)
        log_life(logger, "worker listening on %s:%d", args.host, port)
        if not security.is_guarded:
            log_life(logger, UNGUARDED)
        mark("listening")
        identity = scheduler_pb2.WorkerIdentity(
            address=args.advertise_address or f"{_reachable_host(args.host)}:{port}",
            group=args.group,
            rank=args.rank,
            world_size=args.world_size,
            device=claim_device("auto", device_index).description,
            incarnation=servicer.fence.incarnation,
            capabilities=CAPABILITIES,
            version=VERSION,
            local_address=local_address or "",
        )
        registration = Registration(
            scheduler=args.scheduler,
            identity=identity,
            last_step=lambda: servicer.last_step,
            refresh=servicer.describe_weights,
            security=security,
        )
        beating, registered = asyncio.create_task(beat()), asyncio.create_task(registration.run())
        resting = asyncio.create_task(
            release_memory_when_idle(
                count=lambda: servicer.last_step,
                is_idle=lambda: True,  # no new step
                forget=lambda: worker.grammars.forget(),
            )
        )
        ahead = asyncio.create_task(touch_memory_at_rest(worker))
        await stopped.wait()
        stop_compiling()
        log_life(logger, "draining, up to %g s", args.drain_timeout)
        await server.set_serving(False)
        await registration.leave(args.drain_timeout)
        registered.cancel()
        resting.cancel()
        ahead.cancel()
        await server.stop(grace_s=STOP_GRACE_S)
        await servicer.close()
        beating.cancel()


def _reachable_host(host: str) -> str:
    """Address at which a scheduler reaches a server on `host`: for all interfaces, this machine's name."""
    return socket.gethostname() if host in ("0.0.0.0", "::", "") else host


def _local_address(args: argparse.Namespace, security: SecurityConfig) -> str | None:
    """A unix socket for a scheduler on this machine, which is cheaper than TCP; None if it does not apply: under TLS,
    whose certificates name hosts, or if an address is given.
    """
    if args.advertise_address is not None or security.tls_ca is not None or not is_local(args.scheduler):
        return None
    return new_local_address("worker")


def _own_host(args: argparse.Namespace) -> str:
    """Address at which other ranks reach this one: the scheduler's, unless flags say otherwise."""
    if (host := rank_host(args)) is not None:
        return host
    return _reachable_host(args.host) if args.advertise_address is None else host_of(args.advertise_address)


def _count_ranks(args: argparse.Namespace) -> None:
    """Set rank and world_size from LeaderWorkerSet's variables (which count pods) or defaults, if flags do not."""
    if args.rank is None:
        args.rank = (_from_environment("LWS_WORKER_INDEX") or 0) * args.tensor_parallel_size
    if args.world_size is None:
        args.world_size = (_from_environment("LWS_GROUP_SIZE") or 1) * args.tensor_parallel_size


def _check_ranks(args: argparse.Namespace, security: SecurityConfig) -> None:
    """Raises ConfigError when the flags describe no valid rank of a group, or one whose connections would not be
    secure."""
    if args.rank >= args.world_size:
        raise ConfigError(f"rank is {args.rank}, must be below world_size, {args.world_size}", field="rank")
    if args.rank + args.tensor_parallel_size > args.world_size:
        raise ConfigError(
            f"tensor_parallel_size is {args.tensor_parallel_size}, must be at most {args.world_size - args.rank}: the "
            f"group has {args.world_size} ranks, and {args.rank} is the first of these",
            field="tensor_parallel_size",
        )
    if args.world_size == 1:
        return
    if args.group is None:
        message = f"group is not set, must be the same number for all {args.world_size} ranks"
        raise ConfigError(message, field="group")
    if not security.insecure and not is_loopback(_own_host(args)):
        raise ConfigError(
            f"advertise_address is {_own_host(args)!r}, must be on loopback for several ranks: what they send each "
            "other is never encrypted; give --rank-host=127.0.0.1 where they share a machine, or --insecure where the "
            "network itself is trusted",
            field="advertise_address",
        )


def _from_environment(name: str) -> int | None:
    """A number from a variable of Kubernetes' LeaderWorkerSet."""
    value = os.environ.get(name, "")
    return int(value) if value.isdigit() else None


def make_parser() -> argparse.ArgumentParser:
    """The flags of the worker."""
    parser = ServiceParser(prog="pagoda-worker", description="Model execution of Pagoda.")
    add_scheduler_address_flag(parser)
    add_listen_flags(parser, port=0)
    add_security_flags(parser)
    add_observability_flags(parser)
    add_child_flags(parser)
    group = parser.add_argument_group("worker")
    group.add_argument(
        "--advertise-address",
        metavar="HOST:PORT",
        help="address under which the scheduler reaches this worker (default: the listening address, and an abstract "
        "unix socket beside a scheduler on loopback)",
    )
    group.add_argument(
        "--group",
        type=int,
        default=_from_environment("LWS_GROUP_INDEX"),
        help="worker group: one copy of the model (default: LWS_GROUP_INDEX, else the scheduler chooses)",
    )
    group.add_argument(
        "--rank",
        type=int,
        help="rank within the group, the first with --tensor-parallel-size (default: by LWS_WORKER_INDEX, else 0)",
    )
    group.add_argument("--metrics-port", type=int, metavar="PORT", help="port of Prometheus metrics; 0 chooses one")
    group.add_argument(
        "--world-size",
        type=int,
        help="number of ranks that share one copy of the model (default: --tensor-parallel-size, times "
        "LWS_GROUP_SIZE if it is set)",
    )
    group.add_argument(
        "--tensor-parallel-size",
        type=int,
        default=1,
        metavar="N",
        help="number of ranks to start, each with one process, device and port (default: %(default)s)",
    )
    group.add_argument(
        "--rank-host",
        metavar="HOST",
        help="host at which the other ranks reach this one (default: loopback if --tensor-parallel-size covers all "
        "ranks, otherwise the host of --advertise-address)",
    )
    group.add_argument(
        "--device-index",
        type=int,
        metavar="INDEX",
        help="CUDA device; wraps around if there are fewer (default: the rank)",
    )
    group.add_argument(
        "--threads",
        type=int,
        metavar="N",
        help="threads of torch on a CPU, in every step (default: all physical cores, one for models below 50 M "
        "parameters, one less in steps of few tokens beside the other services)",
    )
    group.add_argument(
        "--drain-timeout",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="time for running sequences to finish after SIGTERM; others move to another group (default: %(default)g)",
    )
    return parser


async def _serve_ranks(args: argparse.Namespace, security: SecurityConfig, observability: ObservabilityConfig) -> int:
    from pagoda_common.rpc.service import stop_signals

    services = rank_services(args, security=security, observability=observability)
    with stop_signals() as stopped:
        beating = asyncio.create_task(beat())
        code = await run_ranks(services, stopped, with_names=observability.log_format == "text")
        beating.cancel()
        return code


def main() -> int:
    """Command line of the worker; the exit code."""
    parser = make_parser()
    args = parse_service_args(parser)
    if args.die_with_parent is not None:
        die_with_parent(args.die_with_parent)
    enable_marks(os.environ)
    is_child = args.die_with_parent is not None
    configure_logging("worker", os.environ.get("PAGODA_LOG_LEVEL", "info"), args.log_format, is_child=is_child)
    with config_errors(parser):
        run_plugins()
        for name, low in _BOUNDS:
            value = getattr(args, name)
            if value is not None and value < low:
                raise ConfigError(f"{name} is {value}, must be at least {low}", field=name)
        _count_ranks(args)
        security, observability = security_config_from_args(args), observability_config_from_args(args)
        security.server.check_listen(args.host)
        security.check_dial(args.scheduler, name="scheduler")
        _check_ranks(args, security)
        if args.tensor_parallel_size > 1:
            exit_code: int = uvloop.run(_serve_ranks(args, security, observability))
            return exit_code
        security = with_found_token(security, args.scheduler)
        set_wait_policy(os.environ)
        for reason in protect_caches(os.environ):
            logger.warning("%s", reason)
        keep_freed_memory()
        uvloop.run(serve(args, security, observability))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
