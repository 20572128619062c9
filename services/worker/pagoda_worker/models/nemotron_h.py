"""Nemotron-H: each layer is Mamba-2, attention, a feed-forward or experts, without a gate and without positions."""

import re
from typing import Any

from pagoda_common.errors import ModelLoadError
from pagoda_worker.models.config_keys import expect, unused
from pagoda_worker.models.hf_config import HfConfig, get, required, sizes
from pagoda_worker.models.hybrid_config import MIXERS, step_limits
from pagoda_worker.models.recurrent_spec import Mamba2Spec
from pagoda_worker.models.spec import DecoderSpec, MoeSpec
from pagoda_worker.models.weights import TensorNames

LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
"""Letters of hybrid_override_pattern."""
NEMOTRON_H_NAMES = TensorNames(
    prefixes=("backbone.", "model."),
    embed_tokens="embeddings",
    block_norms={"attention_norm": "norm", "mlp_norm": "norm"},
    qkv=("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
    o_proj="mixer.o_proj",
    recurrent="mixer",
    up=("mixer.up_proj",),
    down_proj="mixer.down_proj",
    router="mixer.gate",
    correction="mixer.gate.e_score_correction_bias",
    latent_in="mixer.fc1_latent_proj",
    latent_out="mixer.fc2_latent_proj",
    shared_expert="mixer.shared_experts",
    expert="mixer.experts.{}",
    expert_up=("up_proj",),
    norm="norm_f",
    ignored=(*TensorNames().ignored, re.compile(r"^mtp\.")),
)


def nemotron_h_spec(config: HfConfig) -> DecoderSpec:
    """NemotronHForCausalLM.

    Layers for multi-token prediction (mtp) are left out. sliding_window has no effect, as in transformers.
    """
    unused(config, "sliding_window", "num_nextn_predict_layers", "mtp_layers_block_type", "mtp_hybrid_override_pattern")
    unused(config, "num_hidden_layers", "rescale_prenorm_residual", "residual_in_fp32", "num_logits_to_keep")
    unused(
        config, "use_mamba_kernels", "mamba_ssm_cache_dtype", "moe_shared_expert_overlap", "rms_norm_eps", "norm_eps"
    )
    unused(config, "rope_theta", "partial_rotary_factor", "rope_parameters", "rope_scaling")
    kinds = _layer_kinds(config)
    head_dim = get(config, "head_dim", get(config, "attention_head_dim", 128))
    counted = {"num_hidden_layers": len(kinds), "intermediate_size": 21504, "head_dim": head_dim}
    options = sizes({"num_attention_heads": 32, "num_key_value_heads": 8} | config | (counted | _given(config)))
    bias = bool(get(config, "attention_bias", False))
    return DecoderSpec(
        architecture="NemotronHForCausalLM",
        max_position_embeddings=int(get(config, "max_position_embeddings", 4096)),
        activation=str(get(config, "mlp_hidden_act", "relu2")),
        norm_eps=float(get(config, "layer_norm_epsilon", 1e-5)),
        is_gated=False,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bool(get(config, "mlp_bias", False)),
        has_positions=False,
        recurrence=_mamba2(config),
        mixers=tuple(MIXERS.get(kind, "none") for kind in kinds),
        feed_forwards=tuple(kind in ("mlp", "moe") for kind in kinds),
        moe=_moe(config, kinds) if "moe" in kinds else None,
        **options,
    )


def _given(config: HfConfig) -> dict[str, Any]:
    """Sizes in config.json that a default must not hide."""
    size = config.get("intermediate_size")
    return {} if size is None else {"intermediate_size": size}


def _layer_kinds(config: HfConfig) -> list[str]:
    """linear_attention, full_attention, mlp or moe for each layer."""
    pattern = config.get("hybrid_override_pattern")
    kinds = get(config, "layers_block_type", get(config, "layer_types", None))
    if kinds is None:
        pattern = "ME*-" if pattern is None else pattern
        if unknown := set(pattern) - set(LETTERS):
            raise ModelLoadError(f"hybrid_override_pattern has {sorted(unknown)}; supported are {', '.join(LETTERS)}")
        kinds = [LETTERS[letter] for letter in pattern]
    for kind in kinds:
        if kind not in (*MIXERS, "mlp", "moe"):
            raise ModelLoadError(f"layer type {kind!r} is not supported; supported are {', '.join(LETTERS.values())}")
    return list(kinds)


def _mamba2(config: HfConfig) -> Mamba2Spec:
    unused(config, "expand", "mamba_expand", "chunk_size", "mamba_chunk_size", "mamba_proj_bias")
    unused(config, "time_step_min", "time_step_max", "time_step_floor", "time_step_rank")
    expect(config, mamba_hidden_act="silu")
    num_groups, bias = (
        int(get(config, "n_groups", get(config, "mamba_n_groups", 8))),
        bool(get(config, "use_bias", False)),
    )
    return Mamba2Spec(
        num_heads=int(get(config, "mamba_num_heads", 128)),
        head_dim=int(get(config, "mamba_head_dim", 64)),
        num_groups=num_groups,
        state_size=int(get(config, "ssm_state_size", 128)),
        conv_width=int(get(config, "conv_kernel", get(config, "mamba_d_conv", 4))),
        conv_bias=bool(get(config, "use_conv_bias", get(config, "mamba_conv_bias", True))),
        in_bias=bias,
        out_bias=bias,
        norm_groups=num_groups,
        steps=step_limits(config),
    )


def _moe(config: HfConfig, kinds: list[str]) -> MoeSpec:
    unused(config, "n_shared_experts")
    latent = config.get("moe_latent_size")
    if latent is not None:
        expect(config, mlp_bias=False)
    return MoeSpec(
        num_experts=int(get(config, "n_routed_experts", get(config, "num_local_experts", 8))),
        num_experts_per_token=int(get(config, "num_experts_per_tok", 2)),
        intermediate_size=int(required({"moe_intermediate_size": 7688} | config, "moe_intermediate_size")),
        latent_size=int(latent or 0),
        is_normalized=bool(get(config, "norm_topk_prob", True)),
        scoring="sigmoid",
        scale=float(get(config, "routed_scaling_factor", 1.0)),
        num_groups=int(get(config, "n_group", 1)),
        top_groups=int(get(config, "topk_group", 1)),
        group_score="top2",
        has_correction=True,
        expert_bias=False,
        shared_intermediate_size=int(get(config, "moe_shared_expert_intermediate_size", 7688)),
        shared_is_gated=False,
        sparse_layers=tuple(kind == "moe" for kind in kinds),
    )
