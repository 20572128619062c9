"""How many tokens a second the scheduler, the wire and one frontend session carry; the worker answers in no time.

    python -m benchmarks.scale --json benchmarks/results/scale.jsonl

Three processes: `python -m pagoda_scheduler`, a fake worker, and this one with the session (an EngineClient). On fewer
cores than processes the wall clock says little, so each process's CPU time counts as well: tokens per second of the
busiest one is what it would carry on a core of its own. The frontend's own figure is benchmarks/frontend.py's.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # so that it also runs as a plain script

import asyncio
import cProfile
import pstats
import time
from argparse import Namespace

import psutil
import uvloop

from benchmarks import frontend
from benchmarks.tools.fake_engine import fake_engine
from benchmarks.tools.figures import Report, median, parser
from pagoda_common.engine.client import EngineRequest, EngineStream
from pagoda_common.params.sampling_params import SamplingParams
from pagoda_common.process.idle_memory import exempt_what_exists

PROMPT_TOKENS = 16


async def drain(stream: EngineStream) -> int:
    """Read a stream to its end; the number of tokens."""
    count = 0
    while not stream.is_finished:
        for output in await stream.get():
            count += len(output.token_ids)
    return count


def cpu_s(process: psutil.Process) -> float:
    """CPU seconds used so far."""
    times = process.cpu_times()
    return float(times.user + times.system)


async def measure(num_seqs: int, num_tokens: int) -> dict[str, float]:
    """Decode `num_tokens` for each of `num_seqs` sequences."""
    flags = [f"--max-num-seqs={num_seqs}", f"--max-num-batched-tokens={max(8192, 16 * num_seqs)}"]
    async with fake_engine(flags) as engine:
        client, scheduler, (worker,) = engine.client, engine.scheduler, engine.workers
        exempt_what_exists()  # as the frontend's own process does when it has started
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        before = (time.perf_counter(), cpu_s(scheduler), cpu_s(worker), time.process_time())
        streams = [
            client.submit(
                EngineRequest(
                    request_id=str(number),
                    prompt_token_ids=[number * PROMPT_TOKENS + i for i in range(PROMPT_TOKENS)],
                    sampling_params=params,
                )
            )
            for number in range(num_seqs)
        ]
        total = sum(await asyncio.gather(*map(drain, streams)))
        after = (time.perf_counter(), cpu_s(scheduler), cpu_s(worker), time.process_time())
    assert total == num_seqs * num_tokens
    wall, *cpu = (end - start for start, end in zip(before, after, strict=True))
    return {
        "tokens_per_s": total / wall,
        "scheduler": total / cpu[0],
        "fake_worker": total / cpu[1],
        "session": total / cpu[2],
    }


async def run(report: Report, args: Namespace) -> None:
    smallest: dict[str, float] = {}
    for num_seqs in args.batch_sizes:
        # As many tokens of each sequence whatever their number: what a request costs once is in all figures alike.
        rounds = [await measure(num_seqs, args.tokens) for _ in range(args.rounds)]
        n = args.rounds * num_seqs * args.tokens
        values = {name: median([result[name] for result in rounds]) for name in rounds[0]}
        smallest = smallest or values
        report.add(f"wall_tokens_per_s_{num_seqs}", values["tokens_per_s"], "tokens/s, 3 processes together", n=n)
        for name in ("scheduler", "session", "fake_worker"):
            report.add(f"{name}_tokens_per_cpu_s_{num_seqs}", values[name], "tokens/s of its core", n=n)
        slowest = min(values["scheduler"], values["session"])
        report.add(f"core_tokens_per_s_{num_seqs}", slowest, "tokens/s, one core each", n=n)
        unit = f"CPU of a token / that at {args.batch_sizes[0]} sequences"
        for name in ("scheduler", "session"):
            report.add(f"{name}_growth_{num_seqs}", smallest[name] / values[name], unit, n=n)


async def main() -> None:
    flags = parser(__doc__ or "")
    flags.add_argument("--batch-sizes", type=int, nargs="+", default=[512, 1024, 2048, 4096])
    flags.add_argument("--tokens", type=int, default=250, help="output tokens of each sequence")
    flags.add_argument("--frontend-clients", type=int, default=256, help="streams of one frontend; 0 leaves them out")
    flags.add_argument("--profile", action="store_true", help="print where the session's time goes")
    args = flags.parse_args()
    report = Report(args.json)
    profile = cProfile.Profile()
    if args.profile:
        profile.enable()
    await run(report, args)
    if args.frontend_clients:
        await frontend.run(report, num_clients=args.frontend_clients, num_rounds=args.rounds)
    if args.profile:
        profile.disable()
        pstats.Stats(profile).sort_stats("tottime").print_stats(15)


if __name__ == "__main__":
    uvloop.run(main())
