"""OpenVINO GenAI's LLMPipeline with continuous batching and prefix caching. Options: kv_cache_gib."""

import argparse
import time

import numpy as np
import openvino as ov
import openvino_genai as genai

from benchmarks.cpu.engines.driver import main


class OpenvinoEngine:
    """One pipeline for single streams and batches."""

    def __init__(self, args: argparse.Namespace) -> None:
        scheduler = genai.SchedulerConfig()
        scheduler.enable_prefix_caching = True
        scheduler.cache_size = args.options.get("kv_cache_gib", 4)
        scheduler.max_num_seqs = 256
        properties = {"INFERENCE_NUM_THREADS": args.threads, "INFERENCE_PRECISION_HINT": "bf16"}
        self._pipe = genai.ContinuousBatchingPipeline(args.model, scheduler, "CPU", properties)

    def prepare(self, *, num_parallel: int, max_len: int) -> None:
        """Nothing: the pipeline takes every load."""

    def stream(self, prompt: list[int], num_outputs: int) -> list[float]:
        """When each token came."""
        times: list[float] = []
        handle = self._pipe.add_request(0, _tensor(prompt), _config(num_outputs))
        while self._pipe.has_non_finished_requests():
            self._pipe.step()
            if handle.can_read():
                for output in handle.read().values():
                    times += [time.perf_counter()] * len(output.generated_ids)
        return times

    def generate(self, prompts: list[list[int]], num_outputs: int, concurrency: int) -> int:
        """All prompts; the number of tokens generated."""
        configs = [_config(num_outputs) for _ in prompts]
        results = self._pipe.generate([_tensor(prompt) for prompt in prompts], configs)
        return sum(len(result.m_generation_ids[0]) for result in results)

    def close(self) -> None:
        """Nothing to end."""


def _tensor(prompt: list[int]) -> ov.Tensor:
    return ov.Tensor(np.array([prompt], dtype=np.int64))


def _config(num_outputs: int) -> genai.GenerationConfig:
    config = genai.GenerationConfig()
    config.max_new_tokens = num_outputs
    config.ignore_eos = True
    config.do_sample = False
    return config


if __name__ == "__main__":
    main(OpenvinoEngine, ("openvino-genai", "openvino"))
