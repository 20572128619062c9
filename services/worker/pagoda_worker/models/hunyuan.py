"""Hunyuan: norms of each head after the rotation, whose base is scaled by a constant; dense, or with experts."""

from typing import Any

from pagoda_common.errors import ModelLoadError
from pagoda_worker.models.config_keys import expect, unused
from pagoda_worker.models.hf_config import HfConfig, get, required
from pagoda_worker.models.llama import common
from pagoda_worker.models.spec import DecoderSpec, MoeSpec
from pagoda_worker.models.weights import TensorNames

HUNYUAN_NAMES = TensorNames(
    q_norm="self_attn.query_layernorm",
    k_norm="self_attn.key_layernorm",
    router="mlp.gate.wg",
    shared_expert="mlp.shared_mlp",
)


def hunyuan_dense_spec(config: HfConfig) -> DecoderSpec:
    """HunYuanDenseV1ForCausalLM."""
    return DecoderSpec(architecture="HunYuanDenseV1ForCausalLM", **_options(config))


def hunyuan_moe_spec(config: HfConfig) -> DecoderSpec:
    """HunYuanMoEV1ForCausalLM: every layer has experts and a shared expert of the same size."""
    expect(config, norm_topk_prob=True, use_mixed_mlp_moe=True, moe_layer_num_skipped=0, routed_scaling_factor=1.0)
    # Of training, and of groups that are not limited.
    unused(config, "capacity_factor", "moe_drop_tokens", "moe_random_routing_dropped_token", "n_group", "topk_group")
    options = _options(config)
    size = options["intermediate_size"]
    for name, value in (("num_shared_expert", 1), ("moe_intermediate_size", size)):
        if _of_all_layers(config, name, value) != value:
            raise ModelLoadError(f"config.json has {name} {config[name]!r}, which is not supported; must be {value}")
    top_k = _of_all_layers(config, "moe_topk", get(config, "num_experts_per_tok", 1))
    return DecoderSpec(
        architecture="HunYuanMoEV1ForCausalLM",
        moe=MoeSpec(
            num_experts=_of_all_layers(config, "num_experts", get(config, "num_local_experts", 1)),
            num_experts_per_token=top_k,
            intermediate_size=size,
            shared_intermediate_size=size,
            shared_is_gated=False,
        ),
        **options,
    )


def _options(config: HfConfig) -> dict[str, Any]:
    """The shared part."""
    expect(config, use_qk_norm=True, use_cla=False, norm_type="rms", use_rotary_pos_emb=True, mlp_bias=False)
    # Of tokens, of heads for other tasks, of images, and of what `use_cla` would share.
    unused(config, "org_vocab_size", "pad_id", "im_start_id", "im_end_id", "im_newline_id", "text_start_id")
    unused(config, "text_end_id", "mask_init_id", "pool_type", "class_num", "dense_list", "cla_share_factor")
    unused(config, "anyres_pooling_size", "num_media_embeds", "video_start_id", "video_end_id")
    unused(config, *(name for name in config if name.startswith("vit_")))
    equal_share = int(required(config, "hidden_size")) // int(required(config, "num_attention_heads"))
    head_dim = int(get(config, "head_dim", get(config, "attention_head_dim", equal_share)))
    options = common(_stretched(config, head_dim) | {"head_dim": head_dim}, default_eps=1e-5)
    bias = bool(get(config, "attention_bias", False))
    return options | {"qk_norm": "turned_head", "qkv_bias": bias, "o_bias": bias}


def _stretched(config: HfConfig, head_dim: int) -> HfConfig:
    """The rotation with its base scaled by `alpha`, for any length (transformers' rule)."""
    rope = dict(get(config, "rope_scaling", {})) | dict(get(config, "rope_parameters", {}))
    alpha = rope.get("alpha")
    if not alpha or rope.get("rope_type", rope.get("type")) != "dynamic":
        return config
    theta = get(rope, "rope_theta", get(config, "rope_theta", 10000.0)) * alpha ** (head_dim / (head_dim - 2))
    return config | {"rope_scaling": None, "rope_parameters": {"rope_type": "default", "rope_theta": theta}}


def _of_all_layers(config: HfConfig, name: str, default: int) -> int:
    """A number, or the common value of a list with one per layer.

    Raises:
        ModelLoadError: layers differ.
    """
    given = get(config, name, default)
    values = set(given) if isinstance(given, list) else {given}
    if len(values) != 1:
        raise ModelLoadError(f"{name} must be the same in all layers, is {given!r}")
    return int(values.pop())
