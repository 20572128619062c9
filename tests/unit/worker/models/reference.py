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

from tests.checkpoints import VOCAB_SIZE, make_checkpoint
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


@dataclass
class Reference:
    """A checkpoint, and what transformers says about it."""

    directory: Path
    driver: Driver
    model: Any
    outputs: list[list[int]]

    def logprobs(self, tokens: list[int]) -> torch.Tensor:
        """[len(tokens), vocab] of the token after each."""
        with torch.inference_mode(), _token_by_token():
            return self.model(torch.tensor([tokens])).logits[0].float().log_softmax(-1)  # type: ignore[no-any-return]


def open_reference(
    directory: Path, architecture: str, *, max_model_len: int | None = None, world_size: int = 1, **overrides: Any
) -> Reference:
    """Write a checkpoint and generate from it with transformers, one prompt at a time."""
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    make_checkpoint(architecture, directory, **overrides)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    outputs = []
    for prompt in make_prompts():
        ids = torch.tensor([prompt])
        generated = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NUM_TOKENS,
            min_new_tokens=NUM_TOKENS,
            do_sample=False,
            eos_token_id=None,
        )
        outputs.append(generated[0, len(prompt) :].tolist())
    return Reference(directory, Driver(directory, max_model_len=max_model_len, world_size=world_size), model, outputs)
