"""``python -m benchmarks.tools.fake_worker --scheduler HOST:PORT``: a worker that answers in no time, as a process."""

import argparse
import asyncio

import uvloop

from tests.fakes.fake_worker import FakeWorker


async def main() -> None:
    flags = argparse.ArgumentParser()
    flags.add_argument("--scheduler", required=True)
    flags.add_argument("--num-blocks", type=int, default=200_000)
    flags.add_argument("--vocab-size", type=int, default=1_000_000)
    flags.add_argument("--step-ms", type=float, default=0.0, help="milliseconds that a step takes")
    flags.add_argument("--token-us", type=float, default=0.0, help="microseconds more for each token of the step")
    flags.add_argument("--die-with-parent", type=int)
    args = flags.parse_args()
    if args.die_with_parent:
        from pagoda_common.process.children import die_with_parent

        die_with_parent(args.die_with_parent)
    worker = FakeWorker(num_blocks=args.num_blocks, max_model_len=65_536, vocab_size=args.vocab_size)
    worker.delay_s, worker.delay_per_token_s = args.step_ms / 1e3, args.token_us / 1e6
    await worker.start(args.scheduler)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(main())
