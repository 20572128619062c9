"""Formats of quantized matrices on numbers that can be counted by hand: bits, groups, zero points, shapes, refusals."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from pagoda_common.errors import ModelLoadError
from pagoda_kernels.linear.quantized_matrix import QuantizedMatrix
from pagoda_worker.loader.formats.bitsandbytes import EightBits, bitsandbytes_format
from pagoda_worker.loader.formats.choose import METHODS, stored_format
from pagoda_worker.loader.formats.gptq_awq import Awq, Gptq
from pagoda_worker.loader.formats.integers import alike, integer_matrix, regroup, repeated, signed, unpack_bits
from pagoda_worker.loader.formats.scaled import SCALES_OF_OTHERS, Float8, modelopt_format, scale_blocks
from pagoda_worker.loader.formats.stored_format import StoredFormat, read_bits, read_group_size
from pagoda_worker.models.hf_config import HfConfig
from tests.unit.worker.loader.packed_words import packed


def matrix(
    numbers: list[list[int]], scales: list[list[float]], zeros: Any = None, *, group_size: int
) -> QuantizedMatrix:
    return QuantizedMatrix(
        numbers=torch.tensor(numbers, dtype=torch.int8),
        scales=torch.tensor(scales, dtype=torch.float32),
        zeros=None if zeros is None else torch.tensor(zeros, dtype=torch.float32),
        bits=8,
        group_size=group_size,
    )


# Bits.


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_codes_come_out_of_words_in_their_order(bits: int) -> None:
    generator = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 1 << bits, (3, 96), generator=generator)
    found = unpack_bits(packed(codes.tolist(), bits), bits)
    assert found.dtype == torch.uint8
    assert torch.equal(found.int(), codes.int())


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_numbers_are_codes_less_half_of_their_range(bits: int) -> None:
    codes = torch.arange(1 << bits, dtype=torch.uint8)
    found = signed(codes, bits)
    assert found.dtype == torch.int8
    assert found.tolist() == list(range(-(1 << bits - 1), 1 << bits - 1))


@pytest.mark.parametrize(("bits", "kept"), [(2, 4), (3, 4), (4, 4), (8, 8)])
def test_a_matrix_has_as_many_bits_as_the_kernels_know(bits: int, kept: int) -> None:
    made = integer_matrix(torch.ones(2, 4, dtype=torch.int8), torch.ones(2, 1).half(), None, bits=bits, group_size=0)
    assert (made.bits, made.group_size, made.scales.dtype) == (kept, 4, torch.float32)


def test_zero_points_that_are_all_zero_are_none() -> None:
    numbers, scales = torch.ones(2, 5, dtype=torch.int8), torch.ones(2, 3)
    assert integer_matrix(numbers, scales, torch.zeros(2, 3), bits=4, group_size=2).zeros is None
    zeros = torch.zeros(2, 3)
    zeros[1, 2] = 1
    made = integer_matrix(numbers, scales, zeros, bits=4, group_size=2)
    assert made.zeros is not None
    assert torch.equal(made.zeros, zeros)


@pytest.mark.parametrize(("num_groups", "zero_groups"), [(2, None), (4, None), (3, 2), (3, 4)])
def test_another_number_of_groups_than_the_inputs_have_is_refused(num_groups: int, zero_groups: int | None) -> None:
    numbers = torch.ones(2, 5, dtype=torch.int8)
    zeros = None if zero_groups is None else torch.zeros(2, zero_groups)
    message = f"{num_groups} groups of scales for 5 inputs, must be 3 .group_size 2"
    with pytest.raises(ModelLoadError, match=message):
        integer_matrix(numbers, torch.ones(2, num_groups), zeros, bits=4, group_size=2)
    with pytest.raises(ModelLoadError):
        integer_matrix(numbers, torch.ones(3, 3), None, bits=4, group_size=2)


def test_an_order_of_inputs_makes_floats_unless_it_is_the_usual_one() -> None:
    made = matrix([[1, 2, 3, 4], [5, 6, 7, 8]], [[1.0, 10.0], [2.0, 20.0]], [[1, 0], [0, 2]], group_size=2)
    assert regroup(made, None) is made
    assert regroup(made, torch.tensor([0, 0, 1, 1], dtype=torch.int32)) is made
    floats = regroup(made, torch.tensor([1, 0, 1, 0]))
    assert isinstance(floats, Tensor)
    assert floats.tolist() == [[10, 1, 30, 3], [60, 12, 100, 16]]
    plain = matrix([[1, 2, 3, 4]], [[1.0, 10.0]], group_size=2)
    assert regroup(plain, torch.tensor([1, 0, 1, 0])).tolist() == [[10, 2, 30, 4]]  # type: ignore[union-attr]  # floats


@pytest.mark.parametrize("groups", [[0, 0, 2, 1], [-1, 0, 1, 1], [0, 1, 1]])
def test_an_input_in_no_group_is_refused(groups: list[int]) -> None:
    made = matrix([[1, 2, 3, 4]], [[1.0, 10.0]], group_size=2)
    with pytest.raises(ModelLoadError, match="must be one of 2 groups for each of 4 inputs"):
        regroup(made, torch.tensor(groups))


def test_matrices_become_alike_with_the_smallest_groups_and_the_most_bits() -> None:
    one = matrix([[1, 2, 3, 4]], [[2.0]], [[1.0]], group_size=4)
    other = replace(matrix([[5, 6, 7, 7]], [[3.0, 4.0]], group_size=2), bits=4)
    first, second = alike([one, other])
    assert [(each.bits, each.group_size) for each in (first, second)] == [(8, 2)] * 2
    assert (first.scales.tolist(), first.zeros.tolist()) == ([[2, 2]], [[1, 1]])  # type: ignore[union-attr]  # it has some
    assert (second.scales.tolist(), second.zeros) == ([[3, 4]], None)
    uneven = matrix([[1, 2, 3]], [[1.0, 2.0]], group_size=2)
    assert [each.group_size for each in alike([one, uneven])] == [4, 2], "the last group is smaller"
    assert repeated(one, 3).scales.tolist() == [[2, 2, 2]]


# GPTQ and AWQ.


@pytest.mark.parametrize("form", [None, "gptq", "gptq_v2"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_gptq_stores_columns_of_words_and_zero_points_one_too_low(form: str | None, bits: int) -> None:
    generator = torch.Generator().manual_seed(bits)
    num_inputs, num_outputs, group_size = 64, 32, 32
    codes = torch.randint(0, 1 << bits, (num_outputs, num_inputs), generator=generator)
    zeros = torch.randint(1, 1 << bits, (2, num_outputs), generator=generator)
    scales = torch.rand(2, num_outputs, generator=generator)
    options: dict[str, Any] = {"bits": bits, "group_size": group_size}
    if form is not None:
        options["checkpoint_format"] = form
    stored = Gptq(options)
    tensors = {
        "qweight": packed(codes.tolist(), bits).t().contiguous(),
        "qzeros": packed((zeros - int(form != "gptq_v2")).tolist(), bits),
        "scales": scales.half(),
    }
    assert stored.shape({name: list(tensor.shape) for name, tensor in tensors.items()}) == [num_outputs, num_inputs]
    found = stored.read(tensors)
    assert isinstance(found, QuantizedMatrix)
    expected = (codes - zeros.t().repeat_interleave(group_size, 1)) * scales.half().float().t().repeat_interleave(
        group_size, 1
    )
    torch.testing.assert_close(found.dequantize(), expected)
    order = torch.arange(num_inputs) % 2
    floats = stored.read(tensors | {"g_idx": order})
    assert isinstance(floats, Tensor)
    torch.testing.assert_close(floats, (codes - zeros.t()[:, order]) * scales.half().float().t()[:, order])


def test_gptq_s_dynamic_rules_count_in_their_order() -> None:
    options = {
        "bits": 4,
        "group_size": 128,
        "dynamic": {r"-:lm_head": {}, r"+:.*\.down": {"bits": 8}, r".*layers\.0": {"bits": 2, "group_size": -1}},
    }
    stored = Gptq(options)
    down = stored.of("model.layers.0.down.weight")
    first, other = stored.of("model.layers.0.up.weight"), stored.of("model.layers.1.up.weight")
    assert isinstance(down, Gptq)
    assert isinstance(first, Gptq)
    assert (down._bits, down._group_size, first._bits, first._group_size) == (8, 128, 2, 0)
    assert other is stored
    assert stored.of("lm_head.weight") is stored
    for wrong in ([], {"a": 1}):
        with pytest.raises(ModelLoadError, match="dynamic"):
            Gptq({"bits": 4, "dynamic": wrong or [1]})
    with pytest.raises(ModelLoadError, match="must be patterns"):
        Gptq({"bits": 4, "dynamic": {"(": {}}})


@pytest.mark.parametrize("version", ["gemm", "GEMV", None])
def test_awq_stores_rows_or_columns_of_words(version: str | None) -> None:
    generator = torch.Generator().manual_seed(1)
    num_inputs, num_outputs, group_size = 32, 16, 16
    codes = torch.randint(0, 16, (num_outputs, num_inputs), generator=generator)
    zeros = torch.randint(0, 16, (num_outputs, 2), generator=generator)
    scales = torch.rand(num_outputs, 2, generator=generator)
    options: dict[str, Any] = {"bits": 4, "group_size": group_size}
    if version is not None:
        options["version"] = version
    stored = Awq(options)
    if version == "GEMV":
        filled = torch.nn.functional.pad(zeros, (0, 6))
        tensors = {
            "qweight": packed(codes.tolist(), 4),
            "qzeros": packed(filled.tolist(), 4),
            "scales": torch.nn.functional.pad(scales, (0, 6)),
        }
    else:
        order = [0, 2, 4, 6, 1, 3, 5, 7]  # output of each place in a word
        places = [8 * (number // 8) + order[number % 8] for number in range(num_outputs)]
        tensors = {
            "qweight": packed(codes.t()[:, places].tolist(), 4),
            "qzeros": packed(zeros.t()[:, places].tolist(), 4),
            "scales": scales.t().contiguous(),
        }
    assert stored.shape({name: list(tensor.shape) for name, tensor in tensors.items()}) == [num_outputs, num_inputs]
    found = stored.read(tensors)
    assert isinstance(found, QuantizedMatrix)
    assert (found.bits, found.group_size) == (4, group_size)
    expected = (codes - zeros.repeat_interleave(group_size, 1)) * scales.repeat_interleave(group_size, 1)
    torch.testing.assert_close(found.dequantize(), expected)


def test_awq_s_groups_must_all_be_there() -> None:
    stored = Awq({"w_bit": 4, "q_group_size": 16, "version": "gemv"})
    tensors = {
        "qweight": packed([[1] * 32], 4),
        "qzeros": packed([[1] * 8], 4),
        "scales": torch.ones(1, 1),
    }
    with pytest.raises(ModelLoadError, match="1 groups of scales, must be at least 2"):
        stored.read(tensors)
    tensors["scales"] = torch.ones(1, 2)
    assert isinstance(stored.read(tensors), QuantizedMatrix)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Gptq({"bits": 5}), "bits is 5, must be one of 2, 3, 4, 8"),
        (lambda: Gptq({"bits": 4, "checkpoint_format": "marlin"}), "checkpoint_format is 'marlin'"),
        (lambda: Gptq({"bits": 4, "group_size": 0}), "group_size is 0, must be -1 or at least 1"),
        (lambda: Gptq({"bits": 4, "group_size": True}), "group_size is True"),
        (lambda: Gptq({"bits": 4, "group_size": -2}), "group_size is -2"),
        (lambda: Awq({"bits": 8}), "bits is 8, must be one of 4"),
        (lambda: Awq({"w_bit": 3}), "bits is 3, must be one of 4"),
        (lambda: Awq({"version": "marlin"}), "version is 'marlin', must be one of 'gemm', 'gemv'"),
        (lambda: bitsandbytes_format({}), "load_in_4bit is None, must be true, or load_in_8bit"),
        (lambda: Float8({"weight_block_size": [0, 128]}), "must be two numbers of at least 1"),
        (lambda: Float8({"weight_block_size": [128]}), "must be two numbers of at least 1"),
        (lambda: Float8({"fmt": "e3m4"}), "fmt is 'e3m4'"),
        (lambda: modelopt_format({"quant_algo": "NVFP4"}), "quant_algo is 'NVFP4'"),
    ],
)
def test_an_option_that_is_not_read_is_named(make: Any, message: str) -> None:
    with pytest.raises(ModelLoadError, match=message) as caught:
        make()
    assert caught.value.field == "quantization_config"


def test_sizes_of_groups_and_bits() -> None:
    assert [read_group_size({"group_size": size}) for size in (None, -1, 1, 128)] == [0, 0, 1, 128]
    assert read_group_size({"q": 3}, "q") == 3
    assert read_group_size({}) == 0
    assert [read_bits({"b": bits}, "b") for bits in (4, 8)] == [4, 8]
    for bits in (2, None, "4"):
        with pytest.raises(ModelLoadError):
            read_bits({"b": bits}, "b")


# Names of tensors.


def test_a_matrix_is_known_by_its_first_tensor_and_needs_the_others() -> None:
    stored = Gptq({"bits": 4})
    names = [
        "a.qweight",
        "a.scales",
        "a.qzeros",
        "a.g_idx",
        "b.c.qweight",
        "b.c.scales",
        "b.c.qzeros",
        "d.weight",
        "qweight",
    ]
    assert stored.parts(names) == {
        "a.weight": {"qweight": "a.qweight", "scales": "a.scales", "qzeros": "a.qzeros", "g_idx": "a.g_idx"},
        "b.c.weight": {"qweight": "b.c.qweight", "scales": "b.c.scales", "qzeros": "b.c.qzeros"},
    }
    with pytest.raises(ModelLoadError, match=r"a\.qweight is there, a\.qzeros is missing"):
        stored.parts(["a.qweight", "a.scales"])
    assert stored.of("a.weight") is stored
    with pytest.raises(NotImplementedError):
        StoredFormat().shape({})
    with pytest.raises(NotImplementedError):
        StoredFormat().described_shape(torch.zeros(1))


# FP8.


def test_fp8_names_its_scales_in_three_ways() -> None:
    stored = Float8({})
    names = [
        "a.weight",
        "a.weight_scale_inv",
        "b.weight",
        "b.weight_scale",
        "c",
        "c_scale",
        "d.weight",
        "d.qscale_weight",
    ]
    assert stored.parts([*names, "x_scale", "e.weight"]) == {
        "a.weight": {"weight": "a.weight", "scale": "a.weight_scale_inv"},
        "b.weight": {"weight": "b.weight", "scale": "b.weight_scale"},
        "c": {"weight": "c", "scale": "c_scale"},
        "d.weight": {"weight": "d.weight", "scale": "d.qscale_weight"},
    }
    with pytest.raises(ModelLoadError, match=r"d\.qscale_weight is there, d\.weight is missing"):
        stored.parts(["d.qscale_weight"])
    assert stored.shape({"weight": [3, 4], "scale": [1]}) == [3, 4]
    assert stored.makes_floats


@pytest.mark.parametrize(
    "name",
    [
        "a.input_scale", "a.output_scale", "a.k_scale", "a.v_scale", "a.q_scale", "a.prob_scale", "a.attn_scale",
        "a.input_zero_point", "a.act_scale", "a.activation_scale", "a.input_scale_ub", "a.input_global_scale",
        "a.qscale_act", "a.q_proj_activation_scale", "a.input_scale_inv",
    ],
)  # fmt: skip
def test_scales_of_activations_mean_nothing_to_weights(name: str) -> None:
    assert SCALES_OF_OTHERS.search(name)


@pytest.mark.parametrize("name", ["a.weight_scale", "a.weight_scale_inv", "a.qscale_weight", "a.input_scale.weight"])
def test_scales_of_weights_do(name: str) -> None:
    assert SCALES_OF_OTHERS.search(name) is None


def ones(*shape: int) -> Tensor:
    return torch.ones(shape)


def test_scales_are_one_number_one_an_output_or_one_a_block() -> None:
    numbers = torch.arange(6.0).reshape(2, 3) + 1
    for shape in ((), (1,), (1, 1)):
        assert scale_blocks(numbers.clone(), torch.full(shape, 2.0), None).tolist() == [[2, 4, 6], [8, 10, 12]]
    for shape in ((2,), (2, 1)):
        scale = torch.tensor([2.0, 10.0]).reshape(shape)
        assert scale_blocks(numbers.clone(), scale, None).tolist() == [[2, 4, 6], [40, 50, 60]]
    blocks = torch.tensor([[2.0, 10.0], [3.0, 100.0]])
    assert scale_blocks(numbers.clone(), blocks, (1, 2)).tolist() == [[2, 4, 30], [12, 15, 600]]
    assert scale_blocks(numbers.clone(), torch.tensor([[2.0, 3.0]]), (4, 2)).tolist() == [[2, 4, 9], [8, 10, 18]]
    stacked = torch.stack([numbers, numbers])
    for shape in ((2,), (2, 1, 1)):
        scale = torch.tensor([1.0, 10.0]).reshape(shape)
        assert scale_blocks(stacked.clone(), scale, None)[1].tolist() == [[10, 20, 30], [40, 50, 60]]
    three = torch.stack([numbers] * 3)
    scale = torch.arange(6.0).reshape(3, 2, 1)
    assert scale_blocks(three.clone(), scale, None)[2].tolist() == [[4, 8, 12], [20, 25, 30]]


@pytest.mark.parametrize(
    ("weight", "scale", "block", "message"),
    [
        (ones(2, 3), ones(3), None, r"scales are \[3\], must be one, or one for each of 2 outputs"),
        (ones(2, 3), ones(2, 2), None, "must be one, or one for each of 2 outputs"),
        (ones(2, 3), ones(1, 2), (1, 2), r"scales are \[1, 2\], must be \[2, 2\] for \[2, 3\] in blocks of \[1, 2\]"),
        (ones(2, 3), ones(2, 3), (1, 2), r"must be \[2, 2\]"),
    ],
)
def test_scales_of_another_shape_are_refused(
    weight: Tensor, scale: Tensor, block: tuple[int, int] | None, message: str
) -> None:
    with pytest.raises(ModelLoadError, match=message):
        scale_blocks(weight, scale, block)


def test_fp8_reads_both_kinds_and_no_other() -> None:
    stored = Float8({"weight_block_size": [1, 2], "fmt": "e4m3"})
    for kind in (torch.float8_e4m3fn, torch.float8_e5m2):
        tensors = {"weight": torch.tensor([[1.0, 2.0, -4.0]]).to(kind), "scale": torch.tensor([[2.0, 0.5]])}
        found = stored.read(tensors)
        assert isinstance(found, Tensor)
        assert (found.dtype, found.tolist()) == (torch.float32, [[2, 4, -2]])
    with pytest.raises(ModelLoadError, match="data type is int8, must be FP8"):
        stored.read({"weight": torch.ones(1, 2, dtype=torch.int8), "scale": torch.ones(1)})


# The choice.


def config_of(**fields: Any) -> HfConfig:
    return HfConfig(fields)


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"quant_method": "awq", "bits": 4}, Awq),
        ({"quant_method": "gptq", "bits": 4}, Gptq),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, EightBits),
        ({"quant_method": "fp8"}, Float8),
        ({"quant_method": "fbgemm_fp8"}, Float8),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, Float8),
        ({"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, Float8),
    ],
)
def test_the_method_decides_the_format(options: dict[str, Any], kind: type) -> None:
    for key in ("quantization_config", "compression_config"):
        found = stored_format(config_of(**{key: options}))
        assert found is not None
        assert (found[0], type(found[1])) == (options["quant_method"], kind)


def test_floats_and_files_that_say_it_themselves_have_no_format() -> None:
    for options in (None, {}, {"quant_method": "mxfp4"}):
        assert stored_format(config_of(quantization_config=options)) is None
    assert stored_format(config_of()) is None
    assert stored_format(config_of(quantization_config={"quant_method": "gguf"})) == ("gguf", None)
    assert sorted(METHODS) == ["awq", "bitsandbytes", "compressed-tensors", "fbgemm_fp8", "fp8", "gptq", "modelopt"]
    for options, message in (
        ({"quant_method": "hqq"}, "quantized with 'hqq'"),
        ({"a": 1}, "with 'unknown'"),
        ([1], "object"),
    ):
        with pytest.raises(ModelLoadError, match=message) as caught:
            stored_format(config_of(quantization_config=options))
        assert caught.value.field == "quantization_config"
