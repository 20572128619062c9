"""Gaps between the tokens of streams on a machine whose cores are overloaded, and where tokens wait.

    python benchmarks/starvation.py --json benchmarks/results/starvation.jsonl

A scheduler, two workers with the embedded model, two frontends and 16 streams, beside `--busy` processes that only
compute. Each token has a timestamp where the scheduler queues it, where the frontend takes it, where the frontend
gives it to its HTTP server, and where its client reads it (benchmarks/tools/traced_service.py). For comparison, one
more process sleeps 10 ms at a time beside the same load and notes how late it wakes up: nothing that a service does
can be quicker than that, and a token passes four processes."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # so that it also runs as a plain script

import asyncio
import json
import subprocess
import tempfile
import time
from argparse import Namespace
from collections import Counter, defaultdict
from collections.abc import Iterable
from contextlib import ExitStack
from itertools import pairwise
from typing import NamedTuple

import aiohttp
import numpy as np
import uvloop

from benchmarks.tools.figures import Report, parser
from benchmarks.tools.traced_service import VARIABLE
from pagoda_common.process.children import free_port, spawn_service, stop_process

READY_TIMEOUT_S = 240.0
STALL_S = 1.0
PLACES = ("pushed", "received", "sent", "got")
FAULTS = (
    "will be recomputed",
    "reads its stream too slowly",
    "lost the scheduler",
    "run alone",
    "replaces an older",
    "trying again",
)
"""What services log when they take starvation for a failure."""
BUSY = "while True: pass"
SLEEPER = """
import json, signal, sys, time
late = []
signal.signal(signal.SIGTERM, lambda *_: (print(json.dumps(late)), sys.exit()))
while True:
    begun = time.monotonic()
    time.sleep(0.01)
    late.append(time.monotonic() - begun - 0.01)
"""
DURATIONS = ("lag", "wire", "queue", "compute")
Durations = dict[str, list[tuple[float, int]]]
"""Lags of event loops and parts of steps, in seconds, with the number of sequences that ran."""
Stamps = dict[str, dict[str, dict[int, float]]]
"""By place, request and token: seconds since the epoch."""


class Measured(NamedTuple):
    """One round."""

    stamps: Stamps
    durations: Durations
    late: list[float]
    """How late the process woke up that is there for comparison, seconds."""
    faults: Counter[str]


class Stack:
    """The services, with a log and a trace each, and what computes beside them."""

    def __init__(self, directory: Path, *, num_workers: int, num_frontends: int) -> None:
        self._directory = directory
        self._after = ExitStack()
        port = free_port()
        address = f"--scheduler=127.0.0.1:{port}"
        self._start("pagoda_scheduler", f"--port={port}", is_traced=True)
        for _ in range(num_workers):
            self._start("pagoda_worker", address)
        ports = [free_port() for _ in range(num_frontends)]
        for one in ports:
            flags = [f"--port={one}", "--grpc-port=0", "--disable-uvicorn-access-log"]
            self._start("pagoda_frontend", address, *flags, is_traced=True)
        self.urls = [f"http://127.0.0.1:{one}" for one in ports]

    def _start(self, module: str, *flags: str, is_traced: bool = False) -> None:
        number = len(list(self._directory.iterdir()))
        environment = {"PAGODA_LOG_LEVEL": "info", VARIABLE: str(self._directory / f"{number}.trace")}
        argv = ["benchmarks.tools.traced_service", module] if is_traced else [module]
        with (self._directory / f"{number}.log").open("wb") as log:
            process = spawn_service(argv[0], [*argv[1:], *flags], env=environment, stdout=log.fileno())
        (self._directory / f"{number}.trace").touch()
        self._after.callback(stop_process, process, timeout_s=60)

    def close(self) -> None:
        """End the services."""
        self._after.close()

    @property
    def faults(self) -> Counter[str]:
        """Lines in the logs that tell of faults."""
        lines = [line for path in self._directory.glob("*.log") for line in path.read_text().splitlines()]
        return Counter(fault for line in lines for fault in FAULTS if fault in line)

    def stamps(self) -> tuple[Stamps, Durations]:
        """What the traces say."""
        stamps: Stamps = {place: defaultdict(dict) for place in PLACES}
        durations: Durations = {place: [] for place in DURATIONS}
        for path in self._directory.glob("*.trace"):
            for line in path.read_text().splitlines():
                place, moment, name, token = json.loads(line)
                if place in DURATIONS:
                    durations[place].append((name, token))
                else:
                    stamps[place][name].setdefault(token, moment)
        return stamps, durations


async def stream(http: aiohttp.ClientSession, url: str, number: int, args: Namespace, got: Stamps) -> None:
    """Read one stream after the other until the time is over, and note when tokens come."""
    end_s = time.monotonic() + args.seconds
    turn = 0
    while time.monotonic() < end_s:
        body = {
            "prompt": [100 + number + turn] * 16,
            "max_tokens": args.tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        headers = {"X-Request-Id": f"stream-{number}-{turn}"}
        turn += 1
        async with http.post(f"{url}/v1/completions", json=body, headers=headers) as response:
            response.raise_for_status()
            async for line in response.content:
                if line.startswith(b"id: "):
                    name, _, count = line[4:].decode().strip().rstrip("f").rpartition(":")
                    got["got"][name].setdefault(int(count) - 1, time.time())


async def wait_ready(http: aiohttp.ClientSession, url: str) -> None:
    """Until a frontend is."""
    async with asyncio.timeout(READY_TIMEOUT_S):
        while True:
            try:
                async with http.get(f"{url}/ready") as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientConnectionError:
                pass
            await asyncio.sleep(0.1)


def run_beside(code: str) -> subprocess.Popen[str]:
    """A Python process in a session of its own, as the services are: Linux divides time among sessions first."""
    return subprocess.Popen([sys.executable, "-c", code], text=True, stdout=subprocess.PIPE, start_new_session=True)


async def measure(args: Namespace, directory: Path, num_busy: int) -> Measured:
    """One round beside so many processes that only compute."""
    stack = Stack(directory, num_workers=args.workers, num_frontends=args.frontends)
    got: Stamps = {"got": defaultdict(dict)}
    beside: list[subprocess.Popen[str]] = []
    try:
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as http:
            for url in stack.urls:
                await wait_ready(http, url)
            beside = [run_beside(BUSY) for _ in range(num_busy)]
            sleeper = run_beside(SLEEPER)
            beside.append(sleeper)
            async with asyncio.TaskGroup() as tasks:
                for number in range(args.streams):
                    tasks.create_task(stream(http, stack.urls[number % len(stack.urls)], number, args, got))
            sleeper.terminate()
            late, _ = sleeper.communicate()
    finally:
        for process in beside:
            process.kill()
            process.wait()
        stack.close()
    stamps, durations = stack.stamps()
    return Measured(stamps | got, durations, json.loads(late), stack.faults)


def report_spread(report: Report, name: str, values: Iterable[float]) -> None:
    """Median, 99 % and the largest."""
    found = list(values)
    for what, value in zip(("p50", "p99", "max"), np.percentile(found, [50, 99, 100]).tolist(), strict=True):
        report.add(f"{name} {what}", value, "s", n=len(found))


def report_round(report: Report, name: str, measured: Measured) -> None:
    """Gaps at the client and in the engine, the time between places, and the part of each stall that is largest."""
    stamps, durations, late, faults = measured
    gaps: dict[str, list[float]] = {"pushed": [], "got": []}
    ways: dict[str, list[float]] = {f"{begin} to {end}": [] for begin, end in pairwise(PLACES)}
    worst: Counter[str] = Counter()
    for request, times in stamps["got"].items():
        # A client gets tokens together that were there together: the last of an event has the event's number.
        for earlier, later in pairwise(sorted(times)):
            at = {place: stamps[place].get(request, {}) for place in PLACES}
            if any(token not in at[place] for place in PLACES for token in (earlier, later)):
                continue
            gap = times[later] - times[earlier]
            gaps["got"].append(gap)
            # The first token after the pause is the one that was missing.
            parts = {
                "engine": at["pushed"][earlier + 1] - at["pushed"][earlier] if earlier + 1 in at["pushed"] else 0.0
            }
            for begin, end in pairwise(PLACES):
                took = at[end][later] - at[begin][later]
                ways[f"{begin} to {end}"].append(took)
                parts[f"{begin} to {end}"] = took
            if gap > STALL_S:
                worst[max(parts, key=lambda part: parts[part])] += 1
    for times in stamps["pushed"].values():
        gaps["pushed"] += [times[later] - times[earlier] for earlier, later in pairwise(sorted(times))]
    report_spread(report, f"{name}: gap at the client", gaps["got"])
    report_spread(report, f"{name}: gap in the engine", gaps["pushed"])
    for way, values in ways.items():
        report_spread(report, f"{name}: {way}", values)
    report_spread(report, f"{name}: wake-up of another process", late)
    for part in ("wire", "queue", "compute"):
        report_spread(report, f"{name}: steps, {part}", [seconds for seconds, _ in durations[part]])
    lags = [seconds for seconds, _ in durations["lag"]]
    report.add(f"{name}: event loops, longest lag", max(lags, default=0.0), "s", n=len(lags))
    slow = [num for seconds, num in durations["compute"] if seconds > STALL_S]
    report.add(f"{name}: steps above {STALL_S:g} s", len(slow), "", n=len(durations["compute"]))
    report.add(f"{name}: gaps above {STALL_S:g} s", sum(worst.values()), "", n=len(gaps["got"]))
    for part, count in sorted(worst.items()):
        report.add(f"{name}: of these mostly {part}", count, "", n=len(gaps["got"]))
    for fault, count in sorted(faults.items()):
        report.add(f"{name}: log: {fault}", count, "lines", n=1)


async def main() -> None:
    """Command line."""
    flags = parser(__doc__.splitlines()[0])
    flags.add_argument("--streams", type=int, default=16)
    flags.add_argument("--workers", type=int, default=2)
    flags.add_argument("--frontends", type=int, default=2)
    flags.add_argument("--busy", type=int, nargs="+", default=[0, 8], metavar="N", help="processes that only compute")
    flags.add_argument("--seconds", type=float, default=30.0, help="streams begin for so long")
    flags.add_argument("--tokens", type=int, default=200, help="of each stream")
    args = flags.parse_args()
    report = Report(args.json)
    for num_busy in args.busy:
        with tempfile.TemporaryDirectory() as directory:
            report_round(report, f"{num_busy} busy", await measure(args, Path(directory), num_busy))


if __name__ == "__main__":
    uvloop.run(main())
