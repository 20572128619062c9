"""Matrices that are packed as they are read, some rows at a time by several threads: the same bytes as otherwise."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pagoda_common.errors import ModelLoadError
from pagoda_kernels.linear.compressed_weight import NUMBERS_OF_OUTLIER, compress_weight
from pagoda_kernels.native.library import load_native, native
from pagoda_worker.loader import parts
from pagoda_worker.models.layers import Matrix
from pagoda_worker.models.linear_method import COMPRESSED, PACKED
from tests.checkpoints import make_checkpoint
from tests.unit.worker.driver import Driver

load_native()
needs_compression = pytest.mark.skipif(native("compressed_linear") is None, reason="no AVX-512 BF16, or no compiler")


def parameters(driver: Driver) -> dict[str, Tensor]:
    model = driver.worker._model
    found = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for prefix, layer in model.named_modules():
        if isinstance(layer, Matrix) and layer.method is COMPRESSED:
            found[f"{prefix}.weight"] = used(layer.weight, layer.rows * layer.columns // NUMBERS_OF_OUTLIER)
    return found


def used(compressed: Tensor, capacity: int) -> Tensor:
    """The bytes of a compressed matrix before the room that its outliers leave."""
    num_outliers = int(compressed[: compressed.numel() - 4 * capacity][-4:].view(torch.int32))
    return compressed[: compressed.numel() - 4 * (capacity - num_outliers)]


def same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(bits(one), bits(other))


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


@pytest.fixture
def num_filled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each piece that a sink took; pieces are as small as they may be."""
    seen: list[int] = []
    open_sink = Matrix.row_sink

    def noted(self: Matrix, allocate: Any) -> Any:
        sink = open_sink(self, allocate)
        if sink is not None:
            fill = sink.fill

            def counted(rows: Tensor, first_row: int) -> None:
                seen.append(rows.shape[0])
                fill(rows, first_row)

            monkeypatch.setattr(sink, "fill", counted)
        return sink

    monkeypatch.setattr(Matrix, "row_sink", noted)
    monkeypatch.setattr(parts, "CHUNK_BYTES", 1)
    monkeypatch.setattr(parts, "PART_BYTES", 1)
    return seen


@pytest.fixture
def without_sinks(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    return lambda: monkeypatch.setattr(Matrix, "row_sink", lambda self, allocate: None)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3MoeForCausalLM", "FalconForCausalLM"])
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_the_bytes_are_those_of_matrices_that_are_packed_as_a_whole(
    architecture: str,
    quantization: str | None,
    stored: torch.dtype,
    tmp_path: Path,
    num_filled: list[int],
    without_sinks: Callable[[], None],
) -> None:
    if native("quantized_linear" if quantization else "compressed_linear") is None:
        pytest.skip("no AVX-512 BF16, or no compiler")
    directory = make_checkpoint(architecture, tmp_path)
    tensors = {name: tensor.to(stored) for name, tensor in load_file(directory / "model.safetensors").items()}
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    driver = Driver(directory, dtype="bfloat16", quantization=quantization)
    assert len(num_filled) > 8
    assert max(num_filled) == 32
    without_sinks()
    num_filled.clear()
    whole = parameters(Driver(directory, dtype="bfloat16", quantization=quantization))
    assert not num_filled
    streamed = parameters(driver)
    assert streamed.keys() == whole.keys()
    assert [name for name in whole if not same(streamed[name], whole[name])] == []


@needs_compression
def test_a_matrix_that_turns_out_not_to_fit_is_read_once_more(tmp_path: Path, num_filled: list[int]) -> None:
    directory = make_checkpoint("LlamaForCausalLM", tmp_path)
    tensors = load_file(directory / "model.safetensors")
    name = "model.layers.1.self_attn.o_proj.weight"
    tensors[name] *= torch.exp2(-(torch.arange(tensors[name].numel()) % 60).float()).view(tensors[name].shape)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    model = Driver(directory, dtype="bfloat16").worker._model
    layer = model.layers[1].attention.o_proj
    assert layer.method is PACKED
    assert model.layers[0].attention.o_proj.method is COMPRESSED
    expected = torch.nn.functional.linear(torch.eye(layer.columns), tensors[name].to(torch.bfloat16).float())
    assert torch.equal(layer(torch.eye(layer.columns, dtype=torch.bfloat16)).float(), expected)


@needs_compression
def test_parts_of_a_parameter_lie_one_after_the_other(tmp_path: Path, num_filled: list[int]) -> None:
    directory = make_checkpoint("LlamaForCausalLM", tmp_path)
    tensors = load_file(directory / "model.safetensors")
    model = Driver(directory, dtype="bfloat16").worker._model
    names = [f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up")]
    expected = compress_weight(torch.cat([tensors[name] for name in names]).to(torch.bfloat16))
    assert expected is not None
    layer = model.layers[0].mlp.up_proj
    capacity = layer.rows * layer.columns // NUMBERS_OF_OUTLIER
    assert torch.equal(used(layer.weight, capacity), used(expected, capacity))


def test_a_file_that_ends_within_a_matrix_is_one_error(tmp_path: Path) -> None:
    directory = make_checkpoint("LlamaForCausalLM", tmp_path)
    driver = Driver(directory, dtype="bfloat16", quantization="int8")
    driver.worker.sleep(2)
    file = directory / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[: len(data) * 3 // 4])
    with pytest.raises(ModelLoadError, match="cannot read"):
        driver.worker.wake_up()
    file.write_bytes(data)
    driver.worker.wake_up()
    assert not any(parameter.is_meta for parameter in driver.worker._model.parameters())
