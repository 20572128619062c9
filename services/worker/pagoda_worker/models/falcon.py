"""Falcon: attention and feed-forward side by side, few KV heads, fused qkv by KV head."""

from pagoda_worker.models.config_keys import unused
from pagoda_worker.models.hf_config import HfConfig, get, refuse, required
from pagoda_worker.models.rope import max_positions, rope_spec
from pagoda_worker.models.spec import DecoderSpec
from pagoda_worker.models.weights import TensorNames, WeightNames, weight_names


def falcon_spec(config: HfConfig) -> DecoderSpec:
    """FalconForCausalLM, of both generations."""
    refuse(config, "alibi")
    old_names = {"hidden_size": "n_embed", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer"}
    config = {name: config.get(old) for name, old in old_names.items()} | config
    hidden_size, num_heads = int(required(config, "hidden_size")), int(required(config, "num_attention_heads"))
    is_new = bool(get(config, "new_decoder_architecture", False))
    num_kv_heads = int(get(config, "num_kv_heads", num_heads))
    if get(config, "multi_query", True) and not is_new:
        num_kv_heads = 1
    is_parallel = is_new or bool(get(config, "parallel_attn", True))
    unused(config, "parallel_attn")  # by the newer generation
    bias = bool(get(config, "bias", False))
    rope = rope_spec(config)
    num_norms = int(get(config, "num_ln_in_parallel_attn", 2 if is_new else 1))
    return DecoderSpec(
        architecture="FalconForCausalLM",
        vocab_size=int(required(config, "vocab_size")),
        hidden_size=hidden_size,
        num_layers=int(
            get(config, "num_hidden_layers", config.get("n_layer") or required(config, "num_hidden_layers"))
        ),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=hidden_size // num_heads,
        intermediate_size=int(get(config, "ffn_hidden_size", 4 * hidden_size)),
        max_position_embeddings=max_positions(rope, int(get(config, "max_position_embeddings", 2048))),
        activation=str(get(config, "activation", "gelu")),
        norm="layer_norm",
        norm_eps=float(get(config, "layer_norm_epsilon", 1e-5)),
        is_gated=False,
        is_parallel=is_parallel,
        has_mlp_norm=not is_parallel or (is_new and num_norms == 2),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        rope=rope,
        tie_word_embeddings=bool(get(config, "tie_word_embeddings", True)),
    )


def falcon_weights(spec: DecoderSpec) -> WeightNames:
    """Tensor names; a parallel layer with two norms calls them otherwise."""
    has_two = spec.is_parallel and spec.has_mlp_norm
    names = TensorNames(
        prefixes=("transformer.",),
        embed_tokens="word_embeddings",
        layers="h",
        block_norms={
            "attention_norm": "ln_attn" if has_two else "input_layernorm",
            "mlp_norm": "ln_mlp" if has_two else "post_attention_layernorm",
        },
        qkv=("self_attention.query_key_value",),
        is_qkv_grouped=True,
        o_proj="self_attention.dense",
        up=("mlp.dense_h_to_4h",),
        down_proj="mlp.dense_4h_to_h",
        norm="ln_f",
    )
    return weight_names(spec, names)
