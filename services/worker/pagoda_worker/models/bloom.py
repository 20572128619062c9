"""BLOOM and MPT: linear biases in place of positions (ALiBi)."""

import math

from pagoda_worker.models.alibi import alibi_slopes, power_slopes
from pagoda_worker.models.config_keys import expect
from pagoda_worker.models.hf_config import HfConfig, get, refuse, required
from pagoda_worker.models.spec import DecoderSpec
from pagoda_worker.models.weights import TensorNames

BLOOM_NAMES = TensorNames(
    prefixes=("transformer.",),
    embed_tokens="word_embeddings",
    embedding_norm="word_embeddings_layernorm",
    layers="h",
    qkv=("self_attention.query_key_value",),
    is_qkv_grouped=True,
    o_proj="self_attention.dense",
    up=("mlp.dense_h_to_4h",),
    down_proj="mlp.dense_4h_to_h",
    norm="ln_f",
)
MPT_NAMES = TensorNames(
    prefixes=("transformer.",),
    embed_tokens="wte",
    layers="blocks",
    block_norms={"attention_norm": "norm_1", "mlp_norm": "norm_2"},
    qkv=("attn.Wqkv",),
    o_proj="attn.out_proj",
    up=("ffn.up_proj",),
    down_proj="ffn.down_proj",
    norm="norm_f",
)


def bloom_spec(config: HfConfig) -> DecoderSpec:
    """BloomForCausalLM. It has no longest sequence; seq_length is what it was trained on."""
    refuse(config, "apply_residual_connection_post_layernorm")
    old_names = {"hidden_size": "n_embed", "n_head": "num_attention_heads", "n_layer": "num_hidden_layers"}
    config = {name: config.get(old) for name, old in old_names.items()} | config
    hidden_size, num_heads = int(required(config, "hidden_size")), int(required(config, "n_head"))
    return DecoderSpec(
        architecture="BloomForCausalLM",
        vocab_size=int(required(config, "vocab_size")),
        hidden_size=hidden_size,
        num_layers=int(required(config, "n_layer")),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads,
        intermediate_size=4 * hidden_size,
        max_position_embeddings=int(get(config, "seq_length", 2048)),
        activation="gelu_new",
        norm="layer_norm",
        norm_eps=float(get(config, "layer_norm_epsilon", 1e-5)),
        has_embedding_norm=True,
        is_gated=False,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        alibi_slopes=tuple(alibi_slopes(num_heads)),
        tie_word_embeddings=bool(get(config, "tie_word_embeddings", True)),
    )


def mpt_spec(config: HfConfig) -> DecoderSpec:
    """MPTForCausalLM. All its published sizes have neither biases nor learned positions."""
    attention = get(config, "attn_config", {})
    refuse(attention, "qk_ln", "prefix_lm")
    expect(attention, alibi=True, attn_type="multihead_attention")
    expect(config, learned_pos_emb=True, no_bias=True, norm_type="low_precision_layernorm", expansion_ratio=4)
    expect(config, fc_type="torch", ffn_config={"fc_type": "torch", "ffn_type": "mptmlp"})
    hidden_size, num_heads = int(required(config, "d_model")), int(required(config, "n_heads"))
    power = 2 ** math.ceil(math.log2(num_heads))
    slopes = power_slopes(power, float(get(attention, "alibi_bias_max", 8)))
    if power != num_heads:
        slopes = (slopes[1::2] + slopes[::2])[:num_heads]
    scale = attention.get("softmax_scale")
    num_layers = int(required(config, "n_layers"))
    return DecoderSpec(
        architecture="MptForCausalLM",
        vocab_size=int(required(config, "vocab_size")),
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads,
        intermediate_size=4 * hidden_size,
        max_position_embeddings=int(get(config, "max_seq_len", 2048)),
        activation="gelu",
        norm="layer_norm",
        norm_eps=float(get(config, "layer_norm_epsilon", 1e-5)),
        norm_has_bias=False,
        is_gated=False,
        clip_qkv=attention.get("clip_qkv") or None,
        alibi_slopes=tuple(slopes),
        scales=(float(scale),) * num_layers if scale else (),
        tie_word_embeddings=bool(get(config, "tie_word_embeddings", True)),
    )
