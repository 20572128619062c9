"""What does not fit a kernel is refused with its shapes, before anything is computed: one wrong size at a time."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pagoda_kernels.attention.copy_blocks import copy_blocks
from pagoda_kernels.attention.mla_attention import mla_attention
from pagoda_kernels.attention.paged_attention import paged_attention
from pagoda_kernels.attention.plan import AttentionPlan
from pagoda_kernels.attention.rope_store import rope_store
from pagoda_kernels.attention.sequence_attention import sequence_attention
from pagoda_kernels.attention.store_kv_cache import store_kv_cache
from pagoda_kernels.layers.add_rms_norm import add_rms_norm
from pagoda_kernels.layers.layer_norm import layer_norm
from pagoda_kernels.linear.packed_linear import check_addends, check_ids
from pagoda_kernels.linear.quantize_rows import new_packed, quantize_rows
from pagoda_kernels.linear.quantized_linear import quantized_linear
from pagoda_kernels.linear.quantized_matrix import pack, quantize
from pagoda_kernels.recurrent.batch import RecurrentBatch
from pagoda_kernels.recurrent.gate_and_norm import gate_and_norm
from pagoda_kernels.recurrent.gated_delta_rule import gated_delta_rule
from pagoda_kernels.recurrent.short_convolution import short_convolution
from pagoda_kernels.recurrent.state_space_scan import state_space_scan
from pagoda_kernels.sampling.apply_penalties import apply_token_penalties
from pagoda_kernels.sampling.apply_token_bitmask import apply_token_bitmask
from pagoda_kernels.sampling.philox import philox_keys
from pagoda_kernels.sampling.sample_tokens import sample_tokens


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def slots(count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.int64)


def plan(block_size: int = 16) -> AttentionPlan:
    return AttentionPlan(
        query_lens=np.array([1]),
        seq_lens=np.array([1]),
        block_table=np.zeros((1, 1), dtype=np.int32),
        block_size=block_size,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


BATCH = RecurrentBatch(query_lens=np.array([3]), rows=np.array([0]), device=torch.device("cpu"))

CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "store": (
        store_kv_cache,
        {
            "key": zeros(3, 2, 4),
            "value": zeros(3, 2, 4),
            "k_cache": zeros(1, 16, 2, 4),
            "v_cache": zeros(1, 16, 2, 4),
            "slot_mapping": slots(3),
        },
    ),
    "rope store": (
        rope_store,
        {
            "qkv": zeros(3, (2 + 2 * 2) * 4),
            "k_cache": zeros(1, 16, 2, 4),
            "v_cache": zeros(1, 16, 2, 4),
            "slot_mapping": slots(3),
            "rotary": (zeros(3, 1, 2), zeros(3, 1, 2)),
        },
    ),
    "copy": (
        copy_blocks,
        {
            "source": zeros(2, 3),
            "destination": zeros(5, 3),
            "source_ids": slots(2),
            "destination_ids": torch.arange(2),
        },
    ),
    "paged": (
        paged_attention,
        {
            "query": zeros(1, 4, 8),
            "k_cache": zeros(1, 16, 2, 8),
            "v_cache": zeros(1, 16, 2, 8),
            "plan": plan(),
            "scale": 1.0,
        },
    ),
    "latents": (
        mla_attention,
        {
            "query": zeros(1, 4, 12),
            "cache": zeros(1, 16, 1, 20),
            "plan": plan(),
            "key_up": zeros(4, 8, 16),
            "value_up": zeros(4, 8, 16),
            "scale": 1.0,
        },
    ),
    "layer norm": (layer_norm, {"x": zeros(3, 4), "weight": zeros(4), "bias": zeros(4), "eps": 1e-5}),
    "sequences": (
        sequence_attention,
        {
            "query": zeros(3, 4, 8),
            "key": zeros(3, 2, 8),
            "value": zeros(3, 2, 6),
            "starts": [0, 3],
            "scale": 1.0,
            "is_causal": True,
        },
    ),
    "scan": (
        state_space_scan,
        {
            "x": zeros(3, 4, 5),
            "b": zeros(3, 2, 6),
            "c": zeros(3, 2, 6),
            "step": zeros(3, 4),
            "states": zeros(1, 4, 6, 5),
            "batch": BATCH,
            "step_bias": zeros(4),
            "decay_log": zeros(4),
            "skip": zeros(4),
        },
    ),
    "delta": (
        gated_delta_rule,
        {
            "query": zeros(3, 2, 6),
            "key": zeros(3, 2, 6),
            "value": zeros(3, 4, 5),
            "decay": zeros(3, 4),
            "beta": zeros(3, 4),
            "states": zeros(1, 4, 6, 5),
            "batch": BATCH,
        },
    ),
    "convolution": (
        short_convolution,
        {"x": zeros(3, 5), "weight": zeros(5, 4), "states": zeros(1, 3, 5), "batch": BATCH},
    ),
    "gate": (
        gate_and_norm,
        {"x": zeros(3, 6), "gate": zeros(3, 6), "weight": zeros(6), "eps": 1e-5, "num_groups": 2},
    ),
    "add norm": (
        add_rms_norm,
        {"x": zeros(3, 6), "residual": zeros(3, 6), "weight": zeros(6), "eps": 1e-5},
    ),
    "quantized": (
        quantized_linear,
        {"x": zeros(3, 8), "weight": pack(quantize(torch.ones(4, 8), bits=8, group_size=8)), "bias": zeros(4)},
    ),
    "rows": (
        quantize_rows,
        {"rows": zeros(2, 8), "packed": new_packed(6, 8, bits=8, group_size=8), "first_row": 4},
    ),
    "penalties": (
        apply_token_penalties,
        {
            "logits": zeros(3, 7),
            "in_prompt": zeros(3, 7, dtype=torch.bool),
            "counts": zeros(3, 7),
            "presence": zeros(3),
            "frequency": zeros(3),
            "repetition": torch.ones(3),
        },
    ),
    "bitmask": (apply_token_bitmask, {"logits": zeros(3, 9), "bitmask": zeros(3, 2, dtype=torch.uint8)}),
    "sampling": (sample_tokens, {"logits": zeros(3, 7), "keys": slots(3)}),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_fits_is_computed(name: str) -> None:
    function, arguments = CALLS[name]
    function(**arguments)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("store", {"value": zeros(3, 2, 5)}, "do not fit"),
        ("store", {"k_cache": zeros(1, 16, 2, 5)}, "do not fit"),
        ("store", {"k_cache": zeros(1, 16, 3, 4)}, "do not fit"),
        ("store", {"slot_mapping": slots(2)}, "slot_mapping has 2 entries for 3 tokens"),
        ("rope store", {"qkv": zeros(3, 4 * 4)}, r"qkv \(3, 16\) does not fit a cache of \(1, 16, 2, 4\)"),
        ("rope store", {"qkv": zeros(3, 6 * 4 + 1)}, "does not fit a cache"),
        ("rope store", {"slot_mapping": slots(4)}, "slot_mapping has 4 entries for 3 tokens"),
        ("rope store", {"rotary": (zeros(3, 1, 3), zeros(3, 1, 3))}, "head_dim is 4, cos has 3 angles"),
        ("copy", {"destination": zeros(5, 4)}, r"blocks of \(2, 3\) do not fit \(5, 4\)"),
        ("copy", {"source_ids": slots(1)}, "1 source blocks for 2 destinations"),
        ("paged", {"query": zeros(1, 5, 8)}, "does not fit a cache"),
        ("paged", {"query": zeros(1, 4, 9)}, "does not fit a cache"),
        ("paged", {"plan": plan(8)}, "the cache has blocks of 16 tokens, the plan of 8"),
        ("latents", {"key_up": zeros(3, 8, 16)}, "do not fit 4 heads"),
        ("latents", {"value_up": zeros(3, 8, 16)}, "do not fit 4 heads"),
        ("latents", {"value_up": zeros(4, 8, 15)}, "do not fit 4 heads"),
        ("latents", {"cache": zeros(1, 16, 1, 21)}, "latents of 20 in blocks of 16 do not fit a cache"),
        ("latents", {"cache": zeros(1, 16, 2, 20)}, "do not fit a cache"),
        ("latents", {"plan": plan(8)}, "latents of 20 in blocks of 8"),
        ("layer norm", {"weight": zeros(5)}, "must have the 4 values of a row"),
        ("layer norm", {"bias": zeros(3)}, "must have the 4 values of a row"),
        ("sequences", {"slopes": zeros(3)}, "must be 4 of torch.float32"),
        ("sequences", {"key": zeros(3, 3, 8), "value": zeros(3, 3, 6)}, "do not fit"),
        ("sequences", {"value": zeros(2, 2, 6)}, "do not fit"),
        ("sequences", {"key": zeros(3, 2, 7)}, "do not fit"),
        ("scan", {"states": zeros(1, 4, 5, 6)}, "states .* do not fit"),
        ("scan", {"states": zeros(1, 3, 6, 5)}, "states .* do not fit"),
        ("scan", {"states": zeros(1, 4, 6, 5, dtype=torch.bfloat16)}, "states .* do not fit"),
        ("scan", {"b": zeros(3, 3, 6), "c": zeros(3, 3, 6)}, "4 heads cannot share 3 groups evenly"),
        ("scan", {"c": zeros(3, 1, 6)}, "4 heads cannot share 2 groups evenly"),
        ("delta", {"states": zeros(1, 4, 5, 6)}, "states .* do not fit"),
        ("delta", {"states": zeros(1, 2, 6, 5)}, "states .* do not fit"),
        ("delta", {"states": zeros(1, 4, 6, 5, dtype=torch.bfloat16)}, "states .* do not fit"),
        ("delta", {"query": zeros(3, 3, 6), "key": zeros(3, 3, 6)}, "4 value heads cannot share 3 key heads evenly"),
        ("delta", {"query": zeros(3, 1, 6)}, "4 value heads cannot share 2 key heads evenly"),
        ("convolution", {"states": zeros(1, 4, 5)}, "do not fit x"),
        ("convolution", {"states": zeros(1, 3, 4)}, "do not fit x"),
        ("convolution", {"states": zeros(1, 3, 5, dtype=torch.bfloat16)}, "do not fit x"),
        ("gate", {"gate": zeros(3, 5)}, "do not fit 2 groups"),
        ("gate", {"num_groups": 4}, "do not fit 4 groups"),
        ("add norm", {"residual": zeros(2, 6)}, r"x is \(3, 6\), residual \(2, 6\), weight \(6,\)"),
        ("add norm", {"weight": zeros(5)}, r"weight \(5,\)"),
        ("quantized", {"x": zeros(3, 7)}, "x has 7 columns, the weights have 8 inputs"),
        ("quantized", {"bias": zeros(4, dtype=torch.bfloat16)}, "bias is torch.bfloat16, must be torch.float32 as x"),
        ("quantized", {"residual": zeros(3, 4, dtype=torch.float16)}, "residual is torch.float16"),
        ("quantized", {"out_dtype": torch.bfloat16}, "out_dtype is torch.bfloat16, must be torch.float32 or"),
        ("rows", {"first_row": 5}, "first_row is 5, the matrix has 6 rows of 8"),
        ("rows", {"first_row": -1}, "first_row is -1"),
        ("rows", {"rows": zeros(2, 4)}, r"rows has shape \(2, 4\)"),
        ("penalties", {"counts": zeros(3, 8)}, r"logits of shape \(3, 7\), counts of \(3, 8\)"),
        ("bitmask", {"bitmask": zeros(3, 2, dtype=torch.int32)}, "it must be uint8 with as many rows"),
        ("bitmask", {"bitmask": zeros(2, 2, dtype=torch.uint8)}, "with as many rows"),
        ("bitmask", {"bitmask": zeros(3, 1, dtype=torch.uint8)}, "a bit for each token"),
        ("sampling", {"keys": slots(2)}, "2 keys for 3 rows"),
    ],
)
def test_what_does_not_fit_is_refused(name: str, change: dict[str, Any], message: str) -> None:
    function, arguments = CALLS[name]
    with pytest.raises(ValueError, match=message):
        function(**arguments | change)


def test_the_last_bit_of_a_mask_is_enough() -> None:
    assert apply_token_bitmask(zeros(1, 8), torch.full((1, 1), 255, dtype=torch.uint8)).tolist() == [[0] * 8]


def test_seeds_and_offsets_are_as_many() -> None:
    with pytest.raises(ValueError, match="2 seeds for 3 offsets"):
        philox_keys(np.zeros(2, dtype=np.uint64), np.zeros(3, dtype=np.uint64))


@pytest.mark.parametrize(("ids", "is_refused"), [([], False), ([0, 3], False), ([3, 4], True), ([-1, 2], True)])
def test_rows_of_a_table_are_there(ids: list[int], is_refused: bool) -> None:
    given = torch.tensor(ids, dtype=torch.int64)
    if not is_refused:
        check_ids(given, 4)
        return
    with pytest.raises(IndexError, match=f"ids are between {min(ids)} and {max(ids)}, must be from 0 to 3"):
        check_ids(given, 4)


@pytest.mark.parametrize(
    ("bias", "residual", "message"),
    [
        (zeros(5), None, r"bias has shape \(5,\), must be \(4,\)"),
        (zeros(4, dtype=torch.bfloat16), None, "bias is torch.bfloat16 on cpu, must be torch.float32 on cpu as x"),
        (None, zeros(3, 5), r"residual has shape \(3, 5\), must be \(3, 4\)"),
        (None, zeros(2, 4), r"residual has shape \(2, 4\), must be \(3, 4\)"),
        (None, zeros(3, 4, dtype=torch.float16), "residual is torch.float16"),
        (None, torch.zeros(3, 4, device="meta"), "residual is torch.float32 on meta"),
    ],
)
def test_what_cannot_be_added_to_a_product_is_named(bias: Tensor | None, residual: Tensor | None, message: str) -> None:
    check_addends(zeros(3, 6), 4, zeros(4), zeros(3, 4))
    check_addends(zeros(3, 6), 4, None, None)
    with pytest.raises(ValueError, match=message):
        check_addends(zeros(3, 6), 4, bias, residual)
