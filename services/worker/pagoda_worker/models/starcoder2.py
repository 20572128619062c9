"""StarCoder 2: layer norms, no gate, biases everywhere, a sliding window."""

from pagoda_worker.models.config_keys import expect
from pagoda_worker.models.hf_config import LOCAL, HfConfig, get, sizes, windows
from pagoda_worker.models.rope import max_positions, rope_spec
from pagoda_worker.models.spec import DecoderSpec
from pagoda_worker.models.weights import TensorNames

STARCODER2_NAMES = TensorNames(up=("mlp.c_fc",), down_proj="mlp.c_proj")


def starcoder2_spec(config: HfConfig) -> DecoderSpec:
    """Starcoder2ForCausalLM."""
    rope = rope_spec(config)
    expect(config, norm_type="layer_norm", mlp_type="default")
    bias = bool(get(config, "use_bias", True))
    options = sizes(config, num_kv_heads=2, is_tied=True)
    return DecoderSpec(
        architecture="Starcoder2ForCausalLM",
        **options,
        max_position_embeddings=max_positions(rope, int(get(config, "max_position_embeddings", 4096))),
        activation=str(get(config, "hidden_act", "gelu_pytorch_tanh")),
        norm="layer_norm",
        norm_eps=float(get(config, "norm_epsilon", 1e-5)),
        is_gated=False,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        rope=rope,
        windows=windows([LOCAL] * options["num_layers"], config.get("sliding_window")),
    )
