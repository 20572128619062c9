"""Jamba: Mamba in most layers, attention without positions in some, experts in every other one."""

from pagoda_worker.models.config_keys import expect, unused
from pagoda_worker.models.hf_config import HfConfig, get, sizes
from pagoda_worker.models.mamba_models import step_rank
from pagoda_worker.models.recurrent_spec import MambaSpec
from pagoda_worker.models.spec import DecoderSpec, MoeSpec
from pagoda_worker.models.weights import TensorNames

JAMBA_NAMES = TensorNames(
    recurrent="mamba",
    block_norms={"attention_norm": "input_layernorm", "mlp_norm": "pre_ff_layernorm"},
    up=("feed_forward.gate_proj", "feed_forward.up_proj"),
    down_proj="feed_forward.down_proj",
    router="feed_forward.router",
    expert="feed_forward.experts.{}",
    norm="final_layernorm",
)


def jamba_spec(config: HfConfig) -> DecoderSpec:
    """JambaForCausalLM."""
    unused(config, "use_mamba_kernels", "use_mambapy", "use_associative_scan", "num_logits_to_keep")
    unused(config, "layers_block_type", "layer_types", "num_experts_per_tok")
    expect(config, hidden_act="silu")
    options = sizes(
        {
            "vocab_size": 65536,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
        }
        | config
    )
    num_layers, hidden_size, eps = (
        options["num_layers"],
        options["hidden_size"],
        float(get(config, "rms_norm_eps", 1e-6)),
    )
    attends = _places(config, "attn_layer", 8, 4, num_layers)
    num_experts = int(get(config, "num_experts", get(config, "num_local_experts", 16)))
    sparse = _places(config, "expert_layer", 2, 1, num_layers)
    moe = MoeSpec(
        num_experts=num_experts,
        num_experts_per_token=int(get(config, "num_experts_per_tok", 2)) if num_experts > 1 else 1,
        intermediate_size=options["intermediate_size"],
        is_normalized=False,
        sparse_layers=sparse,
    )
    return DecoderSpec(
        architecture="JambaForCausalLM",
        max_position_embeddings=int(get(config, "max_position_embeddings", 262144)),
        norm_eps=eps,
        has_positions=False,
        moe=moe if num_experts > 1 and any(sparse) else None,
        recurrence=MambaSpec(
            num_channels=int(get(config, "mamba_expand", 2)) * hidden_size,
            state_size=int(get(config, "mamba_d_state", 16)),
            conv_width=int(get(config, "mamba_d_conv", 4)),
            step_rank=step_rank(get(config, "mamba_dt_rank", "auto"), hidden_size),
            conv_bias=bool(get(config, "mamba_conv_bias", True)),
            bias=bool(get(config, "mamba_proj_bias", False)),
            norm="weights",
            norm_eps=eps,
        ),
        mixers=tuple("attention" if is_there else "recurrent" for is_there in attends),
        **options,
    )


def _places(config: HfConfig, name: str, period: int, offset: int, num_layers: int) -> tuple[bool, ...]:
    """Whether each layer is one of every `period`, from `offset`."""
    period, offset = int(get(config, f"{name}_period", period)), int(get(config, f"{name}_offset", offset))
    return tuple(layer % period == offset for layer in range(num_layers))
