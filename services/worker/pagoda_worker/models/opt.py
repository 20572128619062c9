"""OPT: learned positions that start at row 2, relu, and in the 350m model norms behind the residual sums."""

from pagoda_worker.models.spec import DecoderSpec, HfConfig, get, required
from pagoda_worker.models.weights import LM_HEAD, WeightNames, WeightSource, linear, norm, qkv


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
        is_post_norm=not is_pre_norm,
        has_final_norm=is_pre_norm and not bool(get(config, "_remove_final_layer_norm", False)),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        position_offset=2,
        embedding_dim=None if embedding_dim == hidden_size else embedding_dim,
        tie_word_embeddings=bool(get(config, "tie_word_embeddings", True)),
    )


def opt_weights(spec: DecoderSpec) -> WeightNames:
    """Tensor names."""
    sources = [
        WeightSource(name="embed_tokens.weight", parameter="embed_tokens.weight"),
        WeightSource(name="embed_positions.weight", parameter="embed_positions.weight"),
    ]
    if spec.embedding_dim is not None:
        sources += linear("project_in", "project_in", bias=False)
        sources += linear("project_out", "project_out", bias=False)
    for layer in range(spec.num_layers):
        name = parameter = f"layers.{layer}"
        sources += norm(spec, f"{name}.self_attn_layer_norm", f"{parameter}.attention_norm")
        sources += qkv(spec, f"{name}.self_attn", f"{parameter}.attention")
        sources += linear(f"{name}.self_attn.out_proj", f"{parameter}.attention.o_proj", bias=spec.o_bias)
        sources += norm(spec, f"{name}.final_layer_norm", f"{parameter}.mlp_norm")
        sources += linear(f"{name}.fc1", f"{parameter}.mlp.up_proj", bias=spec.mlp_bias)
        sources += linear(f"{name}.fc2", f"{parameter}.mlp.down_proj", bias=spec.mlp_bias)
    if spec.has_final_norm:
        sources += norm(spec, "final_layer_norm", "norm")
    if not spec.tie_word_embeddings:
        sources.append(WeightSource(name="lm_head.weight", parameter="lm_head.weight"))
    ignored = (LM_HEAD,) if spec.tie_word_embeddings else ()
    return WeightNames(sources=sources, prefixes=("model.decoder.", "decoder."), ignored=ignored)
