"""OPT: learned positions that start at row 2, relu, and in the 350m model norms after the residual sums."""

from pagoda_worker.models.hf_config import HfConfig, get, required
from pagoda_worker.models.spec import DecoderSpec
from pagoda_worker.models.weights import TensorNames

OPT_NAMES = TensorNames(
    prefixes=("model.decoder.", "decoder."),
    block_norms={
        "attention_norm": "self_attn_layer_norm",
        "mlp_norm": "final_layer_norm",
        "attention_sum_norm": "self_attn_layer_norm",
        "mlp_sum_norm": "final_layer_norm",
    },
    o_proj="self_attn.out_proj",
    up=("fc1",),
    down_proj="fc2",
    norm="final_layer_norm",
)


def opt_spec(config: HfConfig) -> DecoderSpec:
    """OPTForCausalLM."""
    hidden_size, num_heads = int(required(config, "hidden_size")), int(required(config, "num_attention_heads"))
    embedding_dim = int(get(config, "word_embed_proj_dim", hidden_size))
    is_pre_norm = bool(get(config, "do_layer_norm_before", True))
    bias = bool(get(config, "enable_bias", True))
    return DecoderSpec(
        architecture="OPTForCausalLM",
        vocab_size=int(required(config, "vocab_size")),
        hidden_size=hidden_size,
        num_layers=int(required(config, "num_hidden_layers")),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads,
        intermediate_size=int(required(config, "ffn_dim")),
        max_position_embeddings=int(get(config, "max_position_embeddings", 2048)),
        activation=str(get(config, "activation_function", "relu")),
        norm="layer_norm",
        norm_eps=1e-5,
        norm_has_weights=bool(get(config, "layer_norm_elementwise_affine", True)),
        is_gated=False,
        norms="input" if is_pre_norm else "sum",
        has_final_norm=is_pre_norm and not bool(get(config, "_remove_final_layer_norm", False)),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        position_offset=2,
        embedding_dim=None if embedding_dim == hidden_size else embedding_dim,
        tie_word_embeddings=bool(get(config, "tie_word_embeddings", True)),
    )
