"""Formats of compressed-tensors and bitsandbytes on numbers that can be counted by hand."""

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from pagoda_common.errors import ModelLoadError
from pagoda_kernels.linear.quantized_matrix import QuantizedMatrix
from pagoda_worker.loader.formats.bitsandbytes import EightBits, FourBits, bitsandbytes_format
from pagoda_worker.loader.formats.compressed_tensors import CompressedTensors
from tests.unit.worker.loader.packed_words import packed

# bitsandbytes.


def test_eight_bits_are_127ths_of_each_output_s_largest() -> None:
    stored = bitsandbytes_format({"load_in_8bit": True})
    assert isinstance(stored, EightBits)
    tensors = {"weight": torch.tensor([[127, -127], [64, 0]], dtype=torch.int8), "SCB": torch.tensor([2.54, 127.0])}
    found = stored.read(tensors)
    assert isinstance(found, QuantizedMatrix)
    assert (found.bits, found.group_size, found.zeros) == (8, 2, None)
    torch.testing.assert_close(found.dequantize(), torch.tensor([[2.54, -2.54], [64.0, 0.0]]))
    assert stored.shape({"SCB": [2], "weight": [2, 2]}) == [2, 2]
    stored.read(tensors | {"weight_format": torch.tensor(0)})
    with pytest.raises(ModelLoadError, match=r"weight_format is 2, must be 0"):
        stored.read(tensors | {"weight_format": torch.tensor(2)})
    with pytest.raises(ModelLoadError, match="data type is uint8, must be int8"):
        stored.read(tensors | {"weight": tensors["weight"].view(torch.uint8)})
    assert isinstance(bitsandbytes_format({"load_in_4bit": True, "load_in_8bit": False}), FourBits)


def state(**fields: Any) -> Tensor:
    text = json.dumps({"shape": [2, 3], "blocksize": 2, **fields})
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


FOUR = {
    "state": state(),
    "weight": torch.tensor([[0x12], [0x3F], [0x0A]], dtype=torch.uint8),
    "absmax": torch.tensor([1.0, 10.0, 100.0]),
    "quant_map": torch.arange(16.0),
}


def test_four_bits_are_looked_up_and_scaled_block_by_block() -> None:
    found = FourBits().read(FOUR)
    assert isinstance(found, Tensor)
    assert found.tolist() == [[1, 2, 30], [150, 0, 1000]]
    nested = {
        "state": state(nested_blocksize=2, nested_offset=0.5),
        "absmax": torch.tensor([0, 1, 255], dtype=torch.uint8),
        "nested_absmax": torch.tensor([2.0, 4.0]),
        "nested_quant_map": torch.arange(256.0),
    }
    found = FourBits().read({**FOUR, **nested})
    assert isinstance(found, Tensor)
    assert found.tolist() == [[0.5, 1.0, 7.5], [37.5, 0.0, 10205.0]]
    odd = FourBits().read({**FOUR, "state": state(shape=[1, 5], blocksize=8), "absmax": torch.tensor([2.0])})
    assert isinstance(odd, Tensor)
    assert odd.tolist() == [[2, 4, 6, 30, 0]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.zeros(4, 1, dtype=torch.uint8)}, r"4 bytes for \[2, 3\] numbers, must be 3"),
        ({"weight": torch.zeros(3, 1, dtype=torch.int8)}, "3 bytes for"),
        ({"absmax": torch.ones(2)}, r"2 values of absmax, must be 3 \(blocks of 2\)"),
        ({"quant_map": torch.ones(15)}, "quant_map has 15 values, must be 16"),
        ({"state": state(shape=[])}, r"quant_state has shape \[\], must be positive numbers"),
        ({"state": state(shape=[0, 6])}, "must be positive numbers"),
        ({"state": state(shape="2")}, "must be positive numbers"),
        ({"state": state(blocksize=0)}, "quant_state has blocksize 0, must be at least 1"),
        ({"state": torch.tensor([91, 93], dtype=torch.uint8)}, "quant_state is not a JSON object"),
        ({"state": torch.tensor([123], dtype=torch.uint8)}, "quant_state is not a JSON object"),
        ({"nested_absmax": torch.ones(2), "state": state(nested_blocksize=2)}, "do not tell how"),
    ],
)
def test_four_bits_that_do_not_fit_are_refused(change: dict[str, Tensor], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        FourBits().read({**FOUR, **change})


def test_nested_maxima_are_as_many_as_their_blocks() -> None:
    nested = {
        "state": state(nested_blocksize=2, nested_offset=0),
        "absmax": torch.zeros(3, dtype=torch.uint8),
        "nested_absmax": torch.ones(1),
        "nested_quant_map": torch.ones(256),
    }
    with pytest.raises(ModelLoadError, match="1 values of nested_absmax, must be 2"):
        FourBits().read({**FOUR, **nested})
    with pytest.raises(ModelLoadError, match="do not tell how"):
        FourBits().read({**FOUR, **nested, "nested_absmax": torch.ones(2), "nested_quant_map": torch.ones(255)})


def test_four_bits_are_found_by_their_state() -> None:
    stem = "a.weight"
    names = [stem, f"{stem}.absmax", f"{stem}.quant_map", f"{stem}.quant_state.bitsandbytes__nf4"]
    plain = {
        "state": names[3],
        "weight": stem,
        "absmax": f"{stem}.absmax",
        "quant_map": f"{stem}.quant_map",
    }
    assert FourBits().parts([*names, "b.weight", "c.quant_state.bitsandbytes__int3"]) == {stem: plain}
    nested = [f"{stem}.nested_absmax", f"{stem}.nested_quant_map"]
    assert FourBits().parts([*names, *nested]) == {
        stem: plain | {"nested_absmax": nested[0], "nested_quant_map": nested[1]}
    }
    with pytest.raises(ModelLoadError, match=r"is there, a\.weight\.quant_map is missing"):
        FourBits().parts([name for name in names if not name.endswith("quant_map")])
    assert FourBits().described_shape(state()) == [2, 3]
    assert (FourBits().makes_floats, FourBits().described_by) == (True, "state")


# compressed-tensors.


def compressed(scheme: dict[str, Any], form: str = "pack-quantized", **more: Any) -> CompressedTensors:
    return CompressedTensors({"format": form, "config_groups": {"group_0": {"weights": scheme, **more}}})


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("zero_kind", [None, "packed", "plain"])
def test_packed_integers_with_groups_and_zero_points(bits: int, zero_kind: str | None) -> None:
    generator = torch.Generator().manual_seed(bits)
    half = 1 << bits - 1
    codes = torch.randint(0, 1 << bits, (8, 16), generator=generator)
    scales = torch.rand(8, 4, generator=generator)
    zeros = torch.randint(0, 1 << bits, (8, 4), generator=generator)
    tensors = {"weight_packed": packed(codes.tolist(), bits), "weight_scale": scales}
    if zero_kind == "packed":
        tensors["weight_zero_point"] = packed(zeros.t().tolist(), bits).t().contiguous()
    elif zero_kind == "plain":
        tensors["weight_zero_point"] = (zeros - half).to(torch.int8)
    stored = compressed({"num_bits": bits, "group_size": 4, "strategy": "group"}).of("a.weight")
    assert stored.shape({"weight_packed": list(tensors["weight_packed"].shape)}) == [8, 16]
    found = stored.read(tensors)
    assert isinstance(found, QuantizedMatrix)
    offset = (zeros if zero_kind else torch.full_like(zeros, half)).repeat_interleave(4, 1)
    torch.testing.assert_close(found.dequantize(), (codes - offset) * scales.repeat_interleave(4, 1))
    shaped = stored.read(
        {
            "weight_packed": tensors["weight_packed"],
            "weight_scale": scales[:, :3],
            "weight_shape": torch.tensor([8, 12]),
        }
    )
    assert isinstance(shaped, QuantizedMatrix)
    assert shaped.numbers.shape == (8, 12)
    for shape in ([7, 16], [8, 17]):
        with pytest.raises(ModelLoadError, match="weight_shape is"):
            stored.read(tensors | {"weight_shape": torch.tensor(shape)})


@pytest.mark.parametrize("scale", [torch.tensor(2.0), torch.tensor([2.0]), torch.tensor([[2.0]])])
def test_plain_integers_with_one_scale(scale: Tensor) -> None:
    stored = compressed({"num_bits": 8, "strategy": "tensor"}, "int-quantized").of("a.weight")
    numbers = torch.tensor([[1, -2], [3, 4]], dtype=torch.int8)
    found = stored.read({"weight": numbers, "weight_scale": scale})
    assert isinstance(found, QuantizedMatrix)
    assert found.dequantize().tolist() == [[2, -4], [6, 8]]
    assert found.scales.shape == (2, 1), "every output has its own"
    found = stored.read({"weight": numbers, "weight_scale": scale, "weight_zero_point": torch.tensor([1])})
    assert isinstance(found, QuantizedMatrix)
    assert found.zeros is not None
    assert found.zeros.shape == (2, 1)
    assert found.dequantize().tolist() == [[0, -6], [4, 6]]
    with pytest.raises(ModelLoadError, match="data type is int16, must be int8"):
        stored.read({"weight": numbers.short(), "weight_scale": scale})


def test_integers_by_output_and_by_group() -> None:
    numbers = torch.tensor([[1, -2, 3], [3, 4, 5]], dtype=torch.int8)
    by_output = compressed({"num_bits": 8}, "int-quantized").of("a.weight")
    for scale in (torch.tensor([2.0, 3.0]), torch.tensor([[2.0], [3.0]])):
        found = by_output.read({"weight": numbers, "weight_scale": scale})
        assert isinstance(found, QuantizedMatrix)
        assert found.dequantize().tolist() == [[2, -4, 6], [9, 12, 15]]
    by_group = compressed({"num_bits": 8, "group_size": 2}, "int-quantized").of("a.weight")
    found = by_group.read({"weight": numbers, "weight_scale": torch.tensor([[2.0, 3.0], [4.0, 5.0]])})
    assert isinstance(found, QuantizedMatrix)
    assert found.dequantize().tolist() == [[2, -4, 9], [12, 16, 25]]


@pytest.mark.parametrize(
    ("scheme", "scale", "expected"),
    [
        ({"strategy": "tensor"}, torch.tensor([2.0]), [[2, 4, 6], [8, 10, 12]]),
        ({"strategy": "channel"}, torch.tensor([[1.0], [2.0]]), [[1, 2, 3], [8, 10, 12]]),
        ({"strategy": "group", "group_size": 2}, torch.tensor([[1.0, 10.0], [2.0, 20.0]]), [[1, 2, 30], [8, 10, 120]]),
        ({"strategy": "group"}, torch.tensor([[1.0], [2.0]]), [[1, 2, 3], [8, 10, 12]]),
        ({"strategy": "block", "block_structure": [2, 2]}, torch.tensor([[1.0, 10.0]]), [[1, 2, 30], [4, 5, 60]]),
        ({"strategy": "block"}, torch.tensor([[3.0]]), [[3, 6, 9], [12, 15, 18]]),
    ],
)
def test_floats_of_8_bits_by_each_strategy(scheme: dict[str, Any], scale: Tensor, expected: list[list[float]]) -> None:
    stored = compressed({"type": "float", "num_bits": 8, **scheme}, "float-quantized")
    assert stored.makes_floats
    weight = (torch.arange(6.0).reshape(2, 3) + 1).to(torch.float8_e4m3fn)
    found = stored.of("a.weight").read({"weight": weight, "weight_scale": scale})
    assert isinstance(found, Tensor)
    assert found.tolist() == expected
    with pytest.raises(ModelLoadError, match="data type is float32, must be FP8"):
        stored.of("a.weight").read({"weight": weight.float(), "weight_scale": scale})


def test_groups_are_found_by_name_then_pattern_then_class() -> None:
    packing, plain = {"num_bits": 4}, {"num_bits": 8}
    stored = CompressedTensors(
        {
            "format": "mixed-precision",
            "config_groups": {
                "all": {"weights": plain, "format": "int-quantized", "targets": ["Linear"]},
                "some": {"weights": packing, "format": "pack-quantized", "targets": [r"re:.*\.up$"]},
                "one": {"weights": plain, "format": "int-quantized", "targets": ["layers.1.up"]},
            },
        }
    )
    kinds = {
        name: type(stored.of(f"model.{name}.weight")).__name__
        for name in ("layers.0.up", "layers.1.up", "layers.0.down")
    }
    assert kinds == {"layers.0.up": "_PackedGroup", "layers.1.up": "_IntegerGroup", "layers.0.down": "_IntegerGroup"}
    assert not stored.makes_floats
    names = ["a.up.weight_packed", "a.up.weight_scale", "a.down.weight", "a.down.weight_scale", "b.weight"]
    assert stored.parts(names) == {
        "a.up.weight": {"weight_packed": names[0], "weight_scale": names[1]},
        "a.down.weight": {"weight": names[2], "weight_scale": names[3]},
    }
    narrow = compressed(packing, targets=["lm_head"])
    with pytest.raises(ModelLoadError, match=r"x\.weight is quantized, but no target"):
        narrow.parts(["x.weight_packed", "x.weight_scale"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "pack-quantized"}, "config_groups is None, must be at least one object by name"),
        ({"format": "pack-quantized", "config_groups": {}}, "config_groups is {}"),
        (
            {"format": "marlin-24", "config_groups": {"a": {"format": "int-quantized", "weights": {"num_bits": 8}}}},
            "format is 'marlin-24'",
        ),
        (
            {"format": "mixed-precision", "config_groups": {"a": {"weights": {}}}},
            "config_groups.a.format is 'mixed-pre",
        ),
        ({"format": "int-quantized", "config_groups": {"a": {}}}, "config_groups.a.weights is None, must be an object"),
        ({"format": "int-quantized", "config_groups": {"a": {"weights": {}, "targets": "Linear"}}}, "a list of names"),
        (
            {"format": "int-quantized", "config_groups": {"a": {"weights": {"num_bits": 8}, "output_activations": {}}}},
            "output_activations is {}",
        ),
        ({"format": "int-quantized", "config_groups": {"a": {"weights": {"type": "bool"}}}}, "weights.type is 'bool'"),
        (
            {"format": "float-quantized", "config_groups": {"a": {"weights": {"type": "float", "num_bits": 4}}}},
            "weights.num_bits is 4",
        ),
        ({"format": "int-quantized", "config_groups": {"a": {"weights": {"num_bits": 3}}}}, "num_bits is 3"),
        (
            {"format": "pack-quantized", "config_groups": {"a": {"weights": {"num_bits": 4, "strategy": "tensor"}}}},
            "weights.strategy is 'tensor', must be one of 'group', 'channel'",
        ),
        (
            {"format": "int-quantized", "config_groups": {"a": {"weights": {"num_bits": 8, "strategy": "block"}}}},
            "weights.strategy is 'block', must be one of 'group', 'channel', 'tensor'",
        ),
    ],
)
def test_a_scheme_that_is_not_read_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        CompressedTensors(options)
