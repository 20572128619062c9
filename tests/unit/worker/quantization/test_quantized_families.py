"""Every family computes with int8 and int4 as transformers does with the floats that these stand for."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pagoda_kernels.linear.quantized_matrix import quantize
from pagoda_worker.models.layers import Matrix
from pagoda_worker.models.quantized_method import DequantizedLinearMethod, QuantizedLinearMethod
from tests.checkpoints import make_checkpoint
from tests.unit.worker.driver import Driver
from tests.unit.worker.models.reference import logprobs_of
from tests.unit.worker.quantization.quantized_checkpoints import quantize_checkpoint
from tests.unit.worker.quantization.test_quantized_checkpoints import PROMPT, served_logprobs

TOLERANCE = 3e-4
"""Of log probabilities, in float32."""
ROUNDED = (QuantizedLinearMethod, DequantizedLinearMethod)
"""Held as integers, or as the floats that integers would stand for: of inputs in numbers that no kernel reads."""
FAMILIES = (
    "DeciLMForCausalLM",
    *("BambaForCausalLM", "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "FalconH1ForCausalLM"),
    *("FalconMambaForCausalLM", "Gemma3nForCausalLM", "Gemma4ForCausalLM", "Glm4MoeForCausalLM"),
    *("Glm4MoeLiteForCausalLM", "GptOssForCausalLM", "GraniteMoeHybridForCausalLM", "JambaForCausalLM"),
    *("HunYuanDenseV1ForCausalLM", "HunYuanMoEV1ForCausalLM"),
    *("Lfm2ForCausalLM", "Lfm2MoeForCausalLM", "Llama4ForCausalLM", "Mamba2ForCausalLM", "MambaForCausalLM"),
    *("MiniCPM3ForCausalLM", "MiniMaxM2ForCausalLM", "NemotronHForCausalLM", "Qwen3NextForCausalLM"),
    *("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM", "YoutuForCausalLM", "Zamba2ForCausalLM"),
)
IN_4_BITS = (
    *("DeepseekV2ForCausalLM", "Gemma3nForCausalLM", "JambaForCausalLM", "Llama4ForCausalLM"),
    "HunYuanDenseV1ForCausalLM",
)
SCHEMES = {"int8": (8, 0), "int4-g32": (4, 32)}
STORED = {
    "DeepseekV3ForCausalLM": {"method": "gptq"},
    "Qwen3NextForCausalLM": {"method": "gptq", "bits": 8, "group_size": -1},
    "Glm4MoeForCausalLM": {"method": "awq", "is_symmetric": False, "group_size": 16},
    "MiniMaxM2ForCausalLM": {"method": "awq", "is_symmetric": False, "group_size": 16},
    "NemotronHForCausalLM": {"method": "compressed-tensors"},
    "FalconH1ForCausalLM": {"method": "compressed-tensors", "is_symmetric": False},
    "GraniteMoeHybridForCausalLM": {"method": "gptq"},
    "Lfm2MoeForCausalLM": {"method": "compressed-tensors", "bits": 8, "group_size": -1},
    "HunYuanDenseV1ForCausalLM": {"method": "gptq", "group_size": 16},
    "HunYuanMoEV1ForCausalLM": {"method": "awq", "is_symmetric": False, "group_size": 16},
}

WIDTHS = {"DeepseekV3ForCausalLM": {"q_lora_rank": 32, "kv_lora_rank": 32}}
"""Of what is packed in words of eight."""


def write_twin(directory: Path, twin: Path, driver: Driver, *, bits: int, group_size: int) -> int:
    """Write the checkpoint with every matrix rounded that the driver rounds.

    Returns:
        How many tensors these are.
    """
    shutil.copytree(directory, twin)
    tensors = load_file(directory / "model.safetensors")
    model, count = driver.worker._model, 0
    names = model.weights(tensors)
    parameters = {source.name: (source.parameter, source.is_transposed) for source in names.sources}
    parameters |= {source.names[0]: (source.parameters[0], None) for source in names.made}
    for stored in tensors:
        name = next((stored.removeprefix(one) for one in names.prefixes if stored.startswith(one)), stored)
        name = name if name in parameters else names.aliases.get(name, name)
        parameter, is_transposed = parameters.get(name, ("", False))
        owner, _, leaf = parameter.rpartition(".")
        layer = model.get_submodule(owner)
        if leaf != "weight" or not isinstance(layer, Matrix) or not isinstance(layer.method, ROUNDED):
            continue
        is_head = layer.prefix.endswith(("lm_head", "embed_tokens")) and bits < 8
        options = (8, layer.columns) if is_head else (bits, group_size or layer.columns)
        tensor = tensors[stored]
        if is_transposed is None:  # stacked
            assert tensor.shape[1] != tensor.shape[2], "either dimension could be the inputs"
            is_transposed = tensor.shape[2] != layer.columns
        tensors[stored] = _rounded(tensor.transpose(-1, -2) if is_transposed else tensor, *options)
        if is_transposed:
            tensors[stored] = tensors[stored].transpose(-1, -2).contiguous()
        count += 1
    save_file(tensors, twin / "model.safetensors", {"format": "pt"})
    return count


def _rounded(weight: Tensor, bits: int, group_size: int) -> Tensor:
    if weight.dim() == 3:
        return torch.stack([_rounded(one, bits, group_size) for one in weight])
    return quantize(weight, bits=bits, group_size=group_size).dequantize()


@pytest.mark.parametrize(
    ("architecture", "scheme"), [*((one, "int8") for one in FAMILIES), *((one, "int4-g32") for one in IN_4_BITS)]
)
def test_floats_are_rounded_while_they_are_read(architecture: str, scheme: str, tmp_path: Path) -> None:
    directory, twin = make_checkpoint(architecture, tmp_path / "floats"), tmp_path / "twin"
    driver = Driver(directory, quantization=scheme)
    bits, group_size = SCHEMES[scheme]
    assert write_twin(directory, twin, driver, bits=bits, group_size=group_size) > 6
    torch.testing.assert_close(served_logprobs(driver), logprobs_of_twin(twin), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("architecture", STORED)
def test_integers_of_checkpoints(architecture: str, tmp_path: Path) -> None:
    source = make_checkpoint(architecture, tmp_path / "floats", **WIDTHS.get(architecture, {}))
    quantize_checkpoint(source, tmp_path / "quantized", tmp_path / "twin", **STORED[architecture])
    driver = Driver(tmp_path / "quantized")
    held = [one for one in driver.worker._model.modules() if isinstance(one, Matrix) and one.weight_scale is not None]
    assert held
    torch.testing.assert_close(served_logprobs(driver), logprobs_of_twin(tmp_path / "twin"), atol=TOLERANCE, rtol=0)


def logprobs_of_twin(directory: Path) -> Tensor:
    """[len(PROMPT) - 1] of each token of the prompt but the first, by transformers in float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    return logprobs_of(model, PROMPT)[torch.arange(len(PROMPT) - 1), torch.tensor(PROMPT[1:])]
