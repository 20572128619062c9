"""The workers of one machine as processes to keep running: one for each copy of the model, standby included."""

import os
from dataclasses import replace

from pagoda.server.service_token import token_environment
from pagoda_common.config.engine_config import EngineConfig
from pagoda_common.config.flags.flags import observability_config_to_argv, security_config_to_argv
from pagoda_common.process.children import service_command
from pagoda_common.process.supervisor import Service


def with_standby(config: EngineConfig) -> EngineConfig:
    """`config` for a scheduler whose standby workers are to stand by."""
    if not config.parallel.standby_workers or config.scheduler.max_serving_groups is not None:
        return config
    scheduler = replace(config.scheduler, max_serving_groups=config.parallel.data_parallel_size)
    return replace(config, scheduler=scheduler)


def worker_services(
    config: EngineConfig,
    *,
    scheduler: str,
    host: str,
    drain_timeout_s: float,
    stop_timeout_s: float,
    metrics_port: int | None = None,
) -> tuple[Service, ...]:
    """One service a worker: worker, or worker-0, worker-1, ... when there are several copies of the model; -rank-0,
    -rank-1, ... after that when a copy has several ranks.

    A single worker gets no group number: the scheduler gives each a free number, and a restarted one takes the place
    left. Ranks are: they must find each other again. Several workers share the cores of a CPU, unless `config` says how
    many threads each has, and take one accelerator each.

    Args:
        scheduler: its host:port.
        host: interface that the workers listen on, each on a free port.
        drain_timeout_s: what runs on a worker gets so long to finish after SIGTERM.
        metrics_port: where the first serves its metrics; the others count on from there. None is nowhere, 0 any port.
    """
    parallel = config.parallel
    num_groups, num_ranks = parallel.data_parallel_size + parallel.standby_workers, parallel.tensor_parallel_size
    size, threads = num_groups * num_ranks, parallel.threads
    if threads is None and size > 1:
        threads = max(1, len(os.sched_getaffinity(0)) // size)
    argv = [f"--scheduler={scheduler}", f"--host={host}", "--port=0", f"--drain-timeout={drain_timeout_s}"]
    argv += security_config_to_argv(config.security)
    argv += observability_config_to_argv(config.observability)
    if threads is not None:
        argv.append(f"--threads={threads}")
    command = tuple(service_command("pagoda_worker", argv))
    services = []
    for number in range(size):
        group, rank = divmod(number, num_ranks)
        name, own = "worker" if num_groups == 1 else f"worker-{group}", []
        if num_ranks > 1:
            name += f"-rank-{rank}"
            own += [f"--group={group}", f"--rank={rank}", f"--world-size={num_ranks}"]
        if size > 1:
            own.append(f"--device-index={number}")
        if metrics_port is not None:
            own.append(f"--metrics-port={metrics_port and metrics_port + number}")
        service = Service(
            name=name,
            command=(*command, *own),
            stop_timeout_s=stop_timeout_s,
            environment=token_environment(config.security),
        )
        services.append(service)
    return tuple(services)
