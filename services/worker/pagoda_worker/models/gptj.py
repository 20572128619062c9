"""GPT-J: one norm, attention and feed-forward side by side, part of each head rotated as neighbours."""

import re

from pagoda_worker.models.config_keys import expect
from pagoda_worker.models.hf_config import HfConfig, get, required
from pagoda_worker.models.spec import DecoderSpec, RopeSpec
from pagoda_worker.models.weights import TensorNames

GPTJ_NAMES = TensorNames(
    prefixes=("transformer.",),
    embed_tokens="wte",
    layers="h",
    block_norms={"attention_norm": "ln_1"},
    qkv=("attn.q_proj", "attn.k_proj", "attn.v_proj"),
    o_proj="attn.out_proj",
    up=("mlp.fc_in",),
    down_proj="mlp.fc_out",
    norm="ln_f",
    # The attention masks that old checkpoints carry.
    ignored=(re.compile(r"\.attn\.(bias|masked_bias)$"),),
)


def gptj_spec(config: HfConfig) -> DecoderSpec:
    """GPTJForCausalLM."""
    hidden_size, num_heads = int(required(config, "n_embd")), int(required(config, "n_head"))
    head_dim = hidden_size // num_heads
    expect(config, scale_attn_weights=True)
    rotary_dim = int(config.get("rotary_dim", 64) or head_dim)
    return DecoderSpec(
        architecture="GPTJForCausalLM",
        vocab_size=int(required(config, "vocab_size")),
        hidden_size=hidden_size,
        num_layers=int(required(config, "n_layer")),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        intermediate_size=int(get(config, "n_inner", 4 * hidden_size)),
        max_position_embeddings=int(get(config, "n_positions", 2048)),
        activation=str(get(config, "activation_function", "gelu_new")),
        norm="layer_norm",
        norm_eps=float(get(config, "layer_norm_epsilon", 1e-5)),
        is_gated=False,
        is_parallel=True,
        has_mlp_norm=False,
        mlp_bias=True,
        head_bias=True,
        rope=RopeSpec(partial_rotary_factor=rotary_dim / head_dim, is_interleaved=True),
        tie_word_embeddings=bool(get(config, "tie_word_embeddings", False)),
    )
