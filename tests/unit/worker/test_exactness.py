"""Greedy tokens and log probabilities equal transformers' for every architecture, whatever the batch and the chunks."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from pagoda_common.sampling_params import SamplingParams
from tests.checkpoints import ARCHITECTURES, VOCAB_SIZE, make_checkpoint
from tests.unit.worker.driver import Driver, Tracked

LENGTHS = (1, 15, 16, 17, 33, 300)
NUM_TOKENS = 24
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "OPT with norms behind and a narrow embedding": (
        "OPTForCausalLM",
        {"do_layer_norm_before": False, "word_embed_proj_dim": 32},
    ),
    "Llama with biases and llama3 rope": (
        "LlamaForCausalLM",
        {
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1000.0,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "Llama with linear rope": (
        "LlamaForCausalLM",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5}},
    ),
    "Qwen3 with yarn rope": (
        "Qwen3ForCausalLM",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 128,
            }
        },
    ),
    "Llama with gelu and one KV head": ("LlamaForCausalLM", {"hidden_act": "gelu", "num_key_value_heads": 1}),
    "GPT-2 with scales by layer, untied": (
        "GPT2LMHeadModel",
        {"scale_attn_by_inverse_layer_idx": True, "tie_word_embeddings": False, "n_inner": 100},
    ),
}


def make_prompts(lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]


@dataclass
class Reference:
    """A checkpoint, and what transformers says about it."""

    driver: Driver
    model: Any
    outputs: list[list[int]]

    def logprobs(self, tokens: list[int]) -> torch.Tensor:
        """[len(tokens), vocab] of the token behind each."""
        with torch.inference_mode():
            return self.model(torch.tensor([tokens])).logits[0].float().log_softmax(-1)  # type: ignore[no-any-return]


def open_reference(directory: Path, architecture: str, **overrides: Any) -> Reference:
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
    return Reference(Driver(directory), model, outputs)


@pytest.fixture(scope="module", params=ARCHITECTURES)
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return open_reference(tmp_path_factory.mktemp("checkpoint"), request.param)


def outputs_of(sequences: list[Tracked]) -> list[list[int]]:
    return [sequence.output for sequence in sequences]


def test_single_prompts_equal_transformers(reference: Reference) -> None:
    outputs = [reference.driver.generate([prompt], max_tokens=NUM_TOKENS)[0].output for prompt in make_prompts()]
    assert outputs == reference.outputs
    assert len({tuple(output) for output in outputs}) == len(outputs), "degenerate checkpoint"


def test_a_batch_equals_transformers(reference: Reference) -> None:
    sequences = reference.driver.generate(make_prompts(), max_tokens=NUM_TOKENS)
    assert outputs_of(sequences) == reference.outputs


@pytest.mark.parametrize(("chunk", "budget"), [(7, 10_000), (16, 40), (10_000, 64)])
def test_chunked_prefill_equals_transformers(reference: Reference, chunk: int, budget: int) -> None:
    sequences = reference.driver.generate(make_prompts(), max_tokens=NUM_TOKENS, chunk=chunk, budget=budget)
    assert outputs_of(sequences) == reference.outputs


def test_a_resumed_request_continues_where_it_was(reference: Reference) -> None:
    known = [output[:10] for output in reference.outputs]
    sequences = reference.driver.generate(make_prompts(), max_tokens=NUM_TOKENS, outputs=known)
    assert outputs_of(sequences) == reference.outputs


def test_logprobs_equal_transformers(reference: Reference) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=5, prompt_logprobs=2)
    for sequence in reference.driver.generate(make_prompts(), params, max_tokens=8, chunk=100):
        expected = reference.logprobs(sequence.prompt + sequence.output)
        for index, (token_id, entries) in enumerate(zip(sequence.output, sequence.logprobs, strict=True)):
            row = expected[len(sequence.prompt) + index - 1]
            assert token_id in entries
            assert set(row.topk(5).indices.tolist()) == set(entries)
            for entry, logprob in entries.items():
                assert logprob == pytest.approx(float(row[entry]), abs=1e-4)
        assert sequence.ranks == [1] * 8
        described = []
        for chunk in sequence.prompt_logprobs:
            columns, at = chunk.logprobs, 0
            for row, count in enumerate(columns.counts.tolist()):
                position = chunk.start + row
                described.append(position)
                assert int(columns.token_ids[at]) == sequence.prompt[position]
                for entry in range(at, at + count):
                    actual = float(expected[position - 1, int(columns.token_ids[entry])])
                    assert float(columns.logprobs[entry]) == pytest.approx(actual, abs=1e-4)
                at += count
        assert described == list(range(1, len(sequence.prompt)))


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_equal_transformers(name: str, tmp_path: Path) -> None:
    architecture, overrides = VARIANTS[name]
    reference = open_reference(tmp_path, architecture, **overrides)
    assert outputs_of(reference.driver.generate(make_prompts(), max_tokens=NUM_TOKENS)) == reference.outputs


@pytest.mark.parametrize("block_size", [1, 5, 32])
def test_the_block_size_changes_nothing(block_size: int, tmp_path: Path) -> None:
    reference = open_reference(tmp_path, "MistralForCausalLM")
    driver = Driver(tmp_path, block_size=block_size, num_blocks=2000)
    assert outputs_of(driver.generate(make_prompts(), max_tokens=NUM_TOKENS, chunk=50)) == reference.outputs
