"""transformers' generate with a static batch, padded on the left."""

import argparse
import time

import torch
from transformers import AutoModelForCausalLM

from benchmarks.cpu.engines.driver import main


class Times:
    """A streamer that notes when each token came; the first call is the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self._has_prompt = False

    def put(self, value: torch.Tensor) -> None:
        """A token, or at first the prompt."""
        if self._has_prompt:
            self.times.append(time.perf_counter())
        self._has_prompt = True

    def end(self) -> None:
        """Nothing is held back."""


class TransformersEngine:
    """The model in this process."""

    def __init__(self, args: argparse.Namespace) -> None:
        torch.set_num_threads(args.threads)
        self._model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16).eval()

    def prepare(self, *, num_parallel: int, max_len: int) -> None:
        """Nothing to do."""

    def stream(self, prompt: list[int], num_outputs: int) -> list[float]:
        """When each token came."""
        streamer = Times()
        self._generate([prompt], num_outputs, streamer)
        return streamer.times

    def generate(self, prompts: list[list[int]], num_outputs: int, concurrency: int) -> int:
        """All prompts as one batch; the number of tokens generated."""
        return self._generate(prompts, num_outputs, None)

    def _generate(self, prompts: list[list[int]], num_outputs: int, streamer: Times | None) -> int:
        width = max(map(len, prompts))
        input_ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])  # [num_reqs, width]
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        with torch.inference_mode():
            output = self._model.generate(
                input_ids=input_ids,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=num_outputs,
                min_new_tokens=num_outputs,
                pad_token_id=0,
                streamer=streamer,
            )
        return output[:, width:].numel()

    def close(self) -> None:
        """Nothing to end."""


if __name__ == "__main__":
    main(TransformersEngine, ("transformers", "torch"))
