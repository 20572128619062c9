"""The workers of one machine as processes to keep running: one for each copy of the model, standby included."""

import os
from dataclasses import replace

from pagoda.supervisor import Service
from pagoda_common.config import EngineConfig
from pagoda_common.flags import observability_config_to_argv, security_config_to_argv
from pagoda_common.process import service_command


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
    """One service a worker, named worker, or worker-0, worker-1, ... when there are several.

    No worker is told its group: the scheduler gives each a free number, and a restarted one takes the place left.
    Several share the cores of a CPU, unless `config` says how many threads each has.

    Args:
        scheduler: its host:port.
        host: interface that the workers listen on, each on a free port.
        drain_timeout_s: what runs on a worker gets so long to finish after SIGTERM.
        metrics_port: where the first serves its metrics; the others count on from there. None is nowhere, 0 any port.
    """
    parallel = config.parallel
    size, threads = parallel.data_parallel_size + parallel.standby_workers, parallel.threads
    if threads is None and size > 1:
        threads = max(1, len(os.sched_getaffinity(0)) // size)
    argv = [f"--scheduler={scheduler}", f"--host={host}", "--port=0", f"--drain-timeout={drain_timeout_s}"]
    argv += security_config_to_argv(config.security)
    argv += observability_config_to_argv(config.observability)
    if threads is not None:
        argv.append(f"--threads={threads}")
    command = tuple(service_command("pagoda_worker", argv))
    names = ["worker"] if size == 1 else [f"worker-{number}" for number in range(size)]
    services = []
    for number, name in enumerate(names):
        port = () if metrics_port is None else (f"--metrics-port={metrics_port and metrics_port + number}",)
        services.append(Service(name=name, command=(*command, *port), stop_timeout_s=stop_timeout_s))
    return tuple(services)
