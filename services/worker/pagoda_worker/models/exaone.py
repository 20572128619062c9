"""EXAONE 3.0 and 3.5: Llama with other names of options and tensors."""

from dataclasses import replace

from pagoda_worker.models.hf_config import HfConfig, get
from pagoda_worker.models.llama import LLAMA_NAMES, common
from pagoda_worker.models.spec import DecoderSpec
from pagoda_worker.models.weights import TensorNames, WeightNames, weight_names

_EXAONE_NAMES = TensorNames(
    prefixes=("transformer.", *LLAMA_NAMES.prefixes),
    embed_tokens="wte",
    layers="h",
    block_norms={"attention_norm": "ln_1", "mlp_norm": "ln_2"},
    qkv=("attn.attention.q_proj", "attn.attention.k_proj", "attn.attention.v_proj"),
    o_proj="attn.attention.out_proj",
    up=("mlp.c_fc_0", "mlp.c_fc_1"),
    down_proj="mlp.c_proj",
    norm="ln_f",
)
_OPTIONS = {
    "num_layers": "num_hidden_layers",
    "layer_norm_epsilon": "rms_norm_eps",
    "activation_function": "hidden_act",
}
"""Published names of options, and those that transformers writes."""


def exaone_spec(config: HfConfig) -> DecoderSpec:
    """ExaoneForCausalLM. Biases are options of transformers alone."""
    published = {name: config[other] for other, name in _OPTIONS.items() if config.get(other) is not None}
    bias = bool(get(config, "attention_bias", False))
    return DecoderSpec(
        architecture="ExaoneForCausalLM",
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bool(get(config, "mlp_bias", False)),
        **common(
            published | config,
            num_kv_heads=8,
            default_theta=500000.0,
            default_eps=1e-5,
            default_max_positions=4096,
        ),
    )


def exaone_weights(spec: DecoderSpec) -> WeightNames:
    """Tensor names as published, which transformers writes too; its modules have Llama's."""
    names, modules = weight_names(spec, _EXAONE_NAMES), weight_names(spec, LLAMA_NAMES)
    pairs = zip(modules.sources, names.sources, strict=True)
    return replace(names, module_names={module.name: source.name for module, source in pairs})
