"""Inter-token latency of running streams while a long prompt prefills, for every way to bound a step.

    python benchmarks/fairness.py --json benchmarks/results/fairness.jsonl

A real scheduler and a fake worker whose steps cost 2 ms and 20 us a token, as on hardware. A running stream waits at
most for the step that is under way, so the bound is one step's cost: 2 ms + 20 us x its token budget.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # so that it also runs as a plain script

import asyncio
import time
from argparse import Namespace
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import uvloop

from benchmarks.tools.fake_engine import fake_engine
from benchmarks.tools.figures import Report, parser
from pagoda_common.engine.client import EngineClient, EngineRequest, EngineStream
from pagoda_common.params.sampling_params import SamplingParams

STEP_MS = 2.0
TOKEN_MS = 0.02
WARM_UP_S = 0.3


@dataclass(frozen=True, slots=True)
class Case:
    """One way to bound a step."""

    name: str
    flags: tuple[str, ...]
    step_tokens: int
    """Most tokens of a step."""

    @property
    def bound_ms(self) -> float:
        """Cost of the longest step."""
        return STEP_MS + TOKEN_MS * self.step_tokens


def cases(num_prompt_tokens: int, num_streams: int) -> list[Case]:
    """All that are compared."""
    whole = num_prompt_tokens + num_streams
    threshold = ("--max-num-batched-tokens=2048", "--long-prefill-token-threshold=256")
    return [
        Case("budget512", ("--max-num-batched-tokens=512",), 512),
        Case("budget2048", ("--max-num-batched-tokens=2048",), 2048),
        Case("budget2048_threshold256", threshold, 256 + num_streams),
        Case("unchunked", ("--no-enable-chunked-prefill", "--max-num-batched-tokens=65536"), whole),
    ]


async def follow(stream: EngineStream, arrivals: list[float]) -> None:
    """Note when each message with tokens arrives, until the stream ends."""
    while not stream.is_finished:
        for output in await stream.get():
            arrivals += [time.perf_counter()] if output.token_ids else []


def submit(client: EngineClient, name: str, prompt: list[int], max_tokens: int) -> EngineStream:
    """A greedy request without an early end."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return client.submit(EngineRequest(request_id=name, prompt_token_ids=prompt, sampling_params=params))


def gaps_ms(arrivals: list[list[float]], start: float, end: float) -> list[float]:
    """Milliseconds between tokens of each stream, for the gaps that touch start to end."""
    return [
        1e3 * (later - earlier)
        for times in arrivals
        for earlier, later in pairwise(times)
        if later > start and earlier < end
    ]


async def measure(args: Namespace, case: Case) -> tuple[list[float], list[float], float]:
    """Gaps before the long prompt and during its prefill, in ms, and its time to first token in ms."""
    worker_flags = ["--step-ms", str(STEP_MS), "--token-us", str(1e3 * TOKEN_MS)]
    async with fake_engine(case.flags, worker_flags=worker_flags) as engine:
        arrivals: list[list[float]] = [[] for _ in range(args.streams)]
        streams = [
            submit(engine.client, f"running-{number}", [number * 100 + i for i in range(16)], 60_000)
            for number in range(args.streams)
        ]
        async with asyncio.TaskGroup() as tasks:
            for stream, times in zip(streams, arrivals, strict=True):
                tasks.create_task(follow(stream, times))
            await asyncio.sleep(WARM_UP_S)
            start = time.perf_counter()
            await asyncio.sleep(args.quiet_s)
            submitted = time.perf_counter()
            first: list[float] = []
            await follow(submit(engine.client, "long", list(range(args.prompt_tokens)), 1), first)
            await asyncio.sleep(0.1)  # the running streams' own tokens of that step
            for stream in streams:
                stream.abort()
        before, during = gaps_ms(arrivals, start, submitted), gaps_ms(arrivals, submitted, first[0])
        return before, during, 1e3 * (first[0] - submitted)


async def run(report: Report, args: Namespace) -> None:
    for case in cases(args.prompt_tokens, args.streams):
        if args.cases and case.name not in args.cases:
            continue
        before: list[float] = []
        during: list[float] = []
        first: list[float] = []
        for _ in range(args.rounds):
            quiet, busy, first_ms = await measure(args, case)
            before += quiet
            during += busy
            first.append(first_ms)
        report.add(f"itl_bound_ms_{case.name}", case.bound_ms, "ms, one step's cost", n=1)
        for when, gaps in (("before", before), ("during", during)):
            for name, value in zip(("p50", "p99", "max"), np.percentile(gaps, [50, 99, 100]).tolist(), strict=True):
                report.add(f"itl_{name}_{when}_prefill_ms_{case.name}", value, "ms", n=len(gaps))
        report.add(f"ttft_long_prompt_ms_{case.name}", float(np.median(first)), "ms", n=len(first))


async def main() -> None:
    flags = parser(__doc__ or "")
    flags.add_argument("--streams", type=int, default=8, help="running streams")
    flags.add_argument("--prompt-tokens", type=int, default=32_768, help="length of the long prompt")
    flags.add_argument("--quiet-s", type=float, default=1.0, help="seconds of decoding before the long prompt comes")
    flags.add_argument("--cases", nargs="+", help="names of the cases to run; all if not given")
    args = flags.parse_args()
    await run(Report(args.json), args)


if __name__ == "__main__":
    uvloop.run(main())
