"""What routing by cached prefix is worth over round robin, and a second worker group over one.

    python benchmarks/routing.py --json benchmarks/results/routing.jsonl

A real scheduler and fake workers whose steps cost 1 ms and 50 us a token, so that prefill is what there is to save. A
closed loop of clients sends prompts of a shared prefix and a random tail, in an order of its own. A trace in Mooncake's
format (JSON lines with input_length, output_length and hash_ids, one hash for 512 tokens) gives a second load.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # so that it also runs as a plain script

import asyncio
import json
import random
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass

import uvloop

from benchmarks.tools.fake_engine import fake_engine
from benchmarks.tools.figures import Report, median, parser
from pagoda_common.engine.client import EngineClient, EngineRequest
from pagoda_common.params.sampling_params import SamplingParams

WORKER_FLAGS = ("--step-ms=1", "--token-us=50")
TRACE_BLOCK_TOKENS = 512
MAX_TRACE_PROMPT_TOKENS = 32_768
"""Longer prompts of a trace are left out: one would hold a group for seconds."""
VOCAB_SIZE = 1_000_000


@dataclass(frozen=True, slots=True)
class Work:
    """One request to send."""

    prompt_token_ids: list[int]
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run of a load came to."""

    hit_rate: float
    """Share of the prompt tokens that were found in a cache."""
    tokens_per_s: float
    """Prompt and output tokens together."""


def shared_prefixes(args: Namespace) -> list[Work]:
    """Every prefix equally often, in random order, each time with a tail of its own."""
    generator = random.Random(0)

    def draw(count: int) -> list[int]:
        return [generator.randrange(VOCAB_SIZE) for _ in range(count)]

    prefixes = [draw(args.prefix_tokens) for _ in range(args.prefixes)]
    order = [prefixes[number % args.prefixes] for number in range(args.requests)]
    generator.shuffle(order)
    return [Work([*prefix, *draw(args.tail_tokens)], args.output_tokens) for prefix in order]


def from_trace(path: Path, args: Namespace) -> list[Work]:
    """The first requests of a trace that are not too long: equal hashes become equal tokens, outputs are short."""
    works: list[Work] = []
    with path.open() as lines:
        for line in lines:
            entry = json.loads(line)
            if len(works) == args.trace_requests:
                break
            if entry["input_length"] > MAX_TRACE_PROMPT_TOKENS:
                continue
            prompt = [token for block in entry["hash_ids"] for token in _block(block)][: entry["input_length"]]
            works.append(Work(prompt, min(args.output_tokens, max(1, entry["output_length"]))))
    return works


def _block(hash_id: int) -> list[int]:
    generator = random.Random(hash_id)
    return [generator.randrange(VOCAB_SIZE) for _ in range(TRACE_BLOCK_TOKENS)]


async def send(client: EngineClient, number: int, work: Work) -> None:
    """One request, to its end."""
    params = SamplingParams(temperature=0.0, max_tokens=work.num_output_tokens, ignore_eos=True)
    stream = client.submit(
        EngineRequest(request_id=str(number), prompt_token_ids=work.prompt_token_ids, sampling_params=params)
    )
    while not stream.is_finished:
        await stream.get()


async def measure(args: Namespace, works: list[Work], *, num_groups: int, policy: str = "prefix") -> Outcome:
    """Send all of a load in a closed loop; caches are cold at its start."""
    flags = [f"--routing-policy={policy}", "--max-num-batched-tokens=2048"]
    worker_flags = [*WORKER_FLAGS, f"--num-blocks={args.num_blocks}"]
    async with fake_engine(flags, worker_flags=worker_flags, num_workers=num_groups) as engine:
        queries, hits = await engine.counters()
        start = time.perf_counter()

        async def loop(waiting: Iterator[tuple[int, Work]]) -> None:
            for number, work in waiting:
                await send(engine.client, number, work)

        waiting = iter(enumerate(works))
        await asyncio.gather(*(loop(waiting) for _ in range(args.clients)))
        wall_s = time.perf_counter() - start
        queries_after, hits_after = await engine.counters()
    num_tokens = sum(len(work.prompt_token_ids) + work.num_output_tokens for work in works)
    return Outcome((hits_after - hits) / (queries_after - queries), num_tokens / wall_s)


async def compare(report: Report, args: Namespace, works: list[Work], suffix: str) -> None:
    """Our routing, round robin and a single group, in turn in each round."""
    cases = {"prefix": (2, "prefix"), "round_robin": (2, "round_robin"), "1_group": (1, "prefix")}
    outcomes: dict[str, list[Outcome]] = {name: [] for name in cases}
    for _ in range(args.rounds):
        for name, (num_groups, policy) in cases.items():
            outcomes[name].append(await measure(args, works, num_groups=num_groups, policy=policy))
    n = args.rounds * len(works)
    rates = {name: median([outcome.tokens_per_s for outcome in outcomes[name]]) for name in cases}
    for name in cases:
        hit_rate = median([outcome.hit_rate for outcome in outcomes[name]])
        report.add(f"routing_hit_rate_{name}{suffix}", hit_rate, "tokens found / prompt tokens", n=n)
        report.add(f"routing_tokens_per_s_{name}{suffix}", rates[name], "prompt and output tokens/s", n=n)
    over_round_robin = rates["prefix"] / rates["round_robin"]
    report.add(f"throughput_prefix_over_round_robin{suffix}", over_round_robin, "ratio", n=n)
    report.add(f"throughput_2_groups_over_1{suffix}", rates["prefix"] / rates["1_group"], "ratio", n=n)


async def main() -> None:
    flags = parser(__doc__ or "")
    flags.add_argument("--prefixes", type=int, default=16, help="shared prefixes")
    flags.add_argument("--prefix-tokens", type=int, default=1024, help="tokens of each")
    flags.add_argument("--tail-tokens", type=int, default=64, help="random tokens after a prefix")
    flags.add_argument("--output-tokens", type=int, default=16, help="output tokens; the most of them for a trace")
    flags.add_argument("--requests", type=int, default=800, help="requests of the shared-prefix load")
    flags.add_argument("--clients", type=int, default=32, help="requests open at a time")
    flags.add_argument("--num-blocks", type=int, default=1024, help="KV-cache blocks a group; few, so that caches fill")
    default = Path("../shared/traces/mooncake_conversation_3000.jsonl")
    flags.add_argument("--trace", type=Path, default=default, help="a trace for the second load; skipped when absent")
    flags.add_argument("--trace-requests", type=int, default=200, help="requests of the trace")
    flags.add_argument("--trace-num-blocks", type=int, default=30_000, help="KV-cache blocks a group for the trace")
    args = flags.parse_args()
    report = Report(args.json)
    await compare(report, args, shared_prefixes(args), "")
    if args.trace.exists():
        args.num_blocks = args.trace_num_blocks
        await compare(report, args, from_trace(args.trace, args), "_trace")
    else:
        print(f"no trace at {args.trace}: its load is left out")


if __name__ == "__main__":
    uvloop.run(main())
