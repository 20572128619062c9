"""Small random checkpoints of every architecture, and what transformers generates from them in float32."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import transformers

from tests.checkpoints import make_checkpoint

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


@torch.inference_mode()
def make_reference(architecture: str, directory: Path) -> Reference:
    """Generate with transformers in float32, prompts of one length at a time (without any padding)."""
    make_checkpoint(architecture, directory)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    prompts = make_prompts(model.config.vocab_size)
    outputs: dict[int, list[int]] = {}
    logprobs: dict[int, list[float]] = {}
    for length in LENGTHS:
        numbers = [number for number, prompt in enumerate(prompts) if len(prompt) == length]
        input_ids = torch.tensor([prompts[number] for number in numbers])
        result = model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=NUM_TOKENS,
            min_new_tokens=NUM_TOKENS,
            do_sample=False,
            eos_token_id=None,
            return_dict_in_generate=True,
            output_logits=True,
        )
        tokens = result.sequences[:, length:]  # [n, NUM_TOKENS]
        rows = torch.stack(result.logits, dim=1).log_softmax(dim=-1)  # [n, NUM_TOKENS, vocab_size]
        chosen = rows.gather(2, tokens[..., None])[..., 0]
        for row, number in enumerate(numbers):
            outputs[number], logprobs[number] = tokens[row].tolist(), chosen[row].tolist()
    order = range(len(prompts))
    return Reference(directory, prompts, [outputs[i] for i in order], [logprobs[i] for i in order])


@pytest.fixture(scope="session", params=THROUGH_THE_ENGINE)
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """One architecture after the other."""
    torch.set_num_threads(1)
    return make_reference(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """The architecture on which combinations are tried."""
    torch.set_num_threads(1)
    return make_reference("LlamaForCausalLM", tmp_path_factory.mktemp("llama"))
