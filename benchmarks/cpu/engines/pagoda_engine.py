"""Pagoda's library: AsyncLLM with its private scheduler and worker processes (LLM is the same on a thread)."""

import argparse
import asyncio
import time
from collections.abc import Coroutine
from typing import Any

from benchmarks.cpu.engines.driver import main
from pagoda import AsyncLLM, SamplingParams
from pagoda_common.params.sampling_params import RequestOutputKind


class PagodaEngine:
    """One engine on an event loop that runs while a command is answered."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._loop = asyncio.new_event_loop()
        self._llm = AsyncLLM(args.model, dtype="bfloat16", max_model_len=args.max_model_len, **args.options)
        self._run(self._llm.start())

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._loop.run_until_complete(work)

    def prepare(self, *, num_parallel: int, max_len: int) -> None:
        """Nothing: the engine takes every load."""

    def stream(self, prompt: list[int], num_outputs: int) -> list[float]:
        """When each token came."""
        return self._run(self._stream(prompt, num_outputs))

    async def _stream(self, prompt: list[int], num_outputs: int) -> list[float]:
        times: list[float] = []
        async for output in self._llm.generate(prompt, _params(num_outputs, RequestOutputKind.DELTA)):
            times += [time.perf_counter()] * len(output.outputs[0].token_ids)
        return times

    def generate(self, prompts: list[list[int]], num_outputs: int, concurrency: int) -> int:
        """All prompts; the number of tokens generated."""
        return self._run(self._generate(prompts, num_outputs, concurrency or len(prompts)))

    async def _generate(self, prompts: list[list[int]], num_outputs: int, concurrency: int) -> int:
        kind = RequestOutputKind.DELTA if concurrency < len(prompts) else RequestOutputKind.FINAL_ONLY
        params = _params(num_outputs, kind)
        places = asyncio.Semaphore(concurrency)

        async def one(prompt: list[int]) -> int:
            async with places:
                return sum([len(output.outputs[0].token_ids) async for output in self._llm.generate(prompt, params)])

        return sum(await asyncio.gather(*map(one, prompts)))

    def close(self) -> None:
        """End scheduler and worker."""
        self._run(self._llm.shutdown())
        self._loop.close()


def _params(num_outputs: int, kind: RequestOutputKind) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_outputs, ignore_eos=True, output_kind=kind)


if __name__ == "__main__":
    main(PagodaEngine, ("pagoda-llm", "torch"))
