"""Break a running stack again and again under streaming clients, who must notice nothing but a pause.

python -m tests.process.chaos --rounds 100 --seed 1

Every request runs first undisturbed. Then, in each round, all clients stream at once, and when a drawn share of their
tokens is out, a process is killed or stopped, or connections are reset. After it no client has seen an error, every
answer is what it was undisturbed, the frontend is the same process, the engine holds nothing, and no log has a
traceback. The first violation ends the run with code 1.
"""

import argparse
import asyncio
import json
import logging
import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from signal import SIGKILL, SIGSTOP, Signals

from pagoda_common.config.checkpoint.model_files import EMBEDDED_MODEL, resolve_model
from tests.process.chaos.clients import Progress, stream_all
from tests.process.chaos.requests import MODEL, ChaosRequest, make_requests
from tests.process.chaos.stack import ChaosStack
from tests.process.transcript import Transcript, differences

REFERENCE_CONCURRENCY = 4
SHARES = (0.05, 0.85)
"""A fault hits when a share of the tokens between these two is out."""


class ViolationError(Exception):
    """A client has seen more than a pause, or something is left behind."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What is broken, all of it at one moment."""

    signal: Signals | None = None
    victims: tuple[str, ...] = ()
    """worker (one of them) or scheduler: they get the signal."""
    links: tuple[str, ...] = ()
    """Their connections are reset."""


FAULTS = {
    "kill-worker": Fault(SIGKILL, ("worker",)),
    "kill-scheduler": Fault(SIGKILL, ("scheduler",)),
    "kill-both": Fault(SIGKILL, ("worker", "scheduler")),
    "stop-worker": Fault(SIGSTOP, ("worker",)),
    "stop-scheduler": Fault(SIGSTOP, ("scheduler",)),
    "stop-both": Fault(SIGSTOP, ("worker", "scheduler")),
    "drop-session": Fault(links=("session",)),
    "drop-registration": Fault(links=("registration",)),
    "drop-execute": Fault(links=("execute",)),
    "drop-all": Fault(links=("session", "registration", "execute")),
}


@dataclass(frozen=True, slots=True)
class Round:
    """What one round has measured."""

    fault: str
    share: float
    """Share of the tokens that were out when it hit."""
    num_streams: int
    """Streams that were open then."""
    stalls_s: list[float]
    """Of each of these: the longest time without a chunk that ended after the fault."""
    recovery_s: float
    """From the fault until the last of them went on."""
    duration_s: float


class Chaos:
    """A stack under chaos, and what its clients are to get."""

    def __init__(self, *, stack: ChaosStack, requests: Sequence[ChaosRequest], seed: int) -> None:
        self._stack = stack
        self._requests = requests
        self._draw = random.Random(seed)
        self._expected: list[Transcript] = []
        self._num_tokens = 0

    async def learn(self) -> None:
        """Run every request undisturbed, few at a time.

        Raises:
            ViolationError: one of them fails even so.
        """
        progress = Progress()
        self._expected = await stream_all(
            self._stack.url, self._requests, progress, draw=self._draw, concurrency=REFERENCE_CONCURRENCY
        )
        self._num_tokens = progress.num_tokens
        self._check(self._expected)

    async def break_once(self, name: str) -> Round:
        """One round with the fault `name`, or without any if it is "none".

        Raises:
            ViolationError: what must hold does not.
        """
        stack, started, progress = self._stack, time.monotonic(), Progress()
        share = self._draw.uniform(*SHARES)
        frontend = stack.pid("frontend")
        clients = asyncio.create_task(stream_all(stack.url, self._requests, progress, draw=self._draw))
        await progress.reach(int(share * self._num_tokens))
        fault_at = time.monotonic()
        replaced = self._break(FAULTS[name]) if name != "none" else {}
        got = await clients
        finished_at = time.monotonic()
        self._check(got)
        try:
            await stack.settle(replaced)
        except AssertionError as error:
            raise ViolationError(str(error)) from error
        if stack.pid("frontend") != frontend:
            raise ViolationError("the frontend was replaced")
        if stack.num_tracebacks:
            raise ViolationError("a traceback in the log")
        gaps = [gap for transcript in got if (gap := longest_gap(transcript.times, fault_at))]
        return Round(
            fault=name,
            share=share,
            num_streams=len(gaps),
            stalls_s=[end - start for start, end in gaps],
            recovery_s=max((end - fault_at for _, end in gaps), default=0.0),
            duration_s=finished_at - started,
        )

    def _break(self, fault: Fault) -> dict[str, int | None]:
        """Do it; returns names and pids of what must be replaced."""
        victims = [self._draw.choice(self._stack.workers) if name == "worker" else name for name in fault.victims]
        pids = {name: self._stack.pid(name) for name in victims}
        if fault.signal is not None:
            for name in victims:
                self._stack.send_signal(name, fault.signal)
        for link in fault.links:
            if not self._stack.drop(link):
                raise ViolationError(f"the link {link} has no connection to drop")
        return pids

    def _check(self, got: Sequence[Transcript]) -> None:
        for number, (request, transcript) in enumerate(zip(self._requests, got, strict=True)):
            wrong = transcript.own_faults()
            if not wrong and self._expected:
                wrong = differences(self._expected[number], transcript)
            if wrong:
                raise ViolationError("\n  ".join([f"request {number}: {request}", *wrong]))


def longest_gap(times: Sequence[float], fault_at: float) -> tuple[float, float] | None:
    """Begin and end of the longest time without a chunk that ends after the fault; None if the stream had ended."""
    gaps = [(start, end) for start, end in pairwise(times) if end > fault_at]
    return max(gaps, key=lambda gap: gap[1] - gap[0], default=None) if times[0] < fault_at else None


def plan(names: Sequence[str], num_rounds: int, draw: random.Random) -> list[str]:
    """Faults in random order, each about equally often; the first round has none."""
    faults: list[str] = []
    while len(faults) < num_rounds:
        faults += draw.sample(names, len(names))
    return ["none", *faults[:num_rounds]]


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that `share` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def summarize(rounds: Sequence[Round]) -> dict[str, dict[str, float]]:
    """By kind of fault: rounds, seconds that clients waited, seconds until all went on."""
    table = {}
    for name in dict.fromkeys(round_.fault for round_ in rounds):
        ours = [round_ for round_ in rounds if round_.fault == name]
        stalls = [stall for round_ in ours for stall in round_.stalls_s]
        recoveries = [round_.recovery_s for round_ in ours]
        table[name] = {
            "rounds": len(ours),
            "streams": len(stalls),
            "stall_p50_s": quantile(stalls, 0.5),
            "stall_p99_s": quantile(stalls, 0.99),
            "recovery_p50_s": quantile(recoveries, 0.5),
            "recovery_max_s": max(recoveries),
        }
    return table


def print_table(table: dict[str, dict[str, float]]) -> None:
    print(f"\n{'fault':<18}  rounds  streams  stall p50   p99  recovery p50   max  (seconds)")
    for name, row in table.items():
        stalls, recoveries = (row["stall_p50_s"], row["stall_p99_s"]), (row["recovery_p50_s"], row["recovery_max_s"])
        print(f"{name:<18}  {row['rounds']:>6}  {row['streams']:>7}", end="")
        print(f"  {stalls[0]:>9.2f} {stalls[1]:>5.2f}  {recoveries[0]:>12.2f} {recoveries[1]:>5.2f}")


def make_adapters(directory: Path, count: int) -> dict[str, Path]:
    """Adapters of the model that is served, by name."""
    if not count:
        return {}
    from tests.peft_adapters import make_adapter  # peft and transformers take seconds

    model = resolve_model(EMBEDDED_MODEL)
    assert isinstance(model, Path), "it comes with the package"
    return {
        f"adapter-{seed}": make_adapter(model, directory / str(seed), seed=seed, r=2 << seed % 5)
        for seed in range(count)
    }


def adapter_flags(adapters: Mapping[str, Path]) -> list[str]:
    """Of the scheduler: half of them may run at a time."""
    if not adapters:
        return []
    given = [f"{name}={path}" for name, path in adapters.items()]
    return ["--enable-lora", f"--max-loras={-(-len(given) // 2)}", "--lora-modules", *given]


async def run(args: argparse.Namespace) -> tuple[list[Round], str]:
    """All rounds up to the first violation, and the violation."""
    with tempfile.TemporaryDirectory() as directory:
        adapters = make_adapters(Path(directory), args.adapters)
        return await break_again_and_again(args, adapters)


async def break_again_and_again(args: argparse.Namespace, adapters: dict[str, Path]) -> tuple[list[Round], str]:
    """All rounds, of requests with these adapters in turn and without."""
    stack = ChaosStack(num_workers=args.workers, scheduler_flags=[*adapter_flags(adapters), *args.flags])
    requests = make_requests(args.clients, seed=args.seed, models=(MODEL, *adapters))
    chaos = Chaos(stack=stack, requests=requests, seed=args.seed)
    rounds: list[Round] = []
    violation = ""
    try:
        async with stack.run():
            await chaos.learn()
            for number, name in enumerate(plan(args.faults, args.rounds, random.Random(args.seed))):
                print(f"round {number:>3}  {name:<18}", end="", flush=True)
                try:
                    rounds.append(await chaos.break_once(name))
                except ViolationError as error:
                    violation = f"round {number}, {name}: {error}"
                    print("VIOLATION")
                    break
                last = rounds[-1]
                stalls = quantile(last.stalls_s, 0.5), max(last.stalls_s, default=0.0)
                print(f"at {last.share:4.0%}, {last.num_streams:>3} streams open", end="")
                print(
                    f"  stall p50 {stalls[0]:5.2f} max {stalls[1]:5.2f} s  whole {last.duration_s:5.1f} s", flush=True
                )
    except ViolationError as error:
        violation = f"undisturbed: {error}"
    if violation:
        print(f"\n{stack.log}\n")
    return rounds, violation


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--adapters", type=int, default=0, metavar="N", help="requests have one of N adapters, or none")
    parser.add_argument("--faults", nargs="+", choices=list(FAULTS), default=list(FAULTS), metavar="FAULT")
    parser.add_argument("--json", metavar="PATH", help="write all measurements there")
    parser.add_argument("flags", nargs="*", help="flags of the scheduler, after --")
    args = parser.parse_args()
    logging.getLogger("pagoda").setLevel(logging.CRITICAL)  # the supervisor reports what was done on purpose
    rounds, violation = asyncio.run(run(args))
    table = summarize(rounds)
    print_table(table)
    if args.json:
        result = {**vars(args), "violation": violation, "table": table, "results": [asdict(one) for one in rounds]}
        Path(args.json).write_text(json.dumps(result, indent=1))
    if violation:
        raise SystemExit(f"\nVIOLATION in {violation}")
