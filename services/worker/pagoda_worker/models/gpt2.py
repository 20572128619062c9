"""GPT-2: learned positions, layer norms, fused qkv stored [in, out]."""

import re

from pagoda_worker.models.spec import DecoderSpec, HfConfig, get, required
from pagoda_worker.models.weights import LM_HEAD, WeightNames, WeightSource, linear, norm


def gpt2_spec(config: HfConfig) -> DecoderSpec:
    """GPT2LMHeadModel."""
    hidden_size, num_heads = int(required(config, "n_embd")), int(required(config, "n_head"))
    num_layers, head_dim = int(required(config, "n_layer")), hidden_size // num_heads
    base = head_dim**-0.5 if get(config, "scale_attn_weights", True) else 1.0
    by_layer = bool(get(config, "scale_attn_by_inverse_layer_idx", False))
    return DecoderSpec(
        architecture="GPT2LMHeadModel",
        vocab_size=int(required(config, "vocab_size")),
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        intermediate_size=int(get(config, "n_inner", 4 * hidden_size)),
        max_position_embeddings=int(get(config, "n_positions", 1024)),
        activation=str(get(config, "activation_function", "gelu_new")),
        norm="layer_norm",
        norm_eps=float(get(config, "layer_norm_epsilon", 1e-5)),
        is_gated=False,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        scales=tuple(base / (layer + 1 if by_layer else 1) for layer in range(num_layers)),
        tie_word_embeddings=bool(get(config, "tie_word_embeddings", True)),
    )


def gpt2_weights(spec: DecoderSpec) -> WeightNames:
    """Tensor names; the attention masks that old checkpoints carry are ignored."""
    sources = [
        WeightSource(name="wte.weight", parameter="embed_tokens.weight"),
        WeightSource(name="wpe.weight", parameter="embed_positions.weight"),
    ]
    for layer in range(spec.num_layers):
        name, parameter = f"h.{layer}", f"layers.{layer}"
        sources += norm(spec, f"{name}.ln_1", f"{parameter}.attention_norm")
        sources += norm(spec, f"{name}.ln_2", f"{parameter}.mlp_norm")
        for hf, ours in (
            ("attn.c_attn", "attention.qkv_proj"),
            ("attn.c_proj", "attention.o_proj"),
            ("mlp.c_fc", "mlp.up_proj"),
            ("mlp.c_proj", "mlp.down_proj"),
        ):
            sources += linear(f"{name}.{hf}", f"{parameter}.{ours}", bias=True, is_transposed=True)
    sources += norm(spec, "ln_f", "norm")
    if not spec.tie_word_embeddings:
        sources.append(WeightSource(name="lm_head.weight", parameter="lm_head.weight"))
    ignored = (re.compile(r"\.attn\.(bias|masked_bias)$"), *((LM_HEAD,) if spec.tie_word_embeddings else ()))
    return WeightNames(sources=sources, prefixes=("transformer.",), ignored=ignored)
