"""Llama and its relatives: Mistral (sliding window), Qwen2 (qkv bias) and Qwen3 (query and key norms)."""

from typing import Any

from pagoda_worker.models.rope import max_positions, rope_spec
from pagoda_worker.models.spec import DecoderSpec, HfConfig, get, required
from pagoda_worker.models.weights import INV_FREQ, LM_HEAD, WeightNames, WeightSource, linear, norm, qkv


def _common(config: HfConfig) -> dict[str, Any]:
    hidden_size, num_heads = int(required(config, "hidden_size")), int(required(config, "num_attention_heads"))
    rope = rope_spec(config)
    return {
        "vocab_size": int(required(config, "vocab_size")),
        "hidden_size": hidden_size,
        "num_layers": int(required(config, "num_hidden_layers")),
        "num_heads": num_heads,
        "num_kv_heads": int(get(config, "num_key_value_heads", num_heads)),
        "head_dim": int(get(config, "head_dim", hidden_size // num_heads)),
        "intermediate_size": int(required(config, "intermediate_size")),
        "max_position_embeddings": max_positions(rope, int(get(config, "max_position_embeddings", 2048))),
        "activation": str(get(config, "hidden_act", "silu")),
        "norm_eps": float(get(config, "rms_norm_eps", 1e-6)),
        "rope": rope,
        "tie_word_embeddings": bool(get(config, "tie_word_embeddings", False)),
    }


def llama_spec(config: HfConfig) -> DecoderSpec:
    """LlamaForCausalLM."""
    bias = bool(get(config, "attention_bias", False))
    return DecoderSpec(
        architecture="LlamaForCausalLM",
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bool(get(config, "mlp_bias", False)),
        **_common(config),
    )


def mistral_spec(config: HfConfig) -> DecoderSpec:
    """MistralForCausalLM. A missing sliding_window means 4096, null means none (as transformers reads it)."""
    common = _common(config) | {"num_kv_heads": int(get(config, "num_key_value_heads", 8))}
    window = config.get("sliding_window", 4096)
    windows = (int(window),) * common["num_layers"] if window else ()
    return DecoderSpec(architecture="MistralForCausalLM", windows=windows, **common)


def _qwen_windows(config: HfConfig, num_layers: int) -> tuple[int | None, ...]:
    window = config.get("sliding_window", 4096) if get(config, "use_sliding_window", False) else None
    if window is None:
        return ()
    first = int(get(config, "max_window_layers", 28))
    default = ["sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)]
    kinds = get(config, "layer_types", default)
    return tuple(int(window) if kind == "sliding_attention" else None for kind in kinds)


def qwen2_spec(config: HfConfig) -> DecoderSpec:
    """Qwen2ForCausalLM: bias on q, k and v only."""
    common = _common(config)
    windows = _qwen_windows(config, common["num_layers"])
    return DecoderSpec(architecture="Qwen2ForCausalLM", qkv_bias=True, windows=windows, **common)


def qwen3_spec(config: HfConfig) -> DecoderSpec:
    """Qwen3ForCausalLM: norms on each head's query and key."""
    common = _common(config) | {"head_dim": int(get(config, "head_dim", 128))}
    bias = bool(get(config, "attention_bias", False))
    return DecoderSpec(
        architecture="Qwen3ForCausalLM",
        qkv_bias=bias,
        o_bias=bias,
        has_qk_norm=True,
        windows=_qwen_windows(config, common["num_layers"]),
        **common,
    )


def llama_weights(spec: DecoderSpec) -> WeightNames:
    """Tensor names of all four."""
    sources = [WeightSource(name="embed_tokens.weight", parameter="embed_tokens.weight")]
    for layer in range(spec.num_layers):
        name = parameter = f"layers.{layer}"
        size = spec.intermediate_size
        gate_up = f"{parameter}.mlp.up_proj"
        sources += norm(spec, f"{name}.input_layernorm", f"{parameter}.attention_norm")
        sources += qkv(spec, f"{name}.self_attn", f"{parameter}.attention")
        sources += linear(f"{name}.self_attn.o_proj", f"{parameter}.attention.o_proj", bias=spec.o_bias)
        if spec.has_qk_norm:
            for which in ("q_norm", "k_norm"):
                sources += norm(spec, f"{name}.self_attn.{which}", f"{parameter}.attention.{which}")
        sources += norm(spec, f"{name}.post_attention_layernorm", f"{parameter}.mlp_norm")
        sources += linear(f"{name}.mlp.gate_proj", gate_up, bias=spec.mlp_bias, row_start=0, num_rows=size)
        sources += linear(f"{name}.mlp.up_proj", gate_up, bias=spec.mlp_bias, row_start=size, num_rows=size)
        sources += linear(f"{name}.mlp.down_proj", f"{parameter}.mlp.down_proj", bias=spec.mlp_bias)
    sources += norm(spec, "norm", "norm")
    if not spec.tie_word_embeddings:
        sources.append(WeightSource(name="lm_head.weight", parameter="lm_head.weight"))
    ignored = (INV_FREQ, LM_HEAD) if spec.tie_word_embeddings else (INV_FREQ,)
    return WeightNames(sources=sources, prefixes=("model.",), ignored=ignored)
