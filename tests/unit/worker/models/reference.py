"""A small checkpoint, what transformers makes of it, and a driver of the worker on it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as qwen3_5_moe
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

from tests.checkpoints import make_checkpoint
from tests.small_models.sizes import VOCAB_SIZE
from tests.unit.worker.driver import Driver

LENGTHS = (1, 15, 16, 17, 33, 300)
NUM_TOKENS = 24


def make_prompts(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    """Random prompts of some lengths."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]


@contextmanager
def _token_by_token() -> Iterator[None]:
    """Within: transformers computes gated delta nets by its recurrent rule, not by chunks of 64 tokens, whose inverse
    matrices in float32 move log probabilities of these checkpoints by up to 4e-4."""
    modules = (qwen3_next, qwen3_5, qwen3_5_moe)
    chunked = [module.torch_chunk_gated_delta_rule for module in modules]

    def recurrent(*args: Any, chunk_size: int = 64, **options: Any) -> Any:
        return qwen3_next.torch_recurrent_gated_delta_rule(*args, **options)

    for module in modules:
        module.torch_chunk_gated_delta_rule = recurrent
    try:
        yield
    finally:
        for module, rule in zip(modules, chunked, strict=True):
            module.torch_chunk_gated_delta_rule = rule


def logprobs_of(model: Any, tokens: list[int]) -> torch.Tensor:
    """[len(tokens), vocab] of the token after each, by a module of transformers."""
    with torch.inference_mode(), _token_by_token():
        logits = model(torch.tensor([tokens])).logits[0]
    return logits.float().log_softmax(-1)  # type: ignore[no-any-return]  # transformers: Any


def greedy(model: Any, prompt: list[int], guess: list[int]) -> list[int]:
    """What a module of transformers says after the prompt, as many tokens as the guess has."""
    return greedy_with_logprobs(model, prompt, guess)[0]


def greedy_with_logprobs(model: Any, prompt: list[int], guess: list[int]) -> tuple[list[int], torch.Tensor]:
    """The same, and [len(guess), vocab]: the log probabilities of which each token is the likeliest.

    A pass over prompt and guess says which token is the first that is wrong, if one is, and what is right in its place:
    with a guess that is right throughout, it is one pass instead of one a token.
    """
    output = list(guess)
    for _ in range(len(guess) + 1):
        rows = logprobs_of(model, prompt + output)[len(prompt) - 1 : -1]
        likeliest = rows.argmax(-1).tolist()
        wrong = next((place for place, token in enumerate(likeliest) if token != output[place]), None)
        if wrong is None:
            return output, rows
        output[wrong] = likeliest[wrong]
    raise AssertionError("every pass makes one more token right")


@dataclass
class Reference:
    """A checkpoint, and what transformers says about it."""

    architecture: str
    directory: Path
    driver: Driver
    model: Any
    together: list[list[int]]
    """What the driver says to all prompts in a batch."""
    outputs: list[list[int]]
    """What transformers says to each."""

    def logprobs(self, tokens: list[int]) -> torch.Tensor:
        """[len(tokens), vocab] of the token after each."""
        return logprobs_of(self.model, tokens)


def open_reference(
    directory: Path,
    architecture: str,
    *,
    max_model_len: int | None = None,
    world_size: int = 1,
    device: str = "cpu",
    **overrides: Any,
) -> Reference:
    """Write a checkpoint, and say what transformers makes of it in float32 on the CPU, one prompt at a time.

    Args:
        device: of the driver.
        overrides: options of the transformers config.
    """
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    make_checkpoint(architecture, directory, **overrides)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    driver = Driver(directory, max_model_len=max_model_len, world_size=world_size, device=device)
    together = [each.output for each in driver.generate(make_prompts(), max_tokens=NUM_TOKENS)]
    outputs = [greedy(model, *pair) for pair in zip(make_prompts(), together, strict=True)]
    return Reference(architecture, directory, driver, model, together, outputs)
