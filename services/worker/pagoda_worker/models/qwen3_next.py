"""Qwen3-Next: three layers of four are gated delta nets, the others have a gate on attention; experts in all."""

import re

from pagoda_worker.models.hf_config import HfConfig, get
from pagoda_worker.models.hybrid_config import mixers_of
from pagoda_worker.models.llama import common
from pagoda_worker.models.moe import qwen_moe
from pagoda_worker.models.recurrent_spec import DeltaNetSpec, Mixer
from pagoda_worker.models.spec import DecoderSpec
from pagoda_worker.models.weights import TensorNames

QWEN3_NEXT_NAMES = TensorNames(ignored=(*TensorNames().ignored, re.compile(r"^mtp\.")))


def qwen3_next_spec(config: HfConfig) -> DecoderSpec:
    """Qwen3NextForCausalLM. Layers for multi-token prediction (mtp) are left out."""
    options = common(
        {"partial_rotary_factor": 0.25} | config, num_kv_heads=2, head_dim=256, default_max_positions=32768
    )
    num_layers = options["num_layers"]
    bias = bool(get(config, "attention_bias", False))
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
        recurrence=delta_net_of(config),
        mixers=delta_net_mixers(config, num_layers),
        **options,
    )


def delta_net_of(config: HfConfig) -> DeltaNetSpec:
    """The gated delta net of Qwen's models."""
    return DeltaNetSpec(
        num_key_heads=int(get(config, "linear_num_key_heads", 16)),
        num_value_heads=int(get(config, "linear_num_value_heads", 32)),
        key_dim=int(get(config, "linear_key_head_dim", 128)),
        value_dim=int(get(config, "linear_value_head_dim", 128)),
        conv_width=int(get(config, "linear_conv_kernel_dim", 4)),
    )


def delta_net_mixers(config: HfConfig, num_layers: int) -> tuple[Mixer, ...]:
    """What each layer has; where config.json has no layer_types, every fourth attends, or as full_attention_interval
    says."""
    interval = int(get(config, "full_attention_interval", 4))
    kinds = ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(num_layers)]
    return mixers_of(get(config, "layer_types", kinds), num_layers)
