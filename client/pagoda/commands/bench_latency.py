"""``pagoda bench latency``: how long a private engine takes for one batch from beginning to end."""

import argparse
import random
import time

import numpy as np
from tqdm import tqdm

from pagoda.bench.datasets import ordinary_token_ids
from pagoda.bench.engine import add_engine_arguments, make_llm, save_json
from pagoda.llm.beam_search import BeamSearchParams
from pagoda.llm.llm import LLM
from pagoda_common.params.sampling_params import SamplingParams

PERCENTILES = (10, 25, 50, 75, 90, 99)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The batch, how often, and the engine."""
    group = parser.add_argument_group("batch")
    for name, default, text in (
        ("input-len", 32, "prompt tokens of each sequence"),
        ("output-len", 128, "tokens to generate"),
        ("batch-size", 8, "sequences"),
        ("n", 1, "sequences of each prompt"),
        ("num-iters-warmup", 10, "batches before, not counted"),
        ("num-iters", 30, "batches that count"),
    ):
        group.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"{text} (default: %(default)s)")
    group.add_argument("--use-beam-search", action="store_true", help="use beam search with n beams")
    group.add_argument("--output-json", metavar="FILE", help="write the figures to this file")
    group.add_argument("--disable-tqdm", action="store_true", help="do not show progress")
    add_engine_arguments(parser)


def run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """0 when every batch was generated."""
    for name in ("input_len", "output_len", "batch_size", "n", "num_iters"):
        if getattr(args, name) < 1:
            parser.error(f"{name} is {getattr(args, name)}, must be at least 1")
    with make_llm(args, parser) as llm:
        draw = random.Random(args.seed)
        vocabulary = ordinary_token_ids(llm.get_tokenizer().backend)
        latencies: list[float] = []
        bar = tqdm(range(args.num_iters_warmup + args.num_iters), disable=args.disable_tqdm)
        for place in bar:
            # New prompts every time: those of the batch before are in the prefix cache.
            prompts = [draw.choices(vocabulary, k=args.input_len) for _ in range(args.batch_size)]
            latency_s = time_batch(llm, prompts, args)
            if place >= args.num_iters_warmup:
                latencies.append(latency_s)
    percentiles = {str(p): float(np.percentile(latencies, p)) for p in PERCENTILES}
    average_s = float(np.mean(latencies))
    print(f"Avg latency: {average_s} seconds")
    for name, latency_s in percentiles.items():
        print(f"{name}% percentile latency: {latency_s} seconds")
    save_json(args.output_json, {"avg_latency": average_s, "latencies": latencies, "percentiles": percentiles})
    return 0


def time_batch(llm: LLM, prompts: list[list[int]], args: argparse.Namespace) -> float:
    """Seconds for one batch."""
    started = time.perf_counter()
    if args.use_beam_search:
        llm.beam_search(
            prompts,
            BeamSearchParams(beam_width=args.n, max_tokens=args.output_len, ignore_eos=True),
        )
    else:
        params = SamplingParams(n=args.n, temperature=1.0, ignore_eos=True, max_tokens=args.output_len)
        llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - started
