"""Models that keep states, and drafts that are mostly right: accepted tokens move a state on, rejected ones do not."""

from pathlib import Path

import pytest
import torch
import transformers

from pagoda_common.config.speculative_config import SpeculativeConfig
from tests.checkpoints import make_checkpoint
from tests.unit.worker.driver import Driver
from tests.unit.worker.models.reference import greedy, make_prompts

FAMILIES = (
    "Lfm2ForCausalLM",
    "Lfm2MoeForCausalLM",
    "Qwen3NextForCausalLM",
    "MambaForCausalLM",
    "Mamba2ForCausalLM",
    "FalconMambaForCausalLM",
)
NUM_TOKENS = 40
DRAFTS = SpeculativeConfig(num_speculative_tokens=4, prompt_lookup_max=3, prompt_lookup_min=1)
PERIOD = 6


def make_cycles(directory: Path) -> transformers.PreTrainedModel:
    """Have a checkpoint repeat itself: most tokens are followed by the next one of their cycle of PERIOD tokens.

    The row of the head of each token gets the embedding of the one before it, and embeddings grow beside what layers
    add to them until the next of the cycle is the likeliest after half of random tokens. What is likeliest after the
    other half is up to the layers, and so to their states.
    """
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    embeddings, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    tokens = torch.arange(len(embeddings))
    following = tokens - tokens % PERIOD + (tokens + 1) % PERIOD
    text = torch.randint(len(embeddings), (1, 100), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        head[following] += 2 * embeddings
        for _ in range(60):
            likeliest = model(text, use_cache=False).logits[0].argmax(dim=-1)
            if (likeliest == following[text[0]]).float().mean() >= 0.5:
                break
            embeddings *= 1.25
        else:
            raise AssertionError("no cycles")
    model.save_pretrained(directory)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_right_and_wrong_drafts_leave_the_tokens_of_transformers(family: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    model = make_cycles(make_checkpoint(family, tmp_path, tie_word_embeddings=False))
    prompts = make_prompts((1, 15, 16, 17, 33, 100, 2, 40))
    driver = Driver(tmp_path, speculative=DRAFTS)
    outputs = [sequence.output[:NUM_TOKENS] for sequence in driver.generate(prompts, max_tokens=NUM_TOKENS)]
    assert outputs == [greedy(model, prompt, output) for prompt, output in zip(prompts, outputs, strict=True)]
    assert driver.num_accepted_tokens > len(prompts)
    assert driver.num_draft_tokens - driver.num_accepted_tokens > len(prompts)
