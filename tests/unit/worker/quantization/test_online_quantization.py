"""Weights that become small integers while they are read: what is held, how close it stays, and how it moves."""

from pathlib import Path

import pytest
import torch

from pagoda_common.config.checkpoint.weights_source import WeightsSource
from pagoda_common.params.sampling_params import SamplingParams
from pagoda_kernels.linear.quantized_matrix import quantize
from pagoda_worker.models.layers import Matrix
from pagoda_worker.models.linear_method import PLAIN
from pagoda_worker.models.quantized_method import QuantizedLinearMethod
from tests.checkpoints import make_checkpoint
from tests.unit.worker.driver import Driver

PROMPTS = [[5 + (7 * row + 3 * at) % 90 for at in range(3 + 5 * row)] for row in range(9)]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("LlamaForCausalLM", tmp_path_factory.mktemp("llama"))


def matrices(driver: Driver) -> dict[str, Matrix]:
    modules = driver.worker._model.modules()
    return {module.prefix: module for module in modules if isinstance(module, Matrix)}


def logprobs(driver: Driver, prompts: list[list[int]] = PROMPTS) -> torch.Tensor:
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    sequences = driver.generate(prompts, params, max_tokens=1)
    return torch.cat([torch.as_tensor(chunk.logprobs.logprobs) for one in sequences for chunk in one.prompt_logprobs])


def quantized_in_place(driver: Driver, *, bits: int, group_size: int) -> None:
    """Put the floats into a float model that its quantized twin's integers stand for."""
    for prefix, layer in matrices(driver).items():
        if not layer.is_multiplied:
            continue
        is_head = prefix in ("lm_head", "embed_tokens")
        options = (8, layer.columns) if is_head else (bits, group_size or layer.columns)
        matrix = quantize(layer.weight, bits=options[0], group_size=options[1])
        layer.weight.data.copy_(matrix.dequantize())


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "MistralForCausalLM", "GPT2LMHeadModel"])
@pytest.mark.parametrize(("scheme", "bits", "group_size"), [("int8", 8, 0), ("int4-g32", 4, 32)])
def test_it_computes_what_its_integers_stand_for(
    architecture: str, scheme: str, bits: int, group_size: int, tmp_path: Path
) -> None:
    """Mistral's and GPT-2's heads are their embeddings: their rows are looked up as well."""
    checkpoint = make_checkpoint(architecture, tmp_path)
    driver, twin = Driver(checkpoint, quantization=scheme), Driver(checkpoint)
    quantized_in_place(twin, bits=bits, group_size=group_size)
    torch.testing.assert_close(logprobs(driver), logprobs(twin), atol=2e-4, rtol=0)
    layers = matrices(driver)
    for layer in layers.values():
        assert isinstance(layer.method, QuantizedLinearMethod) == layer.is_multiplied
        assert layer.is_multiplied or layer.method is PLAIN
    assert driver.facts.quantization == scheme
    held = sum(parameter.numel() * parameter.element_size() for parameter in driver.worker._model.parameters())
    assert driver.facts.weight_bytes == held < 4 * driver.facts.num_parameters
    assert driver.facts.num_parameters == twin.facts.num_parameters


def test_without_the_kernel_the_same_numbers_are_held_as_floats(llama: Path) -> None:
    driver = Driver(llama, quantization="int4-g32")
    floats = Driver(llama, quantization="int4-g32", reference_kernels=("quantized_linear",))
    assert not any(isinstance(layer.method, QuantizedLinearMethod) for layer in matrices(floats).values())
    assert floats.facts.weight_bytes == 4 * floats.facts.num_parameters
    torch.testing.assert_close(logprobs(floats), logprobs(driver), atol=2e-4, rtol=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layers_give_a_token_the_same_bits_in_every_batch(llama: Path, dtype: str) -> None:
    driver = Driver(llama, quantization="int4", dtype=dtype)
    for layer in (layer for layer in matrices(driver).values() if layer.is_multiplied):
        x = torch.randn(40, layer.columns, dtype=getattr(torch, dtype))
        together = layer.method.apply(layer, x)
        assert torch.equal(together, torch.cat([layer.method.apply(layer, x[row : row + 1]) for row in range(40)]))


def test_routers_stay_floats(tmp_path: Path) -> None:
    driver = Driver(make_checkpoint("Qwen2MoeForCausalLM", tmp_path), quantization="int8")
    kinds = {prefix: isinstance(layer.method, QuantizedLinearMethod) for prefix, layer in matrices(driver).items()}
    assert not any(kinds[prefix] for prefix in kinds if prefix.endswith((".router", ".shared_gate")))
    assert any(kinds[prefix] for prefix in kinds if ".experts." in prefix)


def test_integers_sleep_wake_up_and_give_way_to_others(llama: Path, tmp_path: Path) -> None:
    other = make_checkpoint("LlamaForCausalLM", tmp_path / "other", seed=1)
    driver, twin = Driver(llama, quantization="int4"), Driver(other, quantization="int4")
    first, second = logprobs(driver), logprobs(twin)
    worker = driver.worker

    def served() -> torch.Tensor:
        blocks = worker.determine_num_available_blocks()
        worker.initialize_cache(num_blocks=min(600, blocks.num_blocks), num_cpu_blocks=0)
        return logprobs(driver)

    assert worker.sleep(2) > driver.facts.weight_bytes
    worker.wake_up()
    assert torch.equal(served(), first)
    source = WeightsSource(model=str(other))
    worker.prepare_weights(source, lambda loaded, total: None)
    worker.reload_weights(source, lambda loaded, total: None)
    assert torch.equal(served(), second)
    worker.reload_weights(None, lambda loaded, total: None)
    assert torch.equal(served(), first)


def test_dummy_weights_are_quantized_as_well(llama: Path) -> None:
    driver = Driver(llama, quantization="int8", load_format="dummy")
    assert isinstance(matrices(driver)["layers.0.mlp.down_proj"].method, QuantizedLinearMethod)
    assert bool(logprobs(driver).isfinite().all())


def test_floats_that_a_layer_holds_become_integers_once(llama: Path) -> None:
    """Where a layer is not filled row by row, it holds its floats until they are all there."""
    layer = matrices(Driver(llama))["layers.0.mlp.down_proj"]
    expected = quantize(layer.weight, bits=8, group_size=layer.columns).dequantize()
    method = QuantizedLinearMethod(bits=8, group_size=0, quantizes_inputs=False)
    x = torch.randn(3, layer.columns)
    for _ in range(2):
        method.process_weights_after_loading(layer)
        assert layer.weight_scale is not None
        torch.testing.assert_close(method.apply(layer, x), x @ expected.T, atol=2e-4, rtol=1e-4)
