"""DeepSeek-V2 and V3, whose attention caches latents; also Kimi K2, which is V3 with other sizes."""

import dataclasses
import math
import re
from typing import Any

from pagoda_worker.models.config_keys import expect, unused
from pagoda_worker.models.hf_config import HfConfig, get, required
from pagoda_worker.models.llama import common
from pagoda_worker.models.spec import DecoderSpec, LatentSpec, MoeSpec, RopeSpec
from pagoda_worker.models.weights import TensorNames, WeightNames, weight_names

DEEPSEEK_NAMES = TensorNames(shared_expert="mlp.shared_experts")
LATENTS: HfConfig = {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
"""Default if config.json has none."""
MAX_PREDICTED = 8
"""Layers after the last one that predict more tokens at once (mtp), which are left out."""


def deepseek_v2_spec(config: HfConfig) -> DecoderSpec:
    """DeepseekV2ForCausalLM: softmax over all experts, perhaps those of the best groups alone."""
    expect(config, norm_topk_prob=False, scoring_func="softmax")
    method = get(config, "topk_method", "greedy")
    if method != "group_limited_greedy":
        expect(config, topk_method="greedy")
    unused(config, "n_group", "topk_group")
    is_limited = method == "group_limited_greedy"
    options = latent_options(LATENTS | config, default_max_positions=2048)
    defaults = {"n_routed_experts": 64, "n_shared_experts": 2, "moe_intermediate_size": 1407}
    moe = _mixture(
        defaults | config,
        _sparse(config, options["num_layers"], default_first=0),
        is_normalized=False,
        num_groups=int(get(config, "n_group", 1)) if is_limited else 1,
        top_groups=int(get(config, "topk_group", 1)) if is_limited else 1,
        scale=float(get(config, "routed_scaling_factor", 1.0)),
    )
    bias = bool(get(config, "mlp_bias", False))
    return DecoderSpec(architecture="DeepseekV2ForCausalLM", mlp_bias=bias, moe=moe, **options)


def deepseek_v3_spec(config: HfConfig) -> DecoderSpec:
    """DeepseekV3ForCausalLM."""
    expect(config, scoring_func="sigmoid", topk_method="noaux_tc")
    options = latent_options(
        LATENTS | config, default_max_positions=4096, is_interleaved=bool(get(config, "rope_interleave", True))
    )
    defaults = {"n_routed_experts": 256, "moe_intermediate_size": 2048, "n_group": 8, "topk_group": 4}
    moe = sigmoid_mixture(
        defaults | {"routed_scaling_factor": 2.5} | config,
        _sparse(config, options["num_layers"], default_first=3),
    )
    return DecoderSpec(architecture="DeepseekV3ForCausalLM", moe=moe, **options)


def deepseek_weights(spec: DecoderSpec) -> WeightNames:
    """All tensors; layers that predict more tokens at once are left out."""
    names = weight_names(spec, DEEPSEEK_NAMES)
    more = "|".join(str(spec.num_layers + index) for index in range(MAX_PREDICTED))
    return dataclasses.replace(names, ignored=(*names.ignored, re.compile(rf"^layers\.({more})\.")))


def latent_options(
    config: HfConfig, *, default_max_positions: int, is_interleaved: bool = True, **defaults: Any
) -> dict[str, Any]:
    """Parameters of models with latents: these, and the sizes that most decoders have. `defaults`: see `common`."""
    expect(config, moe_layer_freq=1)
    unused(config, "ep_size", "aux_loss_alpha", "seq_aux", "num_key_value_heads", "head_dim", "qk_head_dim")
    rotary_dim, bias = int(required(config, "qk_rope_head_dim")), bool(get(config, "attention_bias", False))
    q_rank = config.get("q_lora_rank")
    latent = LatentSpec(
        kv_rank=int(required(config, "kv_lora_rank")),
        key_dim=int(required(config, "qk_nope_head_dim")),
        value_dim=int(required(config, "v_head_dim")),
        q_rank=None if q_rank is None else int(q_rank),
        bias=bias,
    )
    options = common(
        config | {"num_key_value_heads": 1, "head_dim": rotary_dim},
        default_max_positions=default_max_positions,
        is_interleaved=is_interleaved,
        **defaults,
    )
    scale = latent_scale(latent, rotary_dim=rotary_dim, rope=options["rope"])
    return options | {"latent": latent, "o_bias": bias, "scales": (scale,) * options["num_layers"]}


def latent_scale(latent: LatentSpec, *, rotary_dim: int, rope: RopeSpec) -> float:
    """Scale of scores: yarn's mscale_all_dim applies to queries and keys."""
    parameters = dict(rope.parameters)
    factor, mscale = float(parameters.get("factor", 1.0)), float(parameters.get("mscale_all_dim") or 0.0)
    stretch = 1.0 + 0.1 * mscale * math.log(factor) if factor > 1.0 else 1.0
    return float((latent.key_dim + rotary_dim) ** -0.5 * stretch * stretch)


def sigmoid_mixture(config: HfConfig, sparse: tuple[bool, ...]) -> MoeSpec | None:
    """Routing by sigmoid, with a correction for the choice only, and groups ranked by their two best experts."""
    unused(config, "num_nextn_predict_layers", "num_mtp_layers")
    defaults = {"n_shared_experts": 1, "num_experts_per_tok": 8}
    return _mixture(
        defaults | config,
        sparse,
        scoring="sigmoid",
        is_normalized=bool(get(config, "norm_topk_prob", True)),
        norm_added=1e-20,
        has_correction=True,
        num_groups=int(get(config, "n_group", 1)),
        top_groups=int(get(config, "topk_group", 1)),
        group_score="top2",
        scale=float(get(config, "routed_scaling_factor", 1.0)),
    )


def _sparse(config: HfConfig, num_layers: int, *, default_first: int) -> tuple[bool, ...]:
    """Which layers have experts: all but the first few."""
    first = int(get(config, "first_k_dense_replace", default_first))
    return tuple(layer >= first for layer in range(num_layers))


def _mixture(config: HfConfig, sparse: tuple[bool, ...], **router: Any) -> MoeSpec | None:
    """Experts with a shared one; None if config.json has none."""
    num_experts, num_shared = config["n_routed_experts"], int(get(config, "n_shared_experts", 0))
    size = int(config["moe_intermediate_size"])
    if num_experts is None:
        unused(config, "num_experts_per_tok")
        return None
    return MoeSpec(
        num_experts=int(num_experts),
        num_experts_per_token=int(required(config, "num_experts_per_tok")),
        intermediate_size=size,
        shared_intermediate_size=size * num_shared,
        shared_is_gated=False,
        sparse_layers=sparse,
        **router,
    )
