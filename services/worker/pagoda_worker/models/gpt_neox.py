"""GPT-NeoX (Pythia): attention and feed-forward side by side, a quarter of each head rotated, fused qkv by head."""

import re

from pagoda_worker.models.hf_config import HfConfig, get, sizes
from pagoda_worker.models.rope import max_positions, rope_spec
from pagoda_worker.models.spec import DecoderSpec
from pagoda_worker.models.weights import TensorNames

GPT_NEOX_NAMES = TensorNames(
    prefixes=("gpt_neox.",),
    embed_tokens="embed_in",
    qkv=("attention.query_key_value",),
    is_qkv_grouped=True,
    o_proj="attention.dense",
    up=("mlp.dense_h_to_4h",),
    down_proj="mlp.dense_4h_to_h",
    norm="final_layer_norm",
    lm_head="embed_out",
    ignored=(re.compile(r"attention\.(bias|masked_bias|rotary_emb\.inv_freq)$"),),
)


def gpt_neox_spec(config: HfConfig) -> DecoderSpec:
    """GPTNeoXForCausalLM."""
    old_names = {"rope_theta": config.get("rotary_emb_base"), "partial_rotary_factor": config.get("rotary_pct")}
    config = {name: value for name, value in old_names.items() if value is not None} | config
    rope = rope_spec(config, default_partial=0.25)
    bias = bool(get(config, "attention_bias", True))
    options = sizes(config)
    return DecoderSpec(
        architecture="GPTNeoXForCausalLM",
        **options | {"num_kv_heads": options["num_heads"]},
        max_position_embeddings=max_positions(rope, int(get(config, "max_position_embeddings", 2048))),
        activation=str(get(config, "hidden_act", "gelu")),
        norm="layer_norm",
        norm_eps=float(get(config, "layer_norm_eps", 1e-5)),
        is_gated=False,
        is_parallel=bool(get(config, "use_parallel_residual", True)),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=True,
        rope=rope,
    )
