"""Falcon-H1: attention and Mamba-2 in parallel in every layer, and multipliers on most activations."""

from pagoda_common.errors import ModelLoadError
from pagoda_worker.models.config_keys import expect, unused
from pagoda_worker.models.hf_config import HfConfig, get
from pagoda_worker.models.hybrid_config import mamba2_of
from pagoda_worker.models.llama import common
from pagoda_worker.models.recurrent_spec import GatedNorm
from pagoda_worker.models.spec import DecoderSpec
from pagoda_worker.models.weights import TensorNames

FALCON_H1_NAMES = TensorNames(
    recurrent="mamba",
    block_norms={"attention_norm": "input_layernorm", "mlp_norm": "pre_ff_layernorm"},
    up=("feed_forward.gate_proj", "feed_forward.up_proj"),
    down_proj="feed_forward.down_proj",
    norm="final_layernorm",
)


def falcon_h1_spec(config: HfConfig) -> DecoderSpec:
    """FalconH1ForCausalLM."""
    expect(config, mamba_use_mlp=True)
    unused(config, "mlp_expansion_factor", "layers_block_type", "layer_types", "mamba_expand")
    options = common(config, num_kv_heads=8, default_eps=1e-5, default_max_positions=8192)
    num_layers, bias = options["num_layers"], bool(get(config, "attention_bias", False))
    norm: GatedNorm = "norm_first" if get(config, "mamba_norm_before_gate", True) else "gate_first"
    recurrence = mamba2_of(
        config,
        hidden_size=options["hidden_size"],
        num_values=config.get("mamba_d_ssm", 1024),
        out_bias=bool(get(config, "projectors_bias", False)),
        norm=norm if get(config, "mamba_rms_norm", False) else "none",
        in_multiplier=_number(config, "ssm_in_multiplier"),
        part_multipliers=_numbers(config, "ssm_multipliers", 5),
    )
    gate, down = _numbers(config, "mlp_multipliers", 2)
    return DecoderSpec(
        architecture="FalconH1ForCausalLM",
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bool(get(config, "mlp_bias", False)),
        recurrence=recurrence,
        mixers=("both",) * num_layers,
        # A factor on keys is one on scores.
        scales=(options["head_dim"] ** -0.5 * _number(config, "key_multiplier"),) * num_layers,
        mixer_multipliers=(
            _number(config, "attention_in_multiplier"),
            _number(config, "attention_out_multiplier"),
            _number(config, "ssm_out_multiplier"),
        ),
        mlp_multipliers=(gate, down),
        embedding_multiplier=_number(config, "embedding_multiplier"),
        logit_multiplier=_number(config, "lm_head_multiplier"),
        **options,
    )


def _number(config: HfConfig, name: str) -> float:
    return float(get(config, name, 1.0))


def _numbers(config: HfConfig, name: str, count: int) -> tuple[float, ...]:
    values = tuple(float(value) for value in get(config, name, (1.0,) * count))
    if len(values) != count:
        raise ModelLoadError(f"{name} has {len(values)} numbers, must have {count}")
    return values
