"""Packed matrices in a whole model: held once, close to plain ones, and a token does not depend on its batch."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from pagoda_common.config.checkpoint.weights_source import WeightsSource
from pagoda_common.errors import ModelLoadError
from pagoda_common.params.sampling_params import SamplingParams
from pagoda_kernels.linear.compressed_weight import compressed_bytes
from pagoda_kernels.native.library import load_native, native
from pagoda_worker.models.layers import Matrix
from pagoda_worker.models.linear_method import COMPRESSED, PACKED, PLAIN
from tests.checkpoints import make_checkpoint
from tests.unit.worker.driver import Driver

load_native()
needs_kernel = pytest.mark.skipif(native("packed_linear") is None, reason="this CPU has no AVX512-BF16, or no compiler")
needs_compression = pytest.mark.skipif(native("compressed_linear") is None, reason="no AVX-512 BF16, or no compiler")
PROMPTS = [[5 + (7 * row + 3 * at) % 90 for at in range(3 + 5 * row)] for row in range(9)]


@pytest.fixture(scope="module", params=["LlamaForCausalLM", "Qwen3ForCausalLM", "GPT2LMHeadModel", "Gemma2ForCausalLM"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(request.param, tmp_path_factory.mktemp("checkpoint"))


def matrices(driver: Driver) -> list[Matrix]:
    return [module for module in driver.worker._model.modules() if isinstance(module, Matrix)]


def logprobs(driver: Driver, prompts: list[list[int]], **options: Any) -> list[np.ndarray]:
    """Of all tokens of each prompt."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    sequences = driver.generate(prompts, params, max_tokens=1, **options)
    return [np.concatenate([chunk.logprobs.logprobs for chunk in one.prompt_logprobs]) for one in sequences]


@needs_kernel
def test_every_matrix_is_packed_and_held_once(checkpoint: Path) -> None:
    packed = Driver(checkpoint, dtype="bfloat16", reference_kernels=("compressed_linear",))
    plain = Driver(checkpoint, dtype="float32")
    model = packed.worker._model
    for layer in matrices(packed):
        assert layer.method is (PACKED if layer.is_multiplied else PLAIN)
        if layer.is_multiplied:
            assert layer.weight.shape == (-(-layer.rows // 32), -(-layer.columns // 2), 32, 2)
    assert model.embed_tokens.is_multiplied == (model.lm_head is None)
    assert all(layer.method is PLAIN for layer in matrices(plain))
    held = sum(parameter.numel() for parameter in model.parameters())
    padding = 32 * sum(layer.columns + 1 for layer in matrices(packed))
    assert packed.facts.num_parameters <= held <= packed.facts.num_parameters + padding
    assert packed.facts.weight_bytes == 2 * held


@needs_compression
def test_every_matrix_is_compressed_and_computes_the_same_bits(checkpoint: Path) -> None:
    compressed = Driver(checkpoint, dtype="bfloat16")
    for layer in matrices(compressed):
        assert layer.method is (COMPRESSED if layer.is_multiplied else PLAIN), layer.prefix
        if layer.is_multiplied:
            assert layer.weight.shape == (compressed_bytes(layer.rows, layer.columns),)
    held = sum(parameter.numel() * parameter.element_size() for parameter in compressed.worker._model.parameters())
    assert compressed.facts.weight_bytes == held
    actual = logprobs(compressed, PROMPTS)
    packed = Driver(checkpoint, dtype="bfloat16", reference_kernels=("compressed_linear",))
    assert not any(layer.method is COMPRESSED for layer in matrices(packed))
    each = zip(actual, logprobs(packed, PROMPTS), strict=True)
    assert all(np.array_equal(one, other) for one, other in each)


@needs_compression
def test_a_matrix_of_numbers_of_all_sizes_is_packed(tmp_path: Path) -> None:
    directory = make_checkpoint("LlamaForCausalLM", tmp_path / "model")
    tensors = load_file(directory / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    powers = torch.arange(tensors[name].numel()).view(tensors[name].shape) % 60
    tensors[name] = tensors[name] * torch.exp2(-powers.float())
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    driver = Driver(directory, dtype="bfloat16")
    methods = {layer.prefix: layer.method for layer in matrices(driver)}
    packed = [prefix for prefix, method in methods.items() if method is PACKED]
    assert packed == ["layers.0.mlp.down_proj"]
    actual = logprobs(driver, PROMPTS)
    twin = Driver(directory, dtype="bfloat16", reference_kernels=("compressed_linear",))
    each = zip(actual, logprobs(twin, PROMPTS), strict=True)
    assert all(np.array_equal(one, other) for one, other in each)


@needs_kernel
def test_a_packed_model_is_close_to_a_plain_one(checkpoint: Path) -> None:
    packed = Driver(checkpoint, dtype="bfloat16")
    plain = Driver(checkpoint, dtype="bfloat16", reference_kernels=("packed_linear",))
    exact = Driver(checkpoint, dtype="float32")
    assert all(layer.method is PLAIN for layer in matrices(plain))
    expected = np.concatenate(logprobs(exact, PROMPTS))
    errors = [np.abs(np.concatenate(logprobs(one, PROMPTS)) - expected).mean() for one in (packed, plain)]
    assert errors[0] < 1.2 * errors[1] + 0.01, "rounded no more often than plain matrices"


@needs_kernel
def test_linear_layers_give_a_token_the_same_bits_in_every_batch(checkpoint: Path) -> None:
    model = Driver(checkpoint, dtype="bfloat16").worker._model
    torch.manual_seed(0)
    for layer in (layer for layer in matrices(Driver(checkpoint, dtype="bfloat16")) if layer.is_multiplied):
        x = torch.randn(40, layer.columns, dtype=torch.bfloat16)
        together = layer.method.apply(layer, x)
        alone = torch.cat([layer.method.apply(layer, x[row : row + 1]) for row in range(40)])
        assert torch.equal(together, alone), layer.prefix
    hidden = torch.randn(20, model.spec.embedding_dim or model.spec.hidden_size, dtype=torch.bfloat16)
    together = model.compute_logits(hidden)
    assert together.dtype == torch.float32
    assert torch.equal(together[7:8], model.compute_logits(hidden[7:8]))


def test_a_load_that_fails_leaves_a_model_that_can_be_loaded(tmp_path: Path) -> None:
    directory = make_checkpoint("LlamaForCausalLM", tmp_path / "model")
    driver = Driver(directory, dtype="bfloat16")
    before = logprobs(driver, PROMPTS[:2])
    shapes = {name: parameter.shape for name, parameter in driver.worker._model.named_parameters()}
    size = driver.worker._weights.num_bytes
    driver.worker.sleep(2)
    file = directory / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2])
    for _ in range(2):
        with pytest.raises(ModelLoadError, match="cannot read"):
            driver.worker.wake_up()
        model = driver.worker._model
        assert all(parameter.is_meta for parameter in model.parameters())
        assert {name: parameter.shape for name, parameter in model.named_parameters()} == shapes
        assert driver.worker._weights.num_bytes == size
    file.write_bytes(data)
    other = make_checkpoint("LlamaForCausalLM", tmp_path / "other")
    driver.worker.prepare_weights(WeightsSource(model=str(other), version=1), lambda loaded, total: None)
    driver.worker.wake_up()
    driver.worker.initialize_cache(num_blocks=600, num_cpu_blocks=4)
    after = logprobs(driver, PROMPTS[:2])
    assert all(np.array_equal(one, same) for one, same in zip(before, after, strict=True))
