"""gpt-oss: experts in MXFP4 become the floats that they stand for."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagoda_common.errors import ModelLoadError
from pagoda_worker.models.gpt_oss import mxfp4_to_floats
from tests.checkpoints import make_checkpoint
from tests.unit.worker.driver import Driver
from tests.unit.worker.models.reference import make_prompts
from tests.unit.worker.quantization.scaled_checkpoints import write_mxfp4


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


def test_a_checkpoint_in_mxfp4_gives_the_tokens_of_its_floats(tmp_path: Path) -> None:
    floats, packed = write_mxfp4(tmp_path)
    outputs = [
        [sequence.output for sequence in Driver(directory).generate(make_prompts((5, 40)), max_tokens=12)]
        for directory in (floats, packed)
    ]
    assert outputs[0] == outputs[1]


def test_names_may_lack_the_prefix_of_the_model(tmp_path: Path) -> None:
    directory = make_checkpoint("GptOssForCausalLM", tmp_path)
    prompts = make_prompts((5, 40))
    before = [sequence.output for sequence in Driver(directory).generate(prompts, max_tokens=4)]
    tensors = {
        name.removeprefix("model."): tensor for name, tensor in load_file(directory / "model.safetensors").items()
    }
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    assert [sequence.output for sequence in Driver(directory).generate(prompts, max_tokens=4)] == before


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


@pytest.mark.parametrize("num_more", [-1, 1])
def test_stacked_experts_are_as_many_as_the_config_says(num_more: int, tmp_path: Path) -> None:
    directory = make_checkpoint("GptOssForCausalLM", tmp_path)
    tensors = load_file(directory / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj"
    num_experts = tensors[name].shape[0]
    tensors[name] = tensors[name].new_zeros(num_experts + num_more, *tensors[name].shape[1:])
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    problem = rf"experts.down_proj has \[{num_experts + num_more}\] experts, must have {num_experts}"
    with pytest.raises(ModelLoadError, match=problem):
        Driver(directory)
