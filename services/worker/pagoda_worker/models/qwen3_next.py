"""Qwen3-Next: three layers of four are gated delta nets, the others have a gate on attention; experts in all."""

import re

from pagoda_common.errors import ModelLoadError
from pagoda_worker.models.hf_config import HfConfig, get
from pagoda_worker.models.llama import common
from pagoda_worker.models.moe import qwen_moe
from pagoda_worker.models.spec import DecoderSpec, DeltaNetSpec
from pagoda_worker.models.weights import TensorNames

LINEAR, FULL = "linear_attention", "full_attention"
"""What layer_types may hold."""
QWEN3_NEXT_NAMES = TensorNames(ignored=(*TensorNames().ignored, re.compile(r"^mtp\.")))


def qwen3_next_spec(config: HfConfig) -> DecoderSpec:
    """Qwen3NextForCausalLM. What predicts several tokens at once (mtp) is left out."""
    options = common(
        {"partial_rotary_factor": 0.25} | config, num_kv_heads=2, head_dim=256, default_max_positions=32768
    )
    num_layers = options["num_layers"]
    bias = bool(get(config, "attention_bias", False))
    interval = int(get(config, "full_attention_interval", 4))
    kinds = get(config, "layer_types", [FULL if not (i + 1) % interval else LINEAR for i in range(num_layers)])
    for kind in kinds:
        if kind not in (LINEAR, FULL):
            raise ModelLoadError(f"layer type {kind!r} is not supported; supported are {LINEAR}, {FULL}")
    if len(kinds) != num_layers:
        raise ModelLoadError(f"layer_types has {len(kinds)} entries for {num_layers} layers")
    shared = int(get(config, "shared_expert_intermediate_size", 512))
    defaults = {"num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512, "norm_topk_prob": True}
    moe = qwen_moe(defaults | config, num_layers, shared_intermediate_size=shared)
    return DecoderSpec(
        architecture="Qwen3NextForCausalLM",
        norm_weight_offset=1.0,
        qk_norm="head",
        qkv_bias=bias,
        o_bias=bias,
        has_attention_gate=True,
        moe=moe,
        delta_net=DeltaNetSpec(
            num_key_heads=int(get(config, "linear_num_key_heads", 16)),
            num_value_heads=int(get(config, "linear_num_value_heads", 32)),
            key_dim=int(get(config, "linear_key_head_dim", 128)),
            value_dim=int(get(config, "linear_value_head_dim", 128)),
            conv_width=int(get(config, "linear_conv_kernel_dim", 4)),
        ),
        recurrent=tuple(kind == LINEAR for kind in kinds),
        **options,
    )
