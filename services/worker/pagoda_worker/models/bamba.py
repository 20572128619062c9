"""Bamba: Mamba-2 in most layers, attention in some, and a feed-forward in all."""

from pagoda_worker.models.config_keys import unused
from pagoda_worker.models.hf_config import HfConfig, get
from pagoda_worker.models.hybrid_config import mamba2_of
from pagoda_worker.models.llama import common
from pagoda_worker.models.spec import DecoderSpec
from pagoda_worker.models.weights import TensorNames

BAMBA_NAMES = TensorNames(
    recurrent="mamba",
    block_norms={"attention_norm": "input_layernorm", "mlp_norm": "pre_ff_layernorm"},
    up=("feed_forward.gate_proj", "feed_forward.up_proj"),
    down_proj="feed_forward.down_proj",
    norm="final_layernorm",
)


def bamba_spec(config: HfConfig) -> DecoderSpec:
    """BambaForCausalLM."""
    unused(config, "z_loss_coefficient", "attn_rotary_emb", "layers_block_type", "layer_types")
    config = config | {"partial_rotary_factor": 0.5}  # whatever attn_rotary_emb says, as in transformers
    options = common(config, num_kv_heads=8, default_eps=1e-5, default_max_positions=262144)
    attending = set(get(config, "attn_layer_indices", ()))
    bias = bool(get(config, "attention_bias", False))
    return DecoderSpec(
        architecture="BambaForCausalLM",
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bool(get(config, "mlp_bias", False)),
        recurrence=mamba2_of(config, hidden_size=options["hidden_size"]),
        mixers=tuple("attention" if i in attending else "recurrent" for i in range(options["num_layers"])),
        **options,
    )
