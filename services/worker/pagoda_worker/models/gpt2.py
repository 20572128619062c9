"""GPT-2: learned positions, layer norms, fused qkv stored [in, out]; GPT-BigCode: the same with one KV head."""

import dataclasses
import re

from pagoda_worker.models.config_keys import unused
from pagoda_worker.models.hf_config import HfConfig, get, required
from pagoda_worker.models.spec import DecoderSpec
from pagoda_worker.models.weights import TensorNames, WeightNames, weight_names

GPT2_NAMES = TensorNames(
    prefixes=("transformer.",),
    embed_tokens="wte",
    embed_positions="wpe",
    layers="h",
    block_norms={"attention_norm": "ln_1", "mlp_norm": "ln_2"},
    qkv=("attn.c_attn",),
    o_proj="attn.c_proj",
    up=("mlp.c_fc",),
    down_proj="mlp.c_proj",
    norm="ln_f",
    is_transposed=True,
    # The attention masks that old checkpoints carry.
    ignored=(re.compile(r"\.attn\.(bias|masked_bias)$"),),
)


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


def gpt_bigcode_spec(config: HfConfig) -> DecoderSpec:
    """GPTBigCodeForCausalLM (StarCoder, SantaCoder)."""
    spec = gpt2_spec({"activation_function": "gelu_pytorch_tanh"} | config)
    unused(config, "num_key_value_heads")  # which multi_query says
    num_kv_heads = 1 if get(config, "multi_query", True) else spec.num_heads
    return dataclasses.replace(spec, architecture="GPTBigCodeForCausalLM", num_kv_heads=num_kv_heads)


def gpt_bigcode_weights(spec: DecoderSpec) -> WeightNames:
    """Tensor names; stored [out, in], and head by head where each has its own key and value."""
    is_grouped = spec.num_kv_heads > 1
    return weight_names(spec, dataclasses.replace(GPT2_NAMES, is_transposed=False, is_qkv_grouped=is_grouped))
