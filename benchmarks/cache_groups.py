"""KV memory that one long prompt holds, with its layers in cache groups and with one block table for all of them.

    python benchmarks/cache_groups.py --json benchmarks/results/cache_groups.jsonl

The scheduler decides every step as it does for a worker. No model runs: what a prompt holds is the number of its blocks
times their bytes. The shape is Gemma 3 1B: 26 layers, every sixth of full attention, the others with a window of
512 tokens, one KV head of 256 values, bfloat16.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # so that it also runs as a plain script

from collections.abc import Sequence

from benchmarks.tools.figures import Report, parser
from pagoda_common.config.engine_config import CacheConfig, SchedulerConfig
from pagoda_common.params.sampling_params import SamplingParams
from pagoda_scheduler.core.request import Request
from pagoda_scheduler.core.scheduler import Scheduler
from pagoda_scheduler.core.step import ModelRunnerOutput
from pagoda_scheduler.kv.cache_group import ONE_GROUP, CacheGroup, CacheSizes

NUM_LAYERS = 26
LAYERS_EACH = 4
"""Layers of a group: those of full attention; the last group with a window has two, and room for four."""
WINDOWS = 6
LAYER_TOKEN_BYTES = 2 * 1 * 256 * 2
"""Key and value of a token in a layer: one head, 256 values, 2 bytes."""
BLOCK_SIZE = 16
NUM_OUTPUT_TOKENS = 64


def held_bytes(groups: Sequence[CacheGroup], *, layers_each: int, num_tokens: int) -> tuple[int, int]:
    """Most bytes that a prompt holds in a step, and bytes after NUM_OUTPUT_TOKENS more tokens."""
    scheduler = Scheduler(
        config=SchedulerConfig(max_num_seqs=1),
        cache=CacheConfig(block_size=BLOCK_SIZE),
        sizes=CacheSizes(2**16),
        groups=groups,
        max_model_len=2**20,
    )
    request = Request(
        request_id="prompt",
        prompt_token_ids=range(num_tokens),
        sampling_params=SamplingParams(max_tokens=NUM_OUTPUT_TOKENS + 1, seed=0, ignore_eos=True),
        max_model_len=2**20,
    )
    scheduler.add(request)
    most = last = 0
    pool = scheduler.kv.pool
    allocate = pool.allocate

    def watched(count: int) -> list[int]:
        nonlocal most
        blocks = allocate(count)
        most = max(most, pool.num_used_blocks)  # what the step will read no more is given back after that
        return blocks

    pool.allocate = watched  # type: ignore[method-assign]  # between two steps less is held
    while (output := scheduler.schedule()) is not None:
        last = pool.num_used_blocks
        is_sampled = request.num_computed_tokens >= num_tokens
        scheduler.update(ModelRunnerOutput(output.step, [int(is_sampled)], [1] * is_sampled))
    block_bytes = layers_each * BLOCK_SIZE * LAYER_TOKEN_BYTES
    return most * block_bytes, last * block_bytes


def main() -> None:
    flags = parser(__doc__ or "")
    flags.add_argument("--tokens", type=int, nargs="+", default=[1024, 8192, 32_768], help="tokens of the prompts")
    flags.add_argument("--window", type=int, default=512, help="tokens of a window")
    args = flags.parse_args()
    report = Report(args.json)
    groups = [CacheGroup("full", LAYERS_EACH)]
    groups += [CacheGroup("window", LAYERS_EACH, args.window)] * WINDOWS
    for num_tokens in args.tokens:
        most, before = held_bytes(ONE_GROUP, layers_each=NUM_LAYERS, num_tokens=num_tokens)
        report.add(f"kv_bytes_one_table_{num_tokens}", before / 2**20, "MiB", n=1)
        peak, after = held_bytes(groups, layers_each=LAYERS_EACH, num_tokens=num_tokens)
        report.add(f"kv_bytes_groups_most_{num_tokens}", peak / 2**20, "MiB", n=1)
        report.add(f"kv_bytes_groups_decoding_{num_tokens}", after / 2**20, "MiB", n=1)
        report.add(f"kv_share_most_{num_tokens}", peak / most, "of one table", n=1)
        report.add(f"kv_share_decoding_{num_tokens}", after / before, "of one table", n=1)


if __name__ == "__main__":
    main()
