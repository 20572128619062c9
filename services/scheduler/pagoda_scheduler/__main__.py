"""``python -m pagoda_scheduler``: the engine's process."""

import argparse
import asyncio
import logging
import os
import time
from importlib.util import find_spec

import uvloop
from prometheus_client import CollectorRegistry, generate_latest

from pagoda.v1 import scheduler_pb2_grpc
from pagoda_common.config.engine_config import EngineConfig, SchedulerConfig
from pagoda_common.config.flags.flags import (
    add_child_flags,
    add_engine_flags,
    add_listen_flags,
    config_errors,
    engine_config_from_args,
)
from pagoda_common.config.flags.settings import ServiceParser, parse_service_args
from pagoda_common.config.security_config import UNGUARDED
from pagoda_common.metrics.engine_metrics import EngineCollector
from pagoda_common.metrics.server import process_registry, serve_metrics
from pagoda_common.metrics.tracing import make_tracer
from pagoda_common.process.children import die_with_parent
from pagoda_common.process.heartbeat import beat
from pagoda_common.process.idle_memory import exempt_what_exists, release_memory_when_idle
from pagoda_common.process.logging import configure_logging, log_life
from pagoda_common.process.plugins import run_plugins
from pagoda_common.process.startup_marks import enable_marks, mark
from pagoda_common.rpc.service import RpcServer, stop_signals
from pagoda_common.version import VERSION
from pagoda_scheduler.engine.engine import Engine
from pagoda_scheduler.groups.worker_groups import WorkerGroups
from pagoda_scheduler.observability.metrics import GroupCollector, HistogramTimeline, LoraCollector
from pagoda_scheduler.observability.trace_spans import SpanMaker
from pagoda_scheduler.observability.traces import Traces
from pagoda_scheduler.rpc.kv_events_zmq import start_kv_events
from pagoda_scheduler.rpc.scheduler_state import SchedulerState
from pagoda_scheduler.rpc.servicer import SchedulerServicer

logger = logging.getLogger("pagoda_scheduler")

SERVICE = "pagoda.v1.Scheduler"
VLLM_ENGINE = "vllm.grpc.engine.VllmEngine"
HEALTH_PERIOD_S = 0.2


async def serve(
    config: EngineConfig, *, host: str, port: int, drain_timeout_s: float, metrics_port: int | None = None
) -> None:
    """Serve until SIGTERM or SIGINT, then drain."""
    engine = Engine(config=config)
    tracer = make_tracer("pagoda-scheduler", config.observability)
    if tracer is not None:
        has_details = bool(config.observability.collect_detailed_traces)
        engine.traces = Traces(on_end=SpanMaker(tracer=tracer, has_details=has_details))
    epoch = time.time_ns()
    registry = CollectorRegistry()
    model_name = next(iter(config.model.served_model_name), config.model.model)
    timeline = HistogramTimeline(registry=registry, model_name=model_name)
    groups = WorkerGroups(config=config, engine=engine, session_epoch=epoch, timeline=timeline)
    registry.register(GroupCollector(groups=groups))
    if config.lora.enable_lora:
        registry.register(LoraCollector(groups=groups, max_loras=config.lora.max_loras))
    state = SchedulerState(session_epoch=epoch, engine=engine, groups=groups)
    events = start_kv_events(engine)
    has_vllm_engine = find_spec("smg_grpc_proto") is not None
    services = (SERVICE, VLLM_ENGINE) if has_vllm_engine else (SERVICE,)
    enable_channelz = config.observability.enable_channelz
    server = RpcServer(services=services, security=config.security.server, enable_channelz=enable_channelz)
    servicer = SchedulerServicer(
        engine=engine,
        groups=groups,
        state=state,
        version=VERSION,
        render_metrics=lambda: generate_latest(registry),
    )
    scheduler_pb2_grpc.add_SchedulerServicer_to_server(servicer, server.grpc_server)
    if has_vllm_engine:
        from pagoda_scheduler.vllm_engine.servicer import add_vllm_engine  # an extra

        add_vllm_engine(server.grpc_server, engine=engine, state=state)
    with stop_signals() as stopped:
        if metrics_port is not None:
            whole = process_registry(registry)  # frontends show `registry` with their own process metrics
            whole.register(EngineCollector(load=state.load, model_name=model_name))
            logger.info("metrics on http://%s:%d/metrics", host, serve_metrics(whole, host=host, port=metrics_port))
        bound = await server.start(host=host, port=port)
        log_life(logger, "scheduler listening on %s:%d", host, bound)
        if not config.security.is_guarded:
            log_life(logger, UNGUARDED)
        mark("listening")
        logger.info("the queue holds %s", _queue_bounds(config.scheduler))
        exempt_what_exists()
        beating = asyncio.create_task(beat())
        background = [
            asyncio.create_task(_follow_readiness(engine, server)),
            asyncio.create_task(
                release_memory_when_idle(
                    count=lambda: engine.num_submitted,
                    is_idle=lambda: not engine.requests,
                    compact=engine.compact,
                    forget=engine.forget_constraints,
                )
            ),
        ]
        await stopped.wait()
        for task in background:
            task.cancel()
        log_life(logger, "draining, up to %g s", drain_timeout_s)
        await server.set_serving(False)
        await engine.drain(drain_timeout_s)
        engine.hand_over()
        await groups.close()
        if events is not None:
            events.close()
        await server.stop(grace_s=0.5)
        if tracer is not None:
            await asyncio.to_thread(tracer.close)
        beating.cancel()


def _queue_bounds(config: SchedulerConfig) -> str:
    """The queue's bounds as text for the log."""
    bounds = ((config.max_num_queued_reqs, "sequences"), (config.max_num_queued_tokens, "prompt tokens"))
    text = " and ".join(f"at most {bound:,} {what}" if bound else f"any number of {what}" for bound, what in bounds)
    return f"{text}; one client may hold {config.max_queued_share:.0%} of both"


async def _follow_readiness(engine: Engine, server: RpcServer) -> None:
    """Keep grpc.health.v1 equal to the engine's readiness."""
    was_ready = False
    while True:
        if engine.is_ready != was_ready:
            was_ready = engine.is_ready
            await server.set_serving(was_ready)
        await asyncio.sleep(HEALTH_PERIOD_S)


def make_parser() -> argparse.ArgumentParser:
    """The flags of the scheduler."""
    parser = ServiceParser(prog="pagoda-scheduler", description="The engine of Pagoda.")
    add_listen_flags(parser, port=50052)
    parser.add_argument(
        "--drain-timeout", type=float, default=30.0, help="seconds for running requests to finish after SIGTERM"
    )
    parser.add_argument("--metrics-port", type=int, metavar="PORT", help="port of Prometheus metrics; 0 chooses one")
    add_child_flags(parser)
    add_engine_flags(parser)
    return parser


def main() -> None:
    """Command line of the scheduler."""
    parser = make_parser()
    args = parse_service_args(parser)
    if args.die_with_parent is not None:
        die_with_parent(args.die_with_parent)
    enable_marks(os.environ)
    mark("imports")
    is_child = args.die_with_parent is not None
    configure_logging("scheduler", os.environ.get("PAGODA_LOG_LEVEL", "info"), args.log_format, is_child=is_child)
    with config_errors(parser):
        run_plugins()
        config = engine_config_from_args(args)
        config.security.server.check_listen(args.host)
        timeout_s, metrics_port = args.drain_timeout, args.metrics_port
        uvloop.run(serve(config, host=args.host, port=args.port, drain_timeout_s=timeout_s, metrics_port=metrics_port))


if __name__ == "__main__":
    main()
