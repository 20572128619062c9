"""Checkpoints of every architecture: each tensor is accounted for, in one file or in several, and in 16 bits too."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagoda_common.errors import ModelLoadError
from pagoda_common.params.sampling_params import SamplingParams
from tests.checkpoints import ARCHITECTURES, make_checkpoint
from tests.unit.worker.driver import Driver
from tests.unit.worker.models.reference import make_prompts

TOLERANCE = {"bfloat16": 0.6, "float16": 0.08}
"""On log probabilities, on average, against float32: mantissas of 8 and 11 bits, layers with large weights."""


@pytest.fixture(scope="module", params=ARCHITECTURES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(request.param, tmp_path_factory.mktemp("checkpoint"))


def damaged(checkpoint: Path, directory: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """A copy of a checkpoint with other tensors, in two files."""
    for path in checkpoint.glob("*.json"):
        (directory / path.name).write_bytes(path.read_bytes())
    names = sorted(tensors)
    weight_map = {}
    for number, part in enumerate((names[::2], names[1::2])):
        file = f"model-{number}.safetensors"
        save_file({name: tensors[name].contiguous() for name in part}, directory / file)
        weight_map |= dict.fromkeys(part, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory


def test_several_files_give_the_same_model(checkpoint: Path, tmp_path: Path) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    whole, sharded = Driver(checkpoint), Driver(damaged(checkpoint, tmp_path, tensors))
    prompts = make_prompts((5, 17))
    outputs = [[tracked.output for tracked in driver.generate(prompts)] for driver in (whole, sharded)]
    assert outputs[0] == outputs[1]


def test_missing_and_unexpected_tensors_are_named(checkpoint: Path, tmp_path: Path) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    missing = next(name for name in sorted(tensors) if ".1." in name)
    del tensors[missing]
    tensors["model.layers.0.adapter.weight"] = torch.zeros(2)
    with pytest.raises(ModelLoadError) as raised:
        Driver(damaged(checkpoint, tmp_path, tensors))
    assert f"missing tensors: {missing};" in raised.value.message
    assert "unexpected tensors: model.layers.0.adapter.weight" in raised.value.message


def test_tensors_of_the_wrong_shape_are_named(checkpoint: Path, tmp_path: Path) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    matrices = [name for name in tensors if ".1." in name and tensors[name].dim() <= 2]
    wrong = max(matrices, key=lambda name: (tensors[name].dim(), name))
    rows, columns = tensors[wrong].shape
    tensors[wrong] = torch.zeros(rows + 1, columns)
    with pytest.raises(ModelLoadError) as raised:
        Driver(damaged(checkpoint, tmp_path, tensors))
    assert f"{wrong} has shape [{rows + 1}, {columns}], must be [{rows}, {columns}]" in raised.value.message


def prompt_logprobs(checkpoint: Path, dtype: str) -> torch.Tensor:
    """[32] of the tokens of a prompt of 33."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    (sequence,) = Driver(checkpoint, dtype=dtype).generate(make_prompts((33,)), params, max_tokens=1)
    (chunk,) = sequence.prompt_logprobs
    starts = chunk.logprobs.counts.cumsum() - chunk.logprobs.counts
    return torch.from_numpy(chunk.logprobs.logprobs[starts])


@pytest.fixture(scope="module")
def exact(checkpoint: Path) -> torch.Tensor:
    """The same in 32 bits."""
    return prompt_logprobs(checkpoint, "float32")


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_16_bits_are_close_to_32(checkpoint: Path, exact: torch.Tensor, dtype: str) -> None:
    difference = prompt_logprobs(checkpoint, dtype) - exact
    assert float(difference.abs().mean()) < TOLERANCE[dtype]
