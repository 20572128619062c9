"""gpt-oss: every other layer has a window, attention has sinks, experts are stacked and may be stored in MXFP4."""

import dataclasses
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from pagoda_common.errors import ModelLoadError
from pagoda_kernels.layers.act_and_mul import ClampedSwiglu
from pagoda_kernels.linear.scaled_matrix import FP4_VALUES, SCALE_BIAS, ScaledMatrix, pack_mxfp4
from pagoda_worker.models.config_keys import expect, unused
from pagoda_worker.models.hf_config import HfConfig, get, layer_kinds, windows
from pagoda_worker.models.llama import common
from pagoda_worker.models.spec import DecoderSpec, MoeSpec
from pagoda_worker.models.weights import MadeWeights, TensorNames, WeightNames, weight_names

YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""Default rotation if config.json has none."""
NAMES = TensorNames(router="mlp.router")
Made = TypeVar("Made", Tensor, ScaledMatrix)


def gpt_oss_spec(config: HfConfig) -> DecoderSpec:
    """GptOssForCausalLM."""
    unused(config, "experts_per_token", "initial_context_length")
    expect(config, hidden_act="silu")
    if not config.get("rope_scaling") and not config.get("rope_parameters"):
        config = config | {"rope_parameters": YARN}
    options = common(
        config,
        num_kv_heads=8,
        head_dim=64,
        default_theta=150000.0,
        default_eps=1e-5,
        default_max_positions=131072,
    )
    kinds = layer_kinds(config, options["num_layers"], lambda layer: layer % 2 == 0)
    bias = bool(get(config, "attention_bias", True))
    return DecoderSpec(
        architecture="GptOssForCausalLM",
        qkv_bias=bias,
        o_bias=bias,
        has_sinks=True,
        windows=windows(kinds, config.get("sliding_window", 128)),
        moe=MoeSpec(
            num_experts=int(get(config, "num_local_experts", 128)),
            num_experts_per_token=int(get(config, "num_experts_per_tok", 4)),
            intermediate_size=options["intermediate_size"],
            router_bias=True,
            expert_bias=True,
            activation=ClampedSwiglu(
                limit=float(get(config, "swiglu_limit", 7.0)),
                alpha=float(get(config, "swiglu_alpha", 1.702)),
                up_offset=1.0,
            ),
        ),
        **options,
    )


def gpt_oss_weights(spec: DecoderSpec) -> WeightNames:
    """All tensors, with experts stacked: as floats, or in MXFP4 under other names."""
    names = weight_names(spec, NAMES)
    made = [one for layer in range(spec.num_layers) for one in _experts(spec, layer)]
    sources = [source for source in names.sources if ".experts." not in source.parameter]
    return dataclasses.replace(names, sources=sources, made=tuple(made))


def _experts(spec: DecoderSpec, layer: int) -> list[MadeWeights]:
    """Sources of a layer's experts: both forms of matrices, and the biases."""
    made, place = [], f"layers.{layer}.mlp.experts"
    for stored, ours, in_order in (("gate_up_proj", "up_proj", _gates_first), ("down_proj", "down_proj", _as_it_is)):
        parameters = _parameters(spec, layer, f"{ours}.weight")
        ways: tuple[tuple[tuple[str, ...], Callable[[list[Tensor]], Tensor]], ...] = (
            ((stored,), _transposed),
            ((f"{stored}_blocks", f"{stored}_scales"), mxfp4_to_floats),
        )
        for leaves, unpack in ways:
            names = tuple(f"{place}.{leaf}" for leaf in leaves)
            made.append(_unstacked(names, parameters, unpack, in_order))
        biases = _parameters(spec, layer, f"{ours}.bias")
        made.append(_unstacked((f"{place}.{stored}_bias",), biases, _only, in_order))
    return made


def _parameters(spec: DecoderSpec, layer: int, leaf: str) -> tuple[str, ...]:
    assert spec.moe is not None, "gpt-oss has experts"
    return tuple(f"layers.{layer}.mlp.experts.{index}.{leaf}" for index in range(spec.moe.num_experts))


def _unstacked(
    names: tuple[str, ...],
    parameters: tuple[str, ...],
    unpack: Callable[[list[Tensor]], Tensor],
    in_order: Callable[[Tensor], Tensor],
) -> MadeWeights:
    """A source whose parameters are `in_order` from the results of `unpack` for each expert."""

    def of_experts(tensors: list[Tensor], unpack_one: Callable[[list[Tensor]], Made]) -> dict[str, Made]:
        if any(tensor.shape[:1] != (len(parameters),) for tensor in tensors):
            raise ModelLoadError(f"{names[0]} has {list(tensors[0].shape)[:1]} experts, must have {len(parameters)}")
        return {
            parameter: unpack_one([tensor[index] for tensor in tensors]) for index, parameter in enumerate(parameters)
        }

    def make(tensors: list[Tensor]) -> dict[str, Tensor]:
        return of_experts(tensors, lambda expert: in_order(unpack(expert)))

    def make_scaled(tensors: list[Tensor]) -> dict[str, ScaledMatrix]:
        return of_experts(tensors, lambda expert: _packed(*map(in_order, expert)))

    is_scaled = unpack is mxfp4_to_floats
    return MadeWeights(
        names=names,
        parameters=parameters,
        make=make,
        pairs_rows=in_order is _gates_first,
        make_scaled=make_scaled if is_scaled else None,
    )


def _packed(blocks: Tensor, scales: Tensor) -> ScaledMatrix:
    _check_blocks(blocks, scales)
    return pack_mxfp4(blocks, scales)


def _check_blocks(blocks: Tensor, scales: Tensor) -> None:
    if blocks.shape[:-1] != scales.shape:
        raise ModelLoadError(f"MXFP4 blocks of {list(blocks.shape)} do not fit scales of {list(scales.shape)}")


def _only(tensors: list[Tensor]) -> Tensor:
    return tensors[0]


def _transposed(tensors: list[Tensor]) -> Tensor:
    """Stored [in, out]."""
    return tensors[0].t()


def _as_it_is(rows: Tensor) -> Tensor:
    return rows


def _gates_first(rows: Tensor) -> Tensor:
    """Rows of gate and up alternate in the checkpoint."""
    return torch.cat((rows[0::2], rows[1::2]))


def mxfp4_to_floats(tensors: list[Tensor]) -> Tensor:
    """[rows, columns] float32, of blocks [rows, groups, 16] uint8 and scales [rows, groups] uint8.

    A byte of a block has two numbers, the first in its lower bits.

    Source: OCP Microscaling Formats 1.0, E2M1 with a scale of E8M0 for 32 numbers.
    """
    blocks, scales = tensors
    _check_blocks(blocks, scales)
    codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).long()  # [rows, groups, 16, 2]
    values = torch.tensor(FP4_VALUES)[codes].flatten(-2)
    return torch.ldexp(values, scales.int()[..., None] - SCALE_BIAS).flatten(-2)
