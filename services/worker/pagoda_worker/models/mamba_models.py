"""Mamba, Falcon Mamba and Mamba-2: only recurrent layers, without attention, feed-forward and positions."""

import math
from typing import Any

from pagoda_worker.models.config_keys import expect, unused
from pagoda_worker.models.hf_config import HfConfig, get
from pagoda_worker.models.hybrid_config import step_limits
from pagoda_worker.models.recurrent_spec import Mamba2Spec, MambaNorm, MambaSpec, RecurrentSpec
from pagoda_worker.models.spec import DecoderSpec
from pagoda_worker.models.weights import TensorNames

MAMBA_NAMES = TensorNames(
    prefixes=("backbone.",),
    embed_tokens="embeddings",
    block_norms={"attention_norm": "norm"},
    recurrent="mixer",
    norm="norm_f",
)
MAX_POSITIONS = 2**20
"""Tokens of context, because a state has no bound and config.json has none."""


def mamba_spec(config: HfConfig) -> DecoderSpec:
    """MambaForCausalLM."""
    options = _options(config, vocab_size=50280, hidden_size=768, num_layers=32, is_tied=True)
    return DecoderSpec(architecture="MambaForCausalLM", recurrence=_mamba(config, options), **options)


def falcon_mamba_spec(config: HfConfig) -> DecoderSpec:
    """FalconMambaForCausalLM: norms without weights on steps, B and C."""
    options = _options(config, vocab_size=50280, hidden_size=768, num_layers=32, is_tied=True)
    net = _mamba(config, options, norm="plain", norm_eps=float(get(config, "mixer_rms_eps", 1e-6)))
    return DecoderSpec(architecture="FalconMambaForCausalLM", recurrence=net, **options)


def mamba2_spec(config: HfConfig) -> DecoderSpec:
    """Mamba2ForCausalLM. norm_before_gate has no effect, as in transformers."""
    unused(config, "expand", "chunk_size", "norm_before_gate", "time_step_rank", "intermediate_size")
    options = _options(config, vocab_size=32768, hidden_size=4096, num_layers=64, is_tied=False)
    num_groups, bias = int(get(config, "n_groups", 8)), bool(get(config, "use_bias", False))
    net = Mamba2Spec(
        num_heads=int(get(config, "num_heads", 128)),
        head_dim=int(get(config, "head_dim", 64)),
        num_groups=num_groups,
        state_size=int(get(config, "state_size", 128)),
        conv_width=int(get(config, "conv_kernel", 4)),
        conv_bias=bool(get(config, "use_conv_bias", True)),
        in_bias=bias,
        out_bias=bias,
        norm_groups=num_groups,
        steps=step_limits(config),
    )
    return DecoderSpec(architecture="Mamba2ForCausalLM", recurrence=net, **options)


def _options(config: HfConfig, *, vocab_size: int, hidden_size: int, num_layers: int, is_tied: bool) -> dict[str, Any]:
    """The shared part; the arguments are defaults of missing values. Residual sums use the model's data type, whatever
    residual_in_fp32 says."""
    unused(config, "residual_in_fp32", "rescale_prenorm_residual", "use_mambapy", "use_falcon_mambapy")
    unused(config, "use_associative_scan", "time_step_min", "time_step_max", "time_step_floor", "time_step_scale")
    unused(config, "time_step_init_scheme")
    unused(config, "d_inner", "d_model", "n_layer", "ssm_cfg", "fused_add_norm", "pad_vocab_size_multiple")
    expect(config, hidden_act="silu", rms_norm=True)
    num_layers = int(get(config, "num_hidden_layers", num_layers))
    hidden_size = int(get(config, "hidden_size", hidden_size))
    return {
        "vocab_size": int(get(config, "vocab_size", vocab_size)),
        "hidden_size": hidden_size,
        "num_layers": num_layers,
        # There is no attention.
        "num_heads": 1,
        "num_kv_heads": 1,
        "head_dim": hidden_size,
        "intermediate_size": 1,
        "max_position_embeddings": MAX_POSITIONS,
        "norm_eps": float(get(config, "layer_norm_epsilon", 1e-5)),
        "has_positions": False,
        "mixers": ("recurrent",) * num_layers,
        "feed_forwards": (False,) * num_layers,
        "tie_word_embeddings": bool(get(config, "tie_word_embeddings", is_tied)),
    }


def _mamba(
    config: HfConfig, options: dict[str, Any], *, norm: MambaNorm = "none", norm_eps: float = 1e-6
) -> RecurrentSpec:
    hidden_size = options["hidden_size"]
    return MambaSpec(
        num_channels=int(get(config, "intermediate_size", get(config, "expand", 2) * hidden_size)),
        state_size=int(get(config, "state_size", 16)),
        conv_width=int(get(config, "conv_kernel", 4)),
        step_rank=step_rank(get(config, "time_step_rank", "auto"), hidden_size),
        conv_bias=bool(get(config, "use_conv_bias", True)),
        bias=bool(get(config, "use_bias", False)),
        norm=norm,
        norm_eps=norm_eps,
    )


def step_rank(given: str | int, hidden_size: int) -> int:
    """Rank of the projection for steps; "auto": a sixteenth of hidden_size."""
    return math.ceil(hidden_size / 16) if given == "auto" else int(given)
