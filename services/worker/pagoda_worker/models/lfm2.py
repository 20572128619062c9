"""LFM2 and LFM2-MoE: a gated short convolution in most layers, attention with norms on queries and keys in some."""

import dataclasses

from pagoda_worker.models.config_keys import unused
from pagoda_worker.models.hf_config import HfConfig, get, required
from pagoda_worker.models.hybrid_config import mixers_of, num_layers_of
from pagoda_worker.models.llama import common
from pagoda_worker.models.recurrent_spec import ShortConvSpec
from pagoda_worker.models.spec import DecoderSpec, MoeSpec
from pagoda_worker.models.weights import TensorNames

LFM2_NAMES = TensorNames(
    block_norms={"attention_norm": "operator_norm", "mlp_norm": "ffn_norm"},
    recurrent="conv",
    conv="conv",
    o_proj="self_attn.out_proj",
    q_norm="self_attn.q_layernorm",
    k_norm="self_attn.k_layernorm",
    up=("feed_forward.w1", "feed_forward.w3"),
    down_proj="feed_forward.w2",
    router="feed_forward.gate",
    correction="feed_forward.expert_bias",
    expert="feed_forward.experts.{}",
    expert_up=("w1", "w3"),
    expert_down="w2",
    norm="embedding_norm",
)


def lfm2_spec(config: HfConfig) -> DecoderSpec:
    """Lfm2ForCausalLM."""
    unused(config, "block_dim", "block_mlp_init_scale", "block_out_init_scale", "block_use_swiglu", "conv_dim_out")
    unused(config, "block_use_xavier_init", "conv_use_xavier_init", "block_norm_eps", "conv_dim", "num_heads")
    unused(config, "use_pos_enc", "theta")
    num_layers, attending = num_layers_of(config), config.get("full_attn_idxs")
    attending = range(num_layers) if attending is None else attending
    kinds = ["full_attention" if layer in attending else "conv" for layer in range(num_layers)]
    size = int(get(config, "block_ff_dim", get(config, "intermediate_size", 12288)))
    sized = config | {"intermediate_size": _adjusted(config, size)}
    return dataclasses.replace(_spec(sized, get(config, "layer_types", kinds)), architecture="Lfm2ForCausalLM")


def lfm2_moe_spec(config: HfConfig) -> DecoderSpec:
    """Lfm2MoeForCausalLM: the first layers have one feed-forward, the others experts."""
    num_dense, has_bias = int(get(config, "num_dense_layers", 2)), bool(get(config, "use_expert_bias", True))
    spec = _spec({"intermediate_size": 7168} | config, required(config, "layer_types"))
    moe = MoeSpec(
        num_experts=int(get(config, "num_experts", 32)),
        num_experts_per_token=int(get(config, "num_experts_per_tok", 4)),
        intermediate_size=int(get(config, "moe_intermediate_size", 1792)),
        is_normalized=bool(get(config, "norm_topk_prob", True)),
        norm_added=1e-6,
        scoring="sigmoid",
        scale=float(get(config, "routed_scaling_factor", 1.0)),
        has_correction=has_bias,
        sparse_layers=tuple(layer >= num_dense for layer in range(spec.num_layers)),
    )
    return dataclasses.replace(spec, architecture="Lfm2MoeForCausalLM", moe=moe)


def _spec(config: HfConfig, kinds: list[str]) -> DecoderSpec:
    """Shared parts of both."""
    config = {"rms_norm_eps": get(config, "norm_eps", 1e-5)} | config
    if (is_tied := config.get("tie_embedding")) is not None:
        config = config | {"tie_word_embeddings": is_tied}
    options = common(config, num_kv_heads=8, is_tied=True, default_theta=1e6, default_max_positions=128000)
    return DecoderSpec(
        qk_norm="head",
        recurrence=ShortConvSpec(
            num_channels=options["hidden_size"],
            conv_width=int(get(config, "conv_L_cache", 3)),
            bias=bool(get(config, "conv_bias", False)),
        ),
        mixers=mixers_of(kinds, options["num_layers"]),
        **options,
    )


def _adjusted(config: HfConfig, size: int) -> int:
    """The feed-forward's width, which a few numbers make of the one that stands there."""
    factor, multiple = config.get("block_ffn_dim_multiplier", 1.0), int(get(config, "block_multiple_of", 256))
    if not get(config, "block_auto_adjust_ff_dim", True):
        return size
    size = int(2 * size / 3)
    return size if factor is None else -(-int(factor * size) // multiple) * multiple
