"""Nemotron: layer norms whose weights are stored less one, squared relu without a gate, half of each head rotated."""

from pagoda_worker.models.hf_config import HfConfig, get, sizes
from pagoda_worker.models.rope import max_positions, rope_spec
from pagoda_worker.models.spec import DecoderSpec
from pagoda_worker.models.weights import TensorNames

NEMOTRON_NAMES = TensorNames(up=("mlp.up_proj",))


def nemotron_spec(config: HfConfig) -> DecoderSpec:
    """NemotronForCausalLM."""
    rope = rope_spec(config, default_partial=0.5)
    bias = bool(get(config, "attention_bias", False))
    return DecoderSpec(
        architecture="NemotronForCausalLM",
        **sizes(config),
        max_position_embeddings=max_positions(rope, int(get(config, "max_position_embeddings", 4096))),
        activation=str(get(config, "hidden_act", "relu2")),
        norm="layer_norm",
        norm_eps=float(get(config, "norm_eps", 1e-5)),
        norm_weight_offset=1.0,
        is_gated=False,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bool(get(config, "mlp_bias", False)),
        rope=rope,
    )
