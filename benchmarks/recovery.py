"""The pause of streams when the scheduler is killed and started again at once, and where its time goes.

    python benchmarks/recovery.py --json benchmarks/results/recovery.jsonl

A real scheduler and worker with the embedded model, two frontends and 16 streams, all processes of this machine. Each
round kills the scheduler and starts another in the same moment: what Kubernetes or Docker adds until the process of a
new container runs is not in the figures.

Phases, in seconds after the kill: the new process has imported its modules, listens, has the worker's registration,
serves (the worker has answered the calls of its bring-up), has each frontend's session; then each stream has its next
token. The pause of a stream is the time between its last token before and its first one after, as its client sees it.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # so that it also runs as a plain script

import asyncio
import re
import subprocess
import tempfile
import time
from argparse import Namespace
from contextlib import ExitStack

import aiohttp
import numpy as np
import uvloop

from benchmarks.starvation import wait_ready
from benchmarks.tools.figures import Report, median, parser
from pagoda_common.process.children import free_port, service_environment, spawn_service, stop_process
from pagoda_common.process.startup_marks import VARIABLE, parse_mark

READY_TIMEOUT_S = 120.0
ON_THEIR_WAY_S = 0.1
"""Tokens that come so soon after the kill had left the scheduler before it."""
SETTLE_S = 1.5
"""Between two kills: sessions that lived a second forget their back-off."""
LINES = {
    "registered": re.compile(r"has registered"),
    "serving": re.compile(r"group 0: serving"),
    "sessions": re.compile(r"frontend .* is connected"),
}
"""What the scheduler logs at the end of a phase."""
STAMP = re.compile(r"^\w+ (\d\d:\d\d:\d\d\.\d{3}) ")


class Scheduler:
    """A scheduler process and its log."""

    def __init__(self, port: int, directory: Path, number: int) -> None:
        self._log = directory / f"scheduler-{number}.log"
        self.started_s = time.time()
        command = [sys.executable, "-m", "pagoda_scheduler", "--host=127.0.0.1", f"--port={port}"]
        environment = {**service_environment(command), VARIABLE: "1"}
        with self._log.open("wb") as log:  # not a child of `pagoda serve`, which would log less
            self.process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    def kill(self) -> float:
        """SIGKILL; when, in seconds since the epoch."""
        killed_s = time.time()
        self.process.kill()
        self.process.wait()
        return killed_s

    def phases(self, num_frontends: int) -> dict[str, float]:
        """When each phase ended, in seconds since the epoch."""
        ends: dict[str, float] = {}
        num_sessions = 0
        for line in self._log.read_text().splitlines():
            if (found := parse_mark(line)) is not None:
                ends[found[1]] = found[0]
            for name, pattern in LINES.items():
                if pattern.search(line) and (stamp := STAMP.match(line)):
                    num_sessions += name == "sessions"
                    if name != "sessions" or num_sessions == num_frontends:
                        ends.setdefault(name, _epoch_s(stamp[1], near_s=self.started_s))
        return ends


def _epoch_s(of_day: str, *, near_s: float) -> float:
    """Seconds since the epoch of a local time of the day, the one next to `near_s`."""
    hours, minutes, seconds = of_day.split(":")
    day = time.localtime(near_s)
    midnight_s = time.mktime((day.tm_year, day.tm_mon, day.tm_mday, 0, 0, 0, 0, 0, -1))
    moment_s = midnight_s + 3600 * int(hours) + 60 * int(minutes) + float(seconds)
    return moment_s + 86_400 * round((near_s - moment_s) / 86_400)


async def stream(http: aiohttp.ClientSession, url: str, number: int, arrivals: list[float]) -> None:
    """Read one long stream, and note when its tokens come; until cancelled or over, when the next one begins."""
    body = {"prompt": [100 + number] * 16, "max_tokens": 400, "temperature": 0, "ignore_eos": True, "stream": True}
    while True:
        async with http.post(f"{url}/v1/completions", json=body) as response:
            response.raise_for_status()
            async for line in response.content:
                if line.startswith(b"data: {"):
                    if b'"error"' in line:
                        raise RuntimeError(f"a stream failed: {line!r}")
                    arrivals.append(time.time())


async def have_tokens(arrivals: list[list[float]], *, after_s: float) -> None:
    """Return when each stream has had a token after that moment."""
    async with asyncio.timeout(READY_TIMEOUT_S):
        while not all(times and times[-1] > after_s for times in arrivals):  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def measure(args: Namespace, directory: Path) -> list[dict[str, float]]:
    """Phases and pauses of each round, in seconds."""
    port = free_port()
    quiet = {"PAGODA_LOG_LEVEL": "error"}
    rounds: list[dict[str, float]] = []
    with ExitStack() as stack:

        def start(module: str, *flags: str) -> None:
            process = spawn_service(module, flags, env=quiet, stdout=subprocess.DEVNULL)
            stack.callback(stop_process, process, timeout_s=5)

        scheduler = Scheduler(port, directory, 0)
        stack.callback(lambda: stop_process(scheduler.process, timeout_s=5))
        start("pagoda_worker", f"--scheduler=127.0.0.1:{port}", "--host=127.0.0.1")
        ports = [free_port() for _ in range(args.frontends)]
        for one in ports:
            start("pagoda_frontend", f"--scheduler=127.0.0.1:{port}", f"--port={one}", "--grpc-port=0")
        urls = [f"http://127.0.0.1:{one}" for one in ports]
        arrivals: list[list[float]] = [[] for _ in range(args.streams)]
        async with (
            aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
            ) as http,
            asyncio.TaskGroup() as tasks,
        ):
            for url in urls:
                await wait_ready(http, url)
            readers = [
                tasks.create_task(stream(http, urls[number % len(urls)], number, times))
                for number, times in enumerate(arrivals)
            ]
            for number in range(1, args.rounds + 2):
                await have_tokens(arrivals, after_s=time.time())
                await asyncio.sleep(SETTLE_S)
                killed_s = scheduler.kill()
                scheduler = Scheduler(port, directory, number)
                await have_tokens(arrivals, after_s=killed_s + ON_THEIR_WAY_S)
                before = [max(t for t in times if t <= killed_s + ON_THEIR_WAY_S) for times in arrivals]
                after = [min(t for t in times if t > killed_s + ON_THEIR_WAY_S) for times in arrivals]
                phases = {name: end - killed_s for name, end in scheduler.phases(args.frontends).items()}
                phases["first token"] = min(after) - killed_s
                phases["all streams"] = max(after) - killed_s
                gaps = [end - begin for begin, end in zip(before, after, strict=True)]
                phases["pause p50"], phases["pause max"] = float(np.median(gaps)), max(gaps)
                rounds.append(phases)
            for reader in readers:
                reader.cancel()
    return rounds[1:]  # the first pays for files that are not in memory yet


async def main() -> None:
    """Command line."""
    flags = parser(__doc__.splitlines()[0])
    flags.add_argument("--streams", type=int, default=16)
    flags.add_argument("--frontends", type=int, default=2)
    flags.set_defaults(rounds=7)
    args = flags.parse_args()
    report = Report(args.json)
    with tempfile.TemporaryDirectory() as directory:
        rounds = await measure(args, Path(directory))
    for name in rounds[0]:
        values = [one[name] for one in rounds if name in one]
        report.add(f"scheduler killed: {name}", median(values), "s", n=len(values))
    report.add("scheduler killed: longest pause", max(one["pause max"] for one in rounds), "s", n=len(rounds))


if __name__ == "__main__":
    uvloop.run(main())
