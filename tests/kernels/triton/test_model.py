"""A whole model on Triton kernels gives the tokens and log probabilities of PyTorch."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pagoda_common.params.sampling_params import SamplingParams
from pagoda_kernels import selection
from tests.unit.worker.driver import Driver, Tracked

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 20,
    "vocab_size": 300,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "torch_dtype": "float32",
    "tie_word_embeddings": True,
}
PARAMS = [
    SamplingParams(temperature=0.0, seed=1, logprobs=3),
    SamplingParams(temperature=1.0, seed=2, top_p=0.9, top_k=40),
    SamplingParams(temperature=0.7, seed=3, presence_penalty=0.5, repetition_penalty=1.2),
]


def generate(directory: Path, **options: Any) -> list[Tracked]:
    driver = Driver(directory, load_format="dummy", reference_kernels=("none",), **options)
    prompts = [list(range(5, 6)), list(range(20, 57)), list(range(100, 117))]
    return driver.generate(prompts, PARAMS, max_tokens=4, chunk=20)


def used_kernels(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The names of the kernels that run from now on, as they come."""
    used: set[str] = set()
    load = selection._load
    monkeypatch.setattr(selection, "_load", lambda operation: (used.add(operation), load(operation))[1])
    return used


def test_tokens_are_those_of_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    used = used_kernels(monkeypatch)
    with torch.inference_mode():
        actual = generate(tmp_path)
        monkeypatch.setattr(selection, "_takes_cpu_tensors", False)
        expected = generate(tmp_path)
    assert used >= {
        "act_and_mul",
        "apply_token_penalties",
        "paged_attention",
        "rms_norm",
        "rope_store",
        "sample_tokens",
        "top_logprobs",
    }
    assert_same(actual, expected)


def assert_same(actual: list[Tracked], expected: list[Tracked]) -> None:
    """The same tokens, log probabilities within 1e-4."""
    for one, other in zip(actual, expected, strict=True):
        assert one.output == other.output
        for mine, theirs in zip(one.logprobs, other.logprobs, strict=True):
            assert mine == pytest.approx(theirs, abs=1e-4)


@pytest.mark.parametrize(
    ("options", "kernels"),
    [
        ({"quantization": "int4-g32"}, {"quantized_linear"}),
        ({"kv_cache_dtype": "int8"}, {"paged_attention", "rope_store"}),
    ],
)
def test_quantized_tokens_are_those_of_the_cpu(
    options: dict[str, Any], kernels: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    used = used_kernels(monkeypatch)
    with torch.inference_mode():
        actual = generate(tmp_path, **options)
        assert used >= kernels
        monkeypatch.setattr(selection, "_takes_cpu_tensors", False)
        expected = generate(tmp_path, **options)
    assert_same(actual, expected)
