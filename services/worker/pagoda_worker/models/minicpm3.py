"""MiniCPM3 and Youtu: latents as DeepSeek-V2's, in models without experts."""

import math

from pagoda_worker.models.config_keys import unused
from pagoda_worker.models.deepseek import LATENTS, latent_options
from pagoda_worker.models.hf_config import HfConfig, get, required
from pagoda_worker.models.spec import DecoderSpec


def minicpm3_spec(config: HfConfig) -> DecoderSpec:
    """MiniCPM3ForCausalLM: multipliers on embeddings, residual sums and logits; halves of a head are rotated."""
    hidden, num_heads = int(required(config, "hidden_size")), int(required(config, "num_attention_heads"))
    sizes = {"kv_lora_rank": 256, "q_lora_rank": 768, "qk_rope_head_dim": 32, "qk_nope_head_dim": 64}
    value_dim = get(config, "v_head_dim", hidden // max(num_heads, 1))
    options = latent_options(
        sizes | config | {"v_head_dim": value_dim},
        default_max_positions=32768,
        is_interleaved=False,
        default_eps=1e-5,
        is_tied=True,
    )
    # Null is another thing than nothing here: it leaves the sums, and the logits, as they are.
    depth, base = config.get("scale_depth", 1.4), config.get("dim_model_base", 256)
    return DecoderSpec(
        architecture="MiniCPM3ForCausalLM",
        mlp_bias=bool(get(config, "mlp_bias", False)),
        embedding_multiplier=float(get(config, "scale_emb", 12)),
        residual_multiplier=1.0 if depth is None else float(depth) / math.sqrt(options["num_layers"]),
        logit_multiplier=1.0 if base is None else base / hidden,
        **options,
    )


def youtu_spec(config: HfConfig) -> DecoderSpec:
    """YoutuForCausalLM."""
    unused(config, "embedding_initializer_range")
    options = latent_options(
        LATENTS | config,
        default_max_positions=131072,
        is_interleaved=bool(get(config, "rope_interleave", True)),
        is_tied=True,
    )
    return DecoderSpec(architecture="YoutuForCausalLM", **options)
