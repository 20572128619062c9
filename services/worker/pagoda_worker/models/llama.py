"""Llama and models that differ from it by options: Mistral, Qwen2, Qwen3, SmolLM3, Granite, Arcee, ERNIE, Seed,
InternLM3."""

from typing import Any

from pagoda_worker.models.config_keys import unused
from pagoda_worker.models.hf_config import LOCAL, HfConfig, get, layer_kinds, sizes, windows
from pagoda_worker.models.rope import max_positions, rope_spec
from pagoda_worker.models.spec import DecoderSpec
from pagoda_worker.models.weights import TensorNames

LLAMA_NAMES = TensorNames()
ARCEE_NAMES = TensorNames(up=("mlp.up_proj",))


def common(
    config: HfConfig,
    *,
    default_max_positions: int = 2048,
    default_theta: float = 10000.0,
    default_eps: float = 1e-6,
    is_interleaved: bool = False,
    **defaults: Any,
) -> dict[str, Any]:
    """Options that Llama and its relatives share; the defaults of missing values are transformers'."""
    rope = rope_spec(config, default_theta=default_theta, is_interleaved=is_interleaved)
    return {
        **sizes(config, **defaults),
        "max_position_embeddings": max_positions(
            rope, int(get(config, "max_position_embeddings", default_max_positions))
        ),
        "activation": str(get(config, "hidden_act", "silu")),
        "norm_eps": float(get(config, "rms_norm_eps", default_eps)),
        "rope": rope,
    }


def llama_spec(config: HfConfig) -> DecoderSpec:
    """LlamaForCausalLM."""
    bias = bool(get(config, "attention_bias", False))
    return DecoderSpec(
        architecture="LlamaForCausalLM",
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bool(get(config, "mlp_bias", False)),
        **common(config),
    )


def mistral_spec(config: HfConfig) -> DecoderSpec:
    """MistralForCausalLM. A missing sliding_window means 4096, null means none (as transformers reads it)."""
    options = common(config, num_kv_heads=8, default_max_positions=4096 * 32)
    window = config.get("sliding_window", 4096)
    return DecoderSpec(
        architecture="MistralForCausalLM", windows=windows([LOCAL] * options["num_layers"], window), **options
    )


def ministral_spec(config: HfConfig) -> DecoderSpec:
    """MinistralForCausalLM: Mistral with the window in the layers that layer_types names."""
    options = common(config, num_kv_heads=8, default_max_positions=4096 * 32)
    window = config.get("sliding_window", 4096)
    kinds = layer_kinds(config, options["num_layers"], lambda layer: window is not None)
    return DecoderSpec(architecture="MinistralForCausalLM", windows=windows(kinds, window), **options)


def qwen_windows(config: HfConfig, num_layers: int) -> tuple[int | None, ...]:
    """Sliding windows of Qwen's layers: from layer max_window_layers, if they are used at all."""
    window = config.get("sliding_window", 4096) if get(config, "use_sliding_window", False) else None
    unused(config, "sliding_window")
    first = int(get(config, "max_window_layers", 28))
    return windows(layer_kinds(config, num_layers, lambda layer: layer >= first), window)


def qwen2_spec(config: HfConfig) -> DecoderSpec:
    """Qwen2ForCausalLM: bias on q, k and v only."""
    options = common(config, num_kv_heads=32, default_max_positions=32768)
    return DecoderSpec(
        architecture="Qwen2ForCausalLM",
        qkv_bias=True,
        windows=qwen_windows(config, options["num_layers"]),
        **options,
    )


def qwen3_spec(config: HfConfig) -> DecoderSpec:
    """Qwen3ForCausalLM: norms on each head's query and key."""
    options = common(config, num_kv_heads=32, head_dim=128, default_max_positions=32768)
    bias = bool(get(config, "attention_bias", False))
    return DecoderSpec(
        architecture="Qwen3ForCausalLM",
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="head",
        windows=qwen_windows(config, options["num_layers"]),
        **options,
    )


def smollm3_spec(config: HfConfig) -> DecoderSpec:
    """SmolLM3ForCausalLM: every fourth layer has no positions at all."""
    options = common(config, default_theta=2e6, default_max_positions=32768, num_kv_heads=4, is_tied=True)
    num_layers = options["num_layers"]
    interval = int(get(config, "no_rope_layer_interval", 4))
    has_rope = get(config, "no_rope_layers", [(layer + 1) % interval != 0 for layer in range(num_layers)])
    unused(config, "sliding_window", "max_window_layers")
    window = config.get("sliding_window") if get(config, "use_sliding_window", False) else None
    kinds = layer_kinds(config, num_layers, lambda layer: window is not None and not has_rope[layer])
    bias = bool(get(config, "attention_bias", False))
    return DecoderSpec(
        architecture="SmolLM3ForCausalLM",
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bool(get(config, "mlp_bias", False)),
        layer_ropes=tuple(options["rope"] if has_rope[layer] else None for layer in range(num_layers)),
        windows=windows(kinds, window),
        **options,
    )


def granite_spec(config: HfConfig) -> DecoderSpec:
    """GraniteForCausalLM: multipliers on embeddings, attention, residual sums and logits."""
    bias = bool(get(config, "attention_bias", False))
    options = common(config)
    return DecoderSpec(
        architecture="GraniteForCausalLM",
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bool(get(config, "mlp_bias", False)),
        scales=(float(get(config, "attention_multiplier", 1.0)),) * options["num_layers"],
        embedding_multiplier=float(get(config, "embedding_multiplier", 1.0)),
        residual_multiplier=float(get(config, "residual_multiplier", 1.0)),
        logit_multiplier=1.0 / float(get(config, "logits_scaling", 1.0)),
        **options,
    )


def arcee_spec(config: HfConfig) -> DecoderSpec:
    """ArceeForCausalLM: no gate, squared relu."""
    bias = bool(get(config, "attention_bias", False))
    options = common(config, default_eps=1e-5, default_max_positions=4096)
    return DecoderSpec(
        architecture="ArceeForCausalLM",
        is_gated=False,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bool(get(config, "mlp_bias", False)),
        **options | {"activation": str(get(config, "hidden_act", "relu2"))},
    )


def ernie4_5_spec(config: HfConfig) -> DecoderSpec:
    """Ernie4_5ForCausalLM: neighbours are rotated."""
    bias = bool(get(config, "use_bias", False))
    options = common(
        config,
        num_kv_heads=2,
        head_dim=128,
        is_tied=True,
        default_theta=500000.0,
        default_eps=1e-5,
        default_max_positions=131072,
        is_interleaved=True,
    )
    return DecoderSpec(architecture="Ernie4_5ForCausalLM", qkv_bias=bias, o_bias=bias, mlp_bias=bias, **options)


def seed_oss_spec(config: HfConfig) -> DecoderSpec:
    """SeedOssForCausalLM."""
    return DecoderSpec(
        architecture="SeedOssForCausalLM",
        qkv_bias=bool(get(config, "attention_bias", True)),
        o_bias=bool(get(config, "attention_out_bias", False)),
        mlp_bias=bool(get(config, "mlp_bias", False)),
        **common(config, num_kv_heads=8, head_dim=128, default_max_positions=524288),
    )


def internlm3_spec(config: HfConfig) -> DecoderSpec:
    """InternLM3ForCausalLM: `qkv_bias` is of q, k and v, `bias` of all others; transformers calls them attention_bias
    and mlp_bias, and wants both to be the same."""
    bias = bool(get(config, "bias", get(config, "mlp_bias", False)))
    return DecoderSpec(
        architecture="InternLM3ForCausalLM",
        qkv_bias=bool(get(config, "qkv_bias", get(config, "attention_bias", False))),
        o_bias=bias,
        mlp_bias=bias,
        **common(config, num_kv_heads=2, head_dim=128, default_eps=1e-5, default_max_positions=32768),
    )
