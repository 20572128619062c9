"""Small random checkpoints of every architecture, and what transformers generates from them in float32."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.checkpoints import make_checkpoint
from tests.unit.worker.driver import Driver
from tests.unit.worker.models.reference import greedy_with_logprobs

THROUGH_THE_ENGINE = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "GPT2LMHeadModel",
    "OPTForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForCausalLM",
    "Phi3ForCausalLM",
    "Olmo2ForCausalLM",
    "GraniteForCausalLM",
    "SmolLM3ForCausalLM",
    "CohereForCausalLM",
    "FalconForCausalLM",
    "MixtralForCausalLM",
)
"""All that an architecture can do differently to the KV cache is in one of these; tests/unit/worker compares the tokens
of every other one too."""
LENGTHS = (1, 15, 16, 17, 33, 300)
NUM_PROMPTS = 20
NUM_TOKENS = 48


@dataclass
class Reference:
    """A checkpoint, prompts, and transformers' greedy continuation of each."""

    directory: Path
    prompts: list[list[int]]
    outputs: list[list[int]]
    logprobs: list[list[float]]
    """Of the chosen tokens."""


def make_prompts(vocab_size: int) -> list[list[int]]:
    """20 prompts of the lengths where blocks begin and end; some share a prefix."""
    generator = torch.Generator().manual_seed(1)
    prompts: list[list[int]] = []
    for number in range(NUM_PROMPTS):
        length = LENGTHS[number % len(LENGTHS)]
        prompt = torch.randint(5, vocab_size, (length,), generator=generator).tolist()
        if number >= 2 * len(LENGTHS):
            shared = prompts[number - len(LENGTHS)][: length // 2]
            prompt = shared + prompt[len(shared) :]
        prompts.append(prompt)
    return prompts


def make_reference(architecture: str, directory: Path, **options: Any) -> Reference:
    """What transformers says in float32 to one prompt at a time (without any padding). `options`: of its config."""
    make_checkpoint(architecture, directory, **options)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    prompts = make_prompts(model.config.vocab_size)
    outputs, logprobs = [], []
    for prompt, guess in zip(prompts, Driver(directory).generate(prompts, max_tokens=NUM_TOKENS), strict=True):
        output, rows = greedy_with_logprobs(model, prompt, guess.output)
        outputs.append(output)
        logprobs.append(rows.gather(1, torch.tensor(output)[:, None])[:, 0].tolist())
    return Reference(directory, prompts, outputs, logprobs)


@pytest.fixture(scope="session")
def reference_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Reference]:
    """Makes the reference of an architecture with options, once in a process: its tests need not follow each other."""
    torch.set_num_threads(1)

    @cache
    def make(architecture: str, **options: Any) -> Reference:
        directory = tmp_path_factory.mktemp("-".join((architecture, *options)))
        return make_reference(architecture, directory, **options)

    return make


@pytest.fixture(scope="session", params=THROUGH_THE_ENGINE)
def reference(request: pytest.FixtureRequest, reference_of: Callable[..., Reference]) -> Reference:
    """One architecture after the other."""
    return reference_of(request.param)


@pytest.fixture(scope="session")
def llama(reference_of: Callable[..., Reference]) -> Reference:
    """The architecture on which combinations are tried."""
    return reference_of("LlamaForCausalLM")
