"""MiniMax-M2: norms of queries and keys over all heads, a part of each head rotated, experts by their sigmoid."""

from pagoda_worker.models.config_keys import expect, unused
from pagoda_worker.models.hf_config import HfConfig, get
from pagoda_worker.models.llama import common
from pagoda_worker.models.spec import DecoderSpec, MoeSpec
from pagoda_worker.models.weights import TensorNames

MINIMAX_M2_NAMES = TensorNames(
    router="block_sparse_moe.gate",
    correction="block_sparse_moe.e_score_correction_bias",
    expert="block_sparse_moe.experts.{}",
    expert_up=("w1", "w3"),
    expert_down="w2",
)


def minimax_m2_spec(config: HfConfig) -> DecoderSpec:
    """MiniMaxM2ForCausalLM."""
    expect(config, use_qk_norm=True, qk_norm_type="per_layer", scoring_func="sigmoid", use_routing_bias=True)
    expect(config, attn_type_list=[1] * len(get(config, "attn_type_list", [])))
    # Of models before it, and of layers that predict more tokens at once, which checkpoints leave out.
    unused(config, "layernorm_full_attention_beta", "layernorm_linear_attention_beta", "layernorm_mlp_beta")
    unused(config, "mlp_intermediate_size", "shared_moe_mode")
    unused(config, "use_mtp", "num_mtp_modules", "mtp_transformer_layers")
    head_dim, rotary_dim = int(get(config, "head_dim", 128)), config.get("rotary_dim")
    share = {} if rotary_dim is None else {"partial_rotary_factor": rotary_dim / head_dim}
    options = common(
        {"intermediate_size": 1536} | share | config,
        num_kv_heads=8,
        head_dim=head_dim,
        default_theta=5e6,
        default_max_positions=196608,
    )
    return DecoderSpec(
        architecture="MiniMaxM2ForCausalLM",
        qk_norm="width",
        moe=MoeSpec(
            num_experts=int(get(config, "num_local_experts", 256)),
            num_experts_per_token=int(get(config, "num_experts_per_tok", 8)),
            intermediate_size=options["intermediate_size"],
            scoring="sigmoid",
            has_correction=True,
        ),
        **options,
    )
