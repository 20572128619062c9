"""Operations with small arguments, and views of these that do not lie densely in memory."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pagoda_kernels.attention.sequence_attention import sequence_attention
from pagoda_kernels.layers.act_and_mul import act_and_mul
from pagoda_kernels.layers.activate import activate
from pagoda_kernels.layers.add_rms_norm import add_rms_norm
from pagoda_kernels.layers.layer_norm import layer_norm
from pagoda_kernels.layers.rms_norm import rms_norm
from pagoda_kernels.linear.compressed_weight import compress_weight, compressed_embedding, compressed_linear
from pagoda_kernels.linear.packed_gelu_linear import packed_gelu_linear
from pagoda_kernels.linear.packed_linear import pack_weight, packed_embedding, packed_linear
from pagoda_kernels.linear.quantized_linear import quantized_linear
from pagoda_kernels.linear.quantized_matrix import pack, quantize
from pagoda_kernels.recurrent.batch import RecurrentBatch
from pagoda_kernels.recurrent.gate_and_norm import gate_and_norm
from pagoda_kernels.recurrent.gated_delta_rule import gated_delta_rule
from pagoda_kernels.recurrent.selective_scan import selective_scan
from pagoda_kernels.recurrent.short_convolution import short_convolution
from pagoda_kernels.recurrent.state_space_scan import state_space_scan
from pagoda_kernels.sampling.apply_penalties import apply_token_penalties
from pagoda_kernels.sampling.apply_token_bitmask import apply_token_bitmask
from pagoda_kernels.sampling.argmax import argmax
from pagoda_kernels.sampling.sample_tokens import sample_tokens
from pagoda_kernels.sampling.top_logprobs import top_logprobs

BF16 = torch.bfloat16
NUM_TOKENS = 9


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype)


def every_second(x: Tensor) -> Tensor:
    """Neighbours in a row are not neighbours in memory; what lies between is no number."""
    wide = torch.full((*x.shape, 2), torch.nan if x.is_floating_point() else 1, dtype=x.dtype)
    wide[..., 0] = x
    return wide[..., 0]


def part_of_rows(x: Tensor) -> Tensor:
    """Rows of wider rows, as of a fused projection."""
    wide = torch.full((*x.shape[:-1], x.shape[-1] + 6), torch.nan if x.is_floating_point() else 1, dtype=x.dtype)
    wide[..., 2:-4] = x
    return wide[..., 2:-4]


def turned(x: Tensor) -> Tensor:
    """The first dimension is the one whose neighbours are neighbours in memory."""
    return x.transpose(0, -1).contiguous().transpose(0, -1)


VIEWS = (every_second, part_of_rows, turned)


def recurrent(function: Callable[..., Tensor], states: Tensor) -> Callable[..., tuple[Tensor, Tensor]]:
    """Two sequences over fresh states; the output, and the states afterwards."""

    def run(**given: Any) -> tuple[Tensor, Tensor]:
        own = states.clone()
        batch = RecurrentBatch(np.array([5, 4]), np.array([2, 0]), torch.device("cpu"))
        return function(**given, states=own, batch=batch), own

    return run


def packed_products(dtype: torch.dtype) -> dict[str, Any]:
    return {"x": drawn(NUM_TOKENS, 34, dtype=dtype), "bias": drawn(70, dtype=dtype)}


def with_residual(dtype: torch.dtype, **more: Any) -> dict[str, Any]:
    return {**packed_products(dtype), "residual": drawn(NUM_TOKENS, 70, dtype=dtype), **more}


def quantized(bits: int, *, quantizes_inputs: bool = False) -> Callable[..., Tensor]:
    weight = pack(quantize(drawn(70, 64), bits=bits, group_size=32), quantizes_inputs=quantizes_inputs)
    return lambda **given: quantized_linear(weight=weight, **given)


def compressed() -> Tensor:
    made = compress_weight(drawn(70, 34, dtype=BF16).sign())
    if made is None:
        pytest.skip("this CPU has no AVX512-BF16")
    return made


WEIGHT = drawn(70, 34, dtype=BF16)
IDS = torch.tensor([3, 69, 0, 3, 50])
CASES: dict[str, Callable[[], tuple[Callable[..., Any], dict[str, Any]]]] = {
    "packed_linear": lambda: (
        lambda **given: packed_linear(packed=pack_weight(WEIGHT), out_features=70, **given),
        with_residual(BF16),
    ),
    "packed_gelu_linear": lambda: (
        lambda **given: packed_gelu_linear(packed=pack_weight(WEIGHT), out_features=70, **given),
        packed_products(BF16),
    ),
    "pack_weight": lambda: (pack_weight, {"weight": WEIGHT}),
    "packed_embedding": lambda: (lambda ids: packed_embedding(ids, pack_weight(WEIGHT), 34), {"ids": IDS}),
    "compressed_linear": lambda: (
        lambda **given: compressed_linear(compressed=compressed(), out_features=70, **given),
        with_residual(BF16),
    ),
    "compressed_embedding": lambda: (lambda ids: compressed_embedding(ids, compressed(), 70, 34), {"ids": IDS}),
    "quantized_linear, 8 bits": lambda: (quantized(8), with_residual(torch.float32, x=drawn(NUM_TOKENS, 64))),
    "quantized_linear, 4 bits": lambda: (
        quantized(4, quantizes_inputs=True),
        with_residual(BF16, x=drawn(NUM_TOKENS, 64, dtype=BF16)),
    ),
    "quantized_linear, float16": lambda: (
        quantized(8),
        with_residual(torch.float16, x=drawn(NUM_TOKENS, 64, dtype=torch.float16)),
    ),
    "sequence_attention": lambda: (
        lambda **given: sequence_attention(starts=[0, 4, 4, NUM_TOKENS], scale=0.2, **given),
        {
            "query": drawn(NUM_TOKENS, 4, 32),
            "key": drawn(NUM_TOKENS, 2, 32),
            "value": drawn(NUM_TOKENS, 2, 24),
            "slopes": drawn(4).abs(),
        },
    ),
    "activate": lambda: (lambda x: activate(x, "silu"), {"x": drawn(NUM_TOKENS, 40, dtype=BF16)}),
    "act_and_mul": lambda: (lambda x: act_and_mul(x, "silu"), {"x": drawn(NUM_TOKENS, 40)}),
    "layer_norm": lambda: (
        lambda **given: layer_norm(eps=1e-5, **given),
        {"x": drawn(NUM_TOKENS, 40), "weight": drawn(40), "bias": drawn(40)},
    ),
    "rms_norm": lambda: (
        lambda **given: rms_norm(eps=1e-5, **given),
        {"x": drawn(NUM_TOKENS, 40), "weight": drawn(40)},
    ),
    "rms_norm of heads": lambda: (
        lambda **given: rms_norm(eps=1e-5, weight_offset=1.0, **given),
        {"x": drawn(NUM_TOKENS, 3, 40), "weight": drawn(40)},
    ),
    "add_rms_norm": lambda: (
        lambda **given: add_rms_norm(eps=1e-5, alpha=0.5, **given),
        {"x": drawn(NUM_TOKENS, 40), "residual": drawn(NUM_TOKENS, 40), "weight": drawn(40)},
    ),
    "gate_and_norm": lambda: (
        lambda **given: gate_and_norm(eps=1e-5, num_groups=2, **given),
        {"x": drawn(NUM_TOKENS, 40), "gate": drawn(NUM_TOKENS, 40), "weight": drawn(40)},
    ),
    "short_convolution": lambda: (
        recurrent(short_convolution, drawn(3, 3, 40)),
        {"x": drawn(NUM_TOKENS, 40), "weight": drawn(40, 4), "bias": drawn(40)},
    ),
    "gated_delta_rule": lambda: (
        recurrent(gated_delta_rule, drawn(3, 4, 16, 8)),
        {
            "query": drawn(NUM_TOKENS, 2, 16),
            "key": drawn(NUM_TOKENS, 2, 16),
            "value": drawn(NUM_TOKENS, 4, 8),
            "decay": -drawn(NUM_TOKENS, 4).abs(),
            "beta": drawn(NUM_TOKENS, 4).sigmoid(),
        },
    ),
    "state_space_scan": lambda: (
        recurrent(state_space_scan, drawn(3, 4, 16, 8)),
        {
            "x": drawn(NUM_TOKENS, 4, 8),
            "b": drawn(NUM_TOKENS, 2, 16),
            "c": drawn(NUM_TOKENS, 2, 16),
            "step": drawn(NUM_TOKENS, 4),
            "step_bias": drawn(4),
            "decay_log": drawn(4),
            "skip": drawn(4),
        },
    ),
    "selective_scan": lambda: (
        recurrent(selective_scan, drawn(3, 40, 16)),
        {
            "x": drawn(NUM_TOKENS, 40),
            "b": drawn(NUM_TOKENS, 16),
            "c": drawn(NUM_TOKENS, 16),
            "step": drawn(NUM_TOKENS, 40),
            "step_bias": drawn(40),
            "decay_log": drawn(40, 16),
            "skip": drawn(40),
        },
    ),
    "argmax": lambda: (argmax, {"logits": drawn(NUM_TOKENS, 100)}),
    "top_logprobs": lambda: (
        lambda **given: top_logprobs(num_top=3, **given),
        {"logits": drawn(NUM_TOKENS, 100), "token_ids": torch.arange(NUM_TOKENS)},
    ),
    "sample_tokens": lambda: (
        sample_tokens,
        {
            "logits": drawn(NUM_TOKENS, 100),
            "keys": (drawn(NUM_TOKENS) * 1e6).to(torch.int64),
            "temperature": drawn(NUM_TOKENS).abs() + 0.5,
            "top_k": torch.arange(NUM_TOKENS) * 3,
            "top_p": drawn(NUM_TOKENS).sigmoid(),
            "min_p": drawn(NUM_TOKENS).sigmoid() * 0.1,
        },
    ),
    "apply_token_bitmask": lambda: (
        apply_token_bitmask,
        {"logits": drawn(NUM_TOKENS, 96), "bitmask": (drawn(NUM_TOKENS, 12) * 1000).to(torch.int64).to(torch.uint8)},
    ),
    "apply_token_penalties": lambda: (
        apply_token_penalties,
        {
            "logits": drawn(NUM_TOKENS, 96),
            "in_prompt": drawn(NUM_TOKENS, 96) > 1,
            "counts": drawn(NUM_TOKENS, 96).abs().round(),
            "presence": drawn(NUM_TOKENS),
            "frequency": drawn(NUM_TOKENS),
            "repetition": drawn(NUM_TOKENS).abs() + 0.5,
        },
    ),
}


def check_views(name: str, view: Callable[[Tensor], Tensor]) -> None:
    """Each argument as a view gives what its copy gives."""
    function, given = CASES[name]()
    expected = function(**given)
    for argument, tensor in given.items():
        seen = view(tensor)
        assert torch.equal(seen, tensor)
        actual = function(**given | {argument: seen})
        torch.testing.assert_close(actual, expected, msg=lambda told, argument=argument: f"{argument}: {told}")
