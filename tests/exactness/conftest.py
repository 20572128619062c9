"""Small random checkpoints of every architecture, and what transformers generates from them in float32."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import transformers

from tests.checkpoints import make_checkpoint

ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "GPT2LMHeadModel",
    "OPTForCausalLM",
)
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
    """Generate with transformers, one prompt at a time, in float32."""
    make_checkpoint(architecture, directory)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    prompts = make_prompts(model.config.vocab_size)
    outputs, logprobs = [], []
    for prompt in prompts:
        result = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=NUM_TOKENS,
            min_new_tokens=NUM_TOKENS,
            do_sample=False,
            eos_token_id=None,
            return_dict_in_generate=True,
            output_logits=True,
        )
        tokens = result.sequences[0, len(prompt) :]
        rows = torch.stack([logits[0] for logits in result.logits]).log_softmax(dim=-1)
        outputs.append(tokens.tolist())
        logprobs.append(rows.gather(1, tokens[:, None])[:, 0].tolist())
    return Reference(directory, prompts, outputs, logprobs)


@pytest.fixture(scope="session", params=ARCHITECTURES)
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """One architecture after the other."""
    torch.set_num_threads(1)
    return make_reference(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """The architecture on which combinations are tried."""
    torch.set_num_threads(1)
    return make_reference("LlamaForCausalLM", tmp_path_factory.mktemp("llama"))
