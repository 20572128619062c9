"""Mixed load for an hour while processes are killed: no client sees more than a pause, and no process grows.

python -m tests.process.chaos.soak --minutes 60 --seed 1 --json soak.json --plot soak.png

Clients draw one request after the other from a set whose answers are known from an undisturbed run, and compare. Every
`--period` seconds a worker or the scheduler is killed or stopped, or connections are reset. The resident memory of each
process is read every two seconds; of a process that is killed now and then, what counts is its size when it has lived
for `--settled` seconds. The frontend is never killed.
"""

import argparse
import asyncio
import importlib.util
import json
import logging
import random
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from tests.process.chaos.chaos import FAULTS, Fault
from tests.process.chaos.clients import LINE_BYTES, Progress, stream, stream_all
from tests.process.chaos.requests import ChaosRequest, make_requests
from tests.process.chaos.stack import ChaosStack
from tests.process.transcript import Transcript, differences

NUM_REQUESTS = 64
SAMPLE_PERIOD_S = 2.0
MAX_PAUSE_S = 2.0
"""Clients think for up to so long between two requests."""
WARM_UP_SHARE = 0.15
"""Of the time; what is in memory then is what later sizes are held against."""
MAX_GROWTH = 0.05


@dataclass
class Sizes:
    """Resident memory of the processes of one service over time."""

    times_s: list[float] = field(default_factory=list)
    megabytes: list[float] = field(default_factory=list)
    ages_s: list[float] = field(default_factory=list)
    """Age of the process that was measured."""

    def growth(self, duration_s: float, *, settled_s: float) -> float:
        """Median of the last third over the median of the first third after the warm-up, less 1; of grown-up
        processes only. 0 when there is too little to tell."""
        start = WARM_UP_SHARE * duration_s
        third = (duration_s - start) / 3
        rows = [row for row in zip(self.times_s, self.megabytes, self.ages_s, strict=True) if row[2] >= settled_s]
        first = [size for at, size, _ in rows if start <= at < start + third]
        last = [size for at, size, _ in rows if at >= duration_s - third]
        return statistics.median(last) / statistics.median(first) - 1 if first and last else 0.0


class Soak:
    """A stack under load and faults, and what was seen of it."""

    def __init__(self, *, stack: ChaosStack, requests: Sequence[ChaosRequest], seed: int) -> None:
        self.sizes: dict[str, Sizes] = {}
        self.faults: list[tuple[float, str]] = []
        self.violations: list[str] = []
        self.num_answers = 0
        self.num_tokens = 0
        self._stack = stack
        self._requests = requests
        self._draw = random.Random(seed)
        self._expected: list[Transcript] = []
        self._started_at = 0.0
        self._is_over = False

    async def learn(self) -> None:
        """Run every request undisturbed."""
        self._expected = await stream_all(self._stack.url, self._requests, Progress(), draw=self._draw, concurrency=4)
        for request, transcript in zip(self._requests, self._expected, strict=True):
            self.violations += [f"undisturbed: {request}: {fault}" for fault in transcript.own_faults()]

    async def run(self, *, duration_s: float, period_s: float, num_clients: int, faults: Sequence[str]) -> None:
        """Load, faults and measurements until the time is over, then until all is settled."""
        self._started_at = time.monotonic()
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        timeout = aiohttp.ClientTimeout(total=None)
        async with (
            aiohttp.ClientSession(
                self._stack.url, connector=connector, timeout=timeout, read_bufsize=LINE_BYTES
            ) as http,
            asyncio.TaskGroup() as group,
        ):
            clients = [group.create_task(self._client(http)) for _ in range(num_clients)]
            background = [group.create_task(self._measure()), group.create_task(self._break(faults, period_s))]
            while time.monotonic() < self._started_at + duration_s and not self.violations:  # noqa: ASYNC110
                await asyncio.sleep(1)
            self._is_over = True
            await asyncio.gather(*clients)
            for task in background:
                task.cancel()
        await self._stack.settle({})
        if self._stack.num_tracebacks:
            self.violations.append("a traceback in the log")

    async def _client(self, http: aiohttp.ClientSession) -> None:
        while not self._is_over:
            number = self._draw.randrange(len(self._requests))
            transcript = await stream(http, self._requests[number], Progress())
            wrong = transcript.own_faults() or differences(self._expected[number], transcript)
            if wrong:
                self.violations.append("\n  ".join([str(self._requests[number]), *wrong]))
            self.num_answers += 1
            self.num_tokens += transcript.num_tokens
            await asyncio.sleep(self._draw.uniform(0, MAX_PAUSE_S))

    async def _break(self, faults: Sequence[str], period_s: float) -> None:
        while True:
            await asyncio.sleep(period_s)
            name = self._draw.choice(faults)
            if await self._break_once(FAULTS[name]):
                self.faults.append((time.monotonic() - self._started_at, name))
                print(f"{self.faults[-1][0]:7.0f} s  {name:<18} {self.num_answers} answers", flush=True)

    async def _break_once(self, fault: Fault) -> bool:
        """Do it, unless a victim of the last fault is not back yet."""
        stack = self._stack
        victims = [self._draw.choice(stack.workers) if name == "worker" else name for name in fault.victims]
        if any(stack.pid(name) is None for name in victims):
            return False
        for name in victims:
            assert fault.signal is not None
            stack.send_signal(name, fault.signal)
        for link in fault.links:
            stack.drop(link)
        return True

    async def _measure(self) -> None:
        while True:
            for name in ("frontend", "scheduler", *self._stack.workers):
                pid = self._stack.pid(name)
                if pid is None:
                    continue
                try:
                    process = psutil.Process(pid)
                    size, age = process.memory_info().rss / 1e6, time.time() - process.create_time()
                except psutil.NoSuchProcess:
                    continue
                sizes = self.sizes.setdefault(name, Sizes())
                sizes.times_s.append(round(time.monotonic() - self._started_at, 1))
                sizes.megabytes.append(round(size, 2))
                sizes.ages_s.append(round(age, 1))
            await asyncio.sleep(SAMPLE_PERIOD_S)


def plot(soak: Soak, path: str) -> None:
    """Memory over time, a panel a service, with the faults as lines; needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(soak.sizes), 1, sharex=True, figsize=(10, 2.4 * len(soak.sizes)), squeeze=False)
    for axis, (name, sizes) in zip(axes[:, 0], soak.sizes.items(), strict=True):
        for at, _ in soak.faults:
            axis.axvline(at / 60, color="0.9", linewidth=0.6, zorder=0)
        axis.plot([at / 60 for at in sizes.times_s], sizes.megabytes, ".", markersize=2)
        axis.set_ylabel(f"{name}\nRSS, MB")
        axis.set_ylim(bottom=0)
    axes[-1, 0].set_xlabel("minutes (grey: a fault)")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


async def run(args: argparse.Namespace) -> tuple[Soak, float]:
    """The whole soak, and how long it took, seconds."""
    stack = ChaosStack(num_workers=args.workers, scheduler_flags=args.flags)
    soak = Soak(stack=stack, requests=make_requests(NUM_REQUESTS, seed=args.seed), seed=args.seed)
    async with stack.run():
        await soak.learn()
        started_at = time.monotonic()
        await soak.run(duration_s=60 * args.minutes, period_s=args.period, num_clients=args.clients, faults=args.faults)
        duration_s = time.monotonic() - started_at
    if soak.violations:
        print(f"\n{stack.log}\n")
    return soak, duration_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--period", type=float, default=20, help="seconds between two faults")
    parser.add_argument("--settled", type=float, default=15, help="age in seconds from which a size counts")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--faults", nargs="+", choices=list(FAULTS), default=list(FAULTS), metavar="FAULT")
    parser.add_argument("--json", metavar="PATH", help="write all measurements there")
    parser.add_argument("--plot", metavar="PATH", help="draw them there")
    parser.add_argument("flags", nargs="*", help="flags of the scheduler, after --")
    args = parser.parse_args()
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib")  # now, not after the hour
    logging.getLogger("pagoda").setLevel(logging.CRITICAL)  # the supervisor reports what was done on purpose
    soak, duration_s = asyncio.run(run(args))
    growth = {name: sizes.growth(duration_s, settled_s=args.settled) for name, sizes in soak.sizes.items()}
    result: dict[str, Any] = {
        **vars(args),
        "duration_s": round(duration_s),
        "num_answers": soak.num_answers,
        "num_tokens": soak.num_tokens,
        "num_faults": dict(Counter(name for _, name in soak.faults)),
        "growth": {name: round(value, 4) for name, value in growth.items()},
        "violations": soak.violations,
    }
    print(json.dumps(result, indent=1))
    if args.json:
        sizes = {name: vars(sizes) for name, sizes in soak.sizes.items()}
        Path(args.json).write_text(json.dumps({**result, "faults": soak.faults, "sizes": sizes}) + "\n")
    if args.plot:
        plot(soak, args.plot)
    too_big = [name for name, value in growth.items() if value > MAX_GROWTH]
    if soak.violations or too_big:
        raise SystemExit(f"\nVIOLATION: {soak.violations or ''} {f'growth of {too_big}' if too_big else ''}")


if __name__ == "__main__":
    main()
