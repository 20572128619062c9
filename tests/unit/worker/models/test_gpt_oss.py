"""gpt-oss: experts in MXFP4 become the floats that they stand for."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagoda_common.errors import ModelLoadError
from pagoda_worker.models.gpt_oss import FP4_VALUES, mxfp4_to_floats
from tests.checkpoints import make_checkpoint
from tests.unit.worker.driver import Driver
from tests.unit.worker.models.reference import make_prompts


def test_codes_and_scales_become_floats() -> None:
    blocks = torch.tensor([[[0x21, 0xF7] + [0] * 14, [0x99] * 16]], dtype=torch.uint8)
    scales = torch.tensor([[127, 130]], dtype=torch.uint8)
    values = mxfp4_to_floats([blocks, scales])
    assert values.shape == (1, 64)
    assert values[0, :5].tolist() == [0.5, 1.0, 6.0, -6.0, 0.0]
    assert values[0, 32:].tolist() == [-4.0] * 32


def test_scales_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ModelLoadError, match="do not fit scales"):
        mxfp4_to_floats([torch.zeros(2, 3, 16, dtype=torch.uint8), torch.zeros(2, 2, dtype=torch.uint8)])


def _codes(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Blocks and scales near [experts, rows, columns], and the floats that they stand for."""
    groups = weights.unflatten(-1, (-1, 32))
    exponents = (groups.abs().amax(-1) / 6).log2().ceil()
    levels = torch.tensor(FP4_VALUES)
    scaled = groups / exponents.exp2()[..., None]
    codes = (scaled[..., None] - levels).abs().argmin(-1).to(torch.uint8)
    floats = (levels[codes.long()] * exponents.exp2()[..., None]).flatten(-2)
    pairs = codes.unflatten(-1, (-1, 2))
    return pairs[..., 0] | pairs[..., 1] << 4, (exponents + 127).to(torch.uint8), floats


def test_a_checkpoint_in_mxfp4_gives_the_tokens_of_its_floats(tmp_path: Path) -> None:
    options = {"hidden_size": 64, "intermediate_size": 96}
    floats, packed = (make_checkpoint("GptOssForCausalLM", tmp_path / name, **options) for name in ("floats", "packed"))
    tensors, of_floats = load_file(packed / "model.safetensors"), {}
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        blocks, scales, values = _codes(tensors.pop(name).transpose(1, 2))
        tensors |= {f"{name}_blocks": blocks.contiguous(), f"{name}_scales": scales}
        of_floats[name] = values.transpose(1, 2).contiguous()
    save_file(tensors, packed / "model.safetensors", {"format": "pt"})
    save_file(load_file(floats / "model.safetensors") | of_floats, floats / "model.safetensors", {"format": "pt"})
    config = json.loads((packed / "config.json").read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}
    (packed / "config.json").write_text(json.dumps(config))
    outputs = [
        [sequence.output for sequence in Driver(directory).generate(make_prompts((5, 40)), max_tokens=12)]
        for directory in (floats, packed)
    ]
    assert outputs[0] == outputs[1]


def test_stacked_experts_of_the_wrong_shape_are_named(tmp_path: Path) -> None:
    directory = make_checkpoint("GptOssForCausalLM", tmp_path)
    tensors = load_file(directory / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj"
    tensors[name] = torch.zeros(5, 80, 49)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"experts.down_proj make .* of shape \[49, 80\], must be \[48, 80\]"):
        Driver(directory)
    del tensors[name]
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"experts.down_proj"):
        Driver(directory)
