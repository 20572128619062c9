"""What few checkpoints have: filled-up zero points, orders of inputs, names that differ a little, nested maxima."""

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from pagoda_common.errors import ModelLoadError
from pagoda_kernels.linear.quantized_matrix import QuantizedMatrix
from pagoda_worker.loader.formats.bitsandbytes import EightBits, FourBits, bitsandbytes_format
from pagoda_worker.loader.formats.choose import stored_format
from pagoda_worker.loader.formats.compressed_tensors import CompressedTensors
from pagoda_worker.loader.formats.gptq_awq import Awq, Gptq
from pagoda_worker.loader.formats.integers import alike
from pagoda_worker.loader.formats.stored_format import StoredFormat
from tests.unit.worker.loader.packed_words import packed

CODES = torch.randint(0, 16, (6, 8), generator=torch.Generator().manual_seed(1))
ZEROS = torch.randint(1, 16, (6, 2), generator=torch.Generator().manual_seed(2))
SCALES = torch.rand(6, 2, generator=torch.Generator().manual_seed(3))
"""Six outputs, of which a word has room for eight; eight inputs in two groups."""


def group_of(**scheme: Any) -> StoredFormat:
    form = scheme.pop("form", "pack-quantized")
    return CompressedTensors({"format": form, "config_groups": {"a": {"weights": scheme}}}).of("a.weight")


def expected(groups: Tensor) -> Tensor:
    return (CODES - ZEROS[:, groups]) * SCALES[:, groups]


USUAL = torch.arange(8) // 4


def test_zero_points_that_fill_up_a_word_are_left_out() -> None:
    gptq = Gptq({"bits": 4, "group_size": 4}).read(
        {"qweight": packed(CODES.tolist(), 4).t().contiguous(), "qzeros": packed((ZEROS - 1).t().tolist(), 4),
         "scales": SCALES.t().contiguous()}
    )  # fmt: skip
    compressed = group_of(num_bits=4, group_size=4).read(
        {
            "weight_packed": packed(CODES.tolist(), 4),
            "weight_scale": SCALES,
            "weight_zero_point": packed(ZEROS.t().tolist(), 4).t().contiguous(),
        }
    )
    for found in (gptq, compressed):
        assert isinstance(found, QuantizedMatrix)
        torch.testing.assert_close(found.dequantize(), expected(USUAL))


def test_compressed_tensors_may_have_an_order_of_inputs() -> None:
    order = torch.tensor([1, 0, 0, 1, 1, 0, 1, 0])
    names = ("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx")
    zeros = (ZEROS - 8).to(torch.int8)
    found = group_of(num_bits=4, group_size=4).read(
        dict(zip(names, (packed(CODES.tolist(), 4), SCALES, zeros, order), strict=True))
    )
    torch.testing.assert_close(found, expected(order))
    numbers = (CODES - 8).to(torch.int8)
    found = group_of(form="int-quantized", num_bits=8, group_size=4).read(
        {"weight": numbers, "weight_scale": SCALES, "weight_zero_point": zeros, "weight_g_idx": order}
    )
    torch.testing.assert_close(found, expected(order))


@pytest.mark.parametrize(
    ("form", "leaves"),
    [
        ("pack-quantized", ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx")),
        ("int-quantized", ("weight", "weight_scale", "weight_zero_point", "weight_g_idx")),
    ],
)
def test_all_tensors_of_a_matrix_are_found(form: str, leaves: tuple[str, ...]) -> None:
    stored = CompressedTensors({"format": form, "config_groups": {"a": {"weights": {"num_bits": 8}}}})
    names = [f"x.{leaf}" for leaf in leaves]
    assert stored.parts([*names, "x.bias", "y.weight"]) == {"x.weight": dict(zip(leaves, names, strict=True))}
    if form == "pack-quantized":
        with pytest.raises(ModelLoadError, match=r"^x\.weight_packed is there, x\.weight_scale is missing$"):
            stored.of("x.weight").parts(["x.weight_packed"])


@pytest.mark.parametrize("target", ["Linear", "LinearBase", "FusedMoE"])
def test_classes_of_layers_are_all_that_is_quantized(target: str) -> None:
    scheme = {"weights": {"num_bits": 8}, "targets": [target]}
    stored = CompressedTensors({"format": "int-quantized", "config_groups": {"a": scheme}})
    assert list(stored.parts(["x.weight", "x.weight_scale"])) == ["x.weight"]


@pytest.mark.parametrize(
    ("target", "name", "fits"),
    [
        ("up", "up", True),
        ("up", "layers.0.up", True),
        ("up", "layers.0.gate_up", False),
        ("layers.1.up", "layers.11.up", False),
        ("re:up", "up_proj", True),
        ("re:up", "layers.0.up", False),
        ("re:.*up", "layers.0.up", True),
        (".*up", "layers.0.up", False),
        ("Embedding", "embed", False),
    ],
)
def test_a_target_is_the_end_of_a_name_or_a_pattern_of_its_beginning(target: str, name: str, fits: bool) -> None:
    scheme = {"weights": {"num_bits": 8}, "targets": [target]}
    stored = CompressedTensors({"format": "int-quantized", "config_groups": {"a": scheme}})
    names = [f"{name}.weight", f"{name}.weight_scale"]
    if fits:
        assert list(stored.parts(names)) == names[:1]
        return
    with pytest.raises(ModelLoadError, match=r"no target of quantization_config\.config_groups fits it"):
        stored.parts(names)


def test_a_dynamic_rule_of_gptq_matches_from_the_beginning_of_a_name() -> None:
    stored = Gptq({"bits": 4, "group_size": 8, "dynamic": {r"+:layers\.1": {"bits": 8}}})
    kinds = [stored.of(f"{name}.weight") is stored for name in ("layers.1.up", "layers.10.up", "model.layers.1.up")]
    assert kinds == [False, False, True]


def test_a_rule_has_what_it_does_not_change_from_all() -> None:
    options = {"bits": 2, "group_size": 4, "checkpoint_format": "gptq_v2", "dynamic": {"a": {"bits": 4}}}
    found = Gptq(options).of("a.weight").read(
        {"qweight": packed(CODES.tolist(), 4).t().contiguous(), "qzeros": packed(ZEROS.t().tolist(), 4),
         "scales": SCALES.t().contiguous()}
    )  # fmt: skip
    assert isinstance(found, QuantizedMatrix)
    torch.testing.assert_close(found.dequantize(), expected(USUAL))


@pytest.mark.parametrize(
    ("options", "group_size"),
    [
        ({"group_size": 4}, 4),
        ({"q_group_size": 4}, 4),
        ({"group_size": 4, "q_group_size": 16}, 4),
        ({"w_bit": 4, "q_group_size": 4}, 4),
        ({"bits": 4, "w_bit": 8, "group_size": 4}, 4),
        ({}, 8),
        ({"group_size": -1}, 8),
    ],
)
def test_awq_s_options_have_an_old_name_and_a_new_one(options: dict[str, Any], group_size: int) -> None:
    count = 8 // group_size
    zeros = torch.nn.functional.pad(ZEROS[:, :count], (0, 8 - count))
    tensors = {"qweight": packed(CODES.tolist(), 4), "qzeros": packed(zeros.tolist(), 4), "scales": SCALES[:, :count]}
    found = Awq({"version": "gemv", **options}).read(tensors)
    assert isinstance(found, QuantizedMatrix)
    assert found.group_size == group_size


def test_groups_that_do_not_divide_each_other_become_as_small_as_both_need() -> None:
    def matrix(group_size: int) -> QuantizedMatrix:
        scales = torch.arange(1.0, 1 + 12 // group_size)[None]
        numbers = torch.arange(12, dtype=torch.int8)[None]
        return QuantizedMatrix(numbers=numbers, scales=scales, zeros=None, bits=4, group_size=group_size)

    matrices = [matrix(4), matrix(6)]
    made = alike(matrices)
    assert [each.group_size for each in made] == [2, 2]
    for one, other in zip(made, matrices, strict=True):
        assert torch.equal(one.dequantize(), other.dequantize())


# bitsandbytes.


def test_both_kinds_of_four_bits_are_known() -> None:
    for kind in ("nf4", "fp4"):
        names = [f"a.weight{end}" for end in ("", ".absmax", ".quant_map", f".quant_state.bitsandbytes__{kind}")]
        assert list(FourBits().parts(names)) == ["a.weight"]
    assert isinstance(bitsandbytes_format({"load_in_4bit": True, "load_in_8bit": True}), FourBits)


def test_the_tensors_of_eight_bits() -> None:
    names = {"SCB": "a.SCB", "weight": "a.weight", "weight_format": "a.weight_format"}
    assert EightBits().parts([*names.values(), "b.weight"]) == {"a.weight": names}
    with pytest.raises(ModelLoadError, match=r"^a\.SCB is there, a\.weight is missing$"):
        EightBits().parts(["a.SCB"])


def state(**fields: Any) -> Tensor:
    text = json.dumps({"shape": [1, 4], "blocksize": 2, "nested_blocksize": 2, "nested_offset": 0.5, **fields})
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


NESTED = {
    "state": state(),
    "weight": torch.tensor([[0x12], [0x3F]], dtype=torch.uint8),
    "absmax": torch.tensor([3, 4], dtype=torch.uint8),
    "quant_map": torch.arange(16.0),
    "nested_absmax": torch.tensor([2.0]),
    "nested_quant_map": torch.arange(256.0),
}


@pytest.mark.parametrize(
    "change",
    [
        {"nested_quant_map": None},
        {"nested_quant_map": torch.ones(255)},
        {"absmax": torch.tensor([3.0, 4.0])},
        {"state": state(nested_offset=None)},
        {"state": state(nested_offset="0")},
    ],
    ids=["no map", "a short map", "floats", "no offset", "a text"],
)
def test_nested_maxima_need_each_of_their_parts(change: dict[str, Tensor | None]) -> None:
    found = FourBits().read(NESTED)
    assert isinstance(found, Tensor)
    assert found.tolist() == [[6.5, 13.0, 3 * 8.5, 15 * 8.5]]
    tensors = {name: tensor for name, tensor in {**NESTED, **change}.items() if tensor is not None}
    with pytest.raises(ModelLoadError, match=r"^absmax is quantized, but nested_quant_map or nested_offset do not"):
        FourBits().read(tensors)
    with pytest.raises(ModelLoadError, match=r"^quant_state has nested_blocksize 0, must be at least 1$"):
        FourBits().read({**NESTED, "state": state(nested_blocksize=0)})


def test_the_newer_name_of_the_options_goes_first() -> None:
    both: Any = {"quantization_config": {"quant_method": "fp8"}, "compression_config": {"quant_method": "awq"}}
    found = stored_format(both)
    assert found is not None
    assert found[0] == "fp8"
