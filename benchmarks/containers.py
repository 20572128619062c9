"""The images and containers of compose.yaml: time to build, size, cold start, memory when idle.

    python benchmarks/containers.py --build --json benchmarks/results/containers.jsonl

A Docker engine must answer. Seconds of start are from the start of the container to what it is there for; of all, from
`docker compose up` to a balancer that is healthy, through the order of health.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # so that it also runs as a plain script

import datetime
import json
import statistics
import subprocess
import tempfile
import time
from typing import Any

from benchmarks.tools.figures import Report, parser
from tests.container.stack import ComposeStack

SERVICES = ("frontend", "scheduler", "worker", "balancer")
READY_LINES = {"frontend": "frontend: ready", "scheduler": "scheduler listening", "worker": "worker listening"}
"""What a service logs when it can do its part; the worker has no model before the scheduler asks it to load one."""
IDLE_S = 15.0
UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def docker(*words: str) -> str:
    """Output of ``docker …``."""
    return subprocess.run(["docker", *words], capture_output=True, text=True, check=True).stdout


def seconds(stamp: str) -> float:
    """Since the epoch, of the engine's ISO 8601 time with nanoseconds."""
    return datetime.datetime.fromisoformat(f"{stamp[:26]}+00:00").timestamp()


def first_line(container: str, text: str) -> float:
    """When the container logged `text` first."""
    log = subprocess.run(
        ["docker", "logs", "--timestamps", container], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=True
    ).stdout.decode()
    return seconds(next(line for line in log.splitlines() if text in line).split()[0])


def memory_mib(container: str) -> float:
    """Memory of the container's processes, without the page cache of files."""
    text = docker("stats", "--no-stream", "--format", "{{.MemUsage}}", container).split()[0]
    unit = next(name for name in UNITS if text.endswith(name))
    return float(text.removesuffix(unit)) * UNITS[unit] / UNITS["MiB"]


def measure_build(stack: ComposeStack, report: Report) -> None:
    """Each image from nothing but the base image and pip's cache."""
    for service in SERVICES:
        started = time.perf_counter()
        stack.run("build", "--no-cache", service, timeout_s=3600)
        report.add(f"build_s_{service}", time.perf_counter() - started, "s", n=1)


def measure_start(stack: ComposeStack) -> dict[str, float]:
    """Seconds and MiB of one `up` from nothing."""
    stack.remove()
    started = time.perf_counter()
    stack.up()
    figures = {"start_s_all": time.perf_counter() - started}
    containers = {service: stack.containers(service)[0] for service in SERVICES}
    known: dict[str, Any] = {service: stack.inspect(container) for service, container in containers.items()}
    for service, line in READY_LINES.items():
        begun = seconds(known[service]["State"]["StartedAt"])
        figures[f"start_s_{service}"] = first_line(containers[service], line) - begun
    loaded = first_line(containers["scheduler"], "group 0: serving")
    figures["start_s_worker_with_model"] = loaded - seconds(known["worker"]["State"]["StartedAt"])
    time.sleep(IDLE_S)
    return figures | {f"idle_mib_{service}": memory_mib(container) for service, container in containers.items()}


def main() -> None:
    """Command line."""
    flags = parser(__doc__ or "")
    flags.add_argument("--build", action="store_true", help="also measure builds without the cache of layers (minutes)")
    args = flags.parse_args()
    report = Report(args.json)
    with tempfile.TemporaryDirectory() as directory:
        stack = ComposeStack(directory=Path(directory))
        try:
            if args.build:
                measure_build(stack, report)
            stack.build()
            rounds = [measure_start(stack) for _ in range(args.rounds)]
            images = json.loads(docker("image", "inspect", *(f"pagoda-{service}" for service in SERVICES)))
            for service, image in zip(SERVICES, images, strict=True):
                report.add(f"size_mb_{service}", image["Size"] / 1e6, "MB", n=1)
            for name in rounds[0]:
                unit = "s" if "_s_" in name else "MiB"
                report.add(name, statistics.median(one[name] for one in rounds), unit, n=len(rounds))
        finally:
            stack.remove()


if __name__ == "__main__":
    main()
