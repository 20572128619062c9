"""Compares what a worker says with what a model of transformers says."""

from typing import Any

import torch

from pagoda_common.config.lora_config import LoraConfig
from pagoda_common.params.sampling_params import SamplingParams
from tests.peft_adapters import logprobs
from tests.small_models.sizes import VOCAB_SIZE
from tests.unit.worker.driver import Driver

CONFIG = LoraConfig(enable_lora=True, max_lora_rank=64)


def prompt_of(length: int, seed: int = 3) -> list[int]:
    """Random tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist()  # type: ignore[no-any-return]


def check(driver: Driver, model: Any, number: int, *, tolerance: float = 1e-4, length: int = 40) -> None:
    """The log probabilities of a prompt's tokens, and of those after it, with adapter `number`."""
    prompt = prompt_of(length)
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=-1, prompt_logprobs=1, ignore_eos=True)
    (done,) = driver.generate([prompt], params, max_tokens=4, loras=[number])
    assert done.bad is None, done.bad
    expected = logprobs(model, prompt + done.output)
    assert len(done.logprobs) == 4
    for place, row in enumerate(done.logprobs):
        tokens = list(row)
        found = torch.tensor([row[token] for token in tokens])
        assert _are_close(found, expected[len(prompt) - 1 + place, tokens], tolerance)
    (chunk,) = done.prompt_logprobs
    firsts = chunk.logprobs.counts.cumsum() - chunk.logprobs.counts
    found = torch.tensor(chunk.logprobs.logprobs[firsts])
    assert _are_close(found, expected[range(len(prompt) - 1), prompt[1:]], tolerance)


def _are_close(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:
    """Float32 has 7 digits, and log probabilities of random weights reach -25."""
    return bool(((found - expected).abs() <= tolerance + 1e-5 * expected.abs()).all())
