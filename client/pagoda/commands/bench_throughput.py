"""``pagoda bench throughput``: how much a private engine generates in a second when it gets all prompts at once."""

import argparse
import time
from typing import Any

from pagoda.bench.datasets import add_dataset_arguments, read_dataset
from pagoda.bench.engine import add_engine_arguments, make_llm, save_json
from pagoda_common.config.flags.flags import config_errors
from pagoda_common.params.sampling_params import SamplingParams


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Dataset and engine; --seed is the engine's, and the prompts'."""
    add_dataset_arguments(parser)
    group = parser.add_argument_group("load")
    group.add_argument(
        "--num-prompts", type=int, default=1000, metavar="N", help="number of requests (default: %(default)s)"
    )
    group.add_argument("--n", type=int, default=1, metavar="N", help="sequences per request (default: %(default)s)")
    group.add_argument("--output-json", metavar="FILE", help="write the figures to this file")
    group.add_argument("--disable-tqdm", action="store_true", help="do not show progress")
    add_engine_arguments(parser)


def run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """0 when every request got its tokens."""
    for name in ("num_prompts", "n"):
        if getattr(args, name) < 1:
            parser.error(f"{name} is {getattr(args, name)}, must be at least 1")
    with make_llm(args, parser) as llm:
        with config_errors(parser):
            requests = read_dataset(args, llm.get_tokenizer().backend, num_prompts=args.num_prompts)
        params = [
            SamplingParams(n=args.n, temperature=1.0, ignore_eos=True, max_tokens=request.output_len, detokenize=True)
            for request in requests
        ]
        started = time.perf_counter()
        outputs = llm.generate([r.prompt for r in requests], params, use_tqdm=not args.disable_tqdm)
        elapsed_s = time.perf_counter() - started
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    num_output = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
    num_failed = sum(completion.finish_reason == "error" for output in outputs for completion in output.outputs)
    num_total = num_prompt + num_output
    print(
        f"Throughput: {len(outputs) / elapsed_s:.2f} requests/s, {num_total / elapsed_s:.2f} total tokens/s, "
        f"{num_output / elapsed_s:.2f} output tokens/s"
    )
    print(f"Total num prompt tokens:  {num_prompt}\nTotal num output tokens:  {num_output}")
    figures: dict[str, Any] = {
        "elapsed_time": elapsed_s,
        "num_requests": len(outputs),
        "total_num_tokens": num_total,
        "requests_per_second": len(outputs) / elapsed_s,
        "tokens_per_second": num_total / elapsed_s,
    }
    save_json(args.output_json, figures)
    return 1 if num_failed else 0
