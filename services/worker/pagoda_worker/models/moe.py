"""Mixtures of experts with known attention: Mixtral, Qwen2-MoE, Qwen3-MoE and OLMoE."""

import dataclasses

from pagoda_worker.models.config_keys import unused
from pagoda_worker.models.hf_config import LOCAL, HfConfig, get, layer_kinds, required, windows
from pagoda_worker.models.llama import common, qwen3_spec
from pagoda_worker.models.spec import DecoderSpec, MoeSpec
from pagoda_worker.models.weights import TensorNames

MIXTRAL_NAMES = TensorNames(
    router="block_sparse_moe.gate",
    expert="block_sparse_moe.experts.{}",
    expert_up=("w1", "w3"),
    expert_down="w2",
)
QWEN_MOE_NAMES = TensorNames()


def mixtral_spec(config: HfConfig) -> DecoderSpec:
    """MixtralForCausalLM."""
    options = common(config, num_kv_heads=8, default_theta=1e6, default_eps=1e-5, default_max_positions=4096 * 32)
    return DecoderSpec(
        architecture="MixtralForCausalLM",
        windows=windows([LOCAL] * options["num_layers"], config.get("sliding_window")),
        moe=MoeSpec(
            num_experts=int(get(config, "num_local_experts", 8)),
            num_experts_per_token=int(get(config, "num_experts_per_tok", 2)),
            intermediate_size=options["intermediate_size"],
        ),
        **options,
    )


def qwen2_moe_spec(config: HfConfig) -> DecoderSpec:
    """Qwen2MoeForCausalLM: a shared expert with a gate sees every token."""
    options = common(config, num_kv_heads=16, default_max_positions=32768)
    unused(config, "sliding_window")
    window = config.get("sliding_window", 4096) if get(config, "use_sliding_window", False) else None
    first_full = int(get(config, "max_window_layers", 28))
    kinds = layer_kinds(config, options["num_layers"], lambda layer: layer % 2 == 0 and layer < first_full)
    shared = int(get(config, "shared_expert_intermediate_size", 5632))
    return DecoderSpec(
        architecture="Qwen2MoeForCausalLM",
        qkv_bias=bool(get(config, "qkv_bias", True)),
        windows=windows(kinds, window),
        moe=qwen_moe(config, options["num_layers"], shared_intermediate_size=shared),
        **options,
    )


def qwen3_moe_spec(config: HfConfig) -> DecoderSpec:
    """Qwen3MoeForCausalLM. If it has a window, all layers have."""
    unused(config, "sliding_window")
    window = config.get("sliding_window", 4096) if get(config, "use_sliding_window", False) else None
    hidden_size, num_heads = int(required(config, "hidden_size")), int(required(config, "num_attention_heads"))
    head_dim = get(config, "head_dim", hidden_size // num_heads)
    dense = qwen3_spec({"num_key_value_heads": 4} | config | {"head_dim": head_dim})
    return dataclasses.replace(
        dense,
        architecture="Qwen3MoeForCausalLM",
        windows=windows([LOCAL] * dense.num_layers, window),
        moe=qwen_moe(config, dense.num_layers),
    )


def olmoe_spec(config: HfConfig) -> DecoderSpec:
    """OlmoeForCausalLM: query and key norms over all heads."""
    options = common(config, default_eps=1e-5, default_max_positions=4096)
    bias = bool(get(config, "attention_bias", False))
    return DecoderSpec(
        architecture="OlmoeForCausalLM",
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="width",
        clip_qkv=config.get("clip_qkv"),
        moe=MoeSpec(
            num_experts=int(get(config, "num_experts", 64)),
            num_experts_per_token=int(get(config, "num_experts_per_tok", 8)),
            intermediate_size=options["intermediate_size"],
            is_normalized=bool(get(config, "norm_topk_prob", False)),
        ),
        **options,
    )


def qwen_moe(config: HfConfig, num_layers: int, *, shared_intermediate_size: int = 0) -> MoeSpec | None:
    """Experts by Qwen's configs; None if there are none."""
    num_experts = int(get(config, "num_experts", get(config, "num_local_experts", 0)))
    step, dense_layers = int(get(config, "decoder_sparse_step", 1)), get(config, "mlp_only_layers", [])
    if not num_experts:
        return None
    return MoeSpec(
        num_experts=num_experts,
        num_experts_per_token=int(required(config, "num_experts_per_tok")),
        intermediate_size=int(required(config, "moe_intermediate_size")),
        is_normalized=bool(get(config, "norm_topk_prob", False)),
        shared_intermediate_size=shared_intermediate_size,
        sparse_layers=tuple((layer + 1) % step == 0 and layer not in dense_layers for layer in range(num_layers)),
    )
