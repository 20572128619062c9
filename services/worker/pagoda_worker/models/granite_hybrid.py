"""Granite 4: Mamba-2 in most layers, attention in some, experts beside a shared feed-forward, and multipliers."""

import dataclasses

from pagoda_worker.models.expert_tensors import stacked_experts
from pagoda_worker.models.hf_config import HfConfig, get
from pagoda_worker.models.hybrid_config import mamba2_of, mixers_of
from pagoda_worker.models.llama import common
from pagoda_worker.models.spec import DecoderSpec, MoeSpec
from pagoda_worker.models.weights import TensorNames, WeightNames, weight_names

NAMES = TensorNames(
    recurrent="mamba",
    up=("shared_mlp.input_linear",),
    down_proj="shared_mlp.output_linear",
    router="block_sparse_moe.router.layer",
    shared_expert="shared_mlp",
    expert_up=("input_linear",),
    expert_down="output_linear",
)


def granite_hybrid_spec(config: HfConfig) -> DecoderSpec:
    """GraniteMoeHybridForCausalLM; without experts the shared feed-forward is the only one."""
    options = common({"intermediate_size": 11008} | config)
    num_layers, rope = options["num_layers"], options.pop("rope")
    has_rope = config.get("position_embedding_type") == "rope"
    kinds = get(config, "layer_types", get(config, "layers_block_type", ["mamba"] * num_layers))
    shared, num_experts = int(get(config, "shared_intermediate_size", 1024)), int(get(config, "num_local_experts", 8))
    top_k, size = int(get(config, "num_experts_per_tok", 2)), options.pop("intermediate_size")
    moe = MoeSpec(
        num_experts=max(num_experts, 1),
        num_experts_per_token=top_k if num_experts else 1,
        intermediate_size=size,
        shared_intermediate_size=shared,
        shared_is_gated=False,
    )
    bias = bool(get(config, "attention_bias", False))
    return DecoderSpec(
        architecture="GraniteMoeHybridForCausalLM",
        qkv_bias=bias,
        o_bias=bias,
        intermediate_size=shared,
        rope=rope if has_rope else None,
        has_positions=has_rope,
        moe=moe if num_experts else None,
        recurrence=mamba2_of(config, hidden_size=options["hidden_size"]),
        mixers=mixers_of(kinds, num_layers),
        scales=(float(get(config, "attention_multiplier", 1.0)),) * num_layers,
        embedding_multiplier=float(get(config, "embedding_multiplier", 1.0)),
        residual_multiplier=float(get(config, "residual_multiplier", 1.0)),
        logit_multiplier=1.0 / float(get(config, "logits_scaling", 1.0)),
        **options,
    )


def granite_hybrid_weights(spec: DecoderSpec) -> WeightNames:
    """All tensors, with the experts of a layer stacked."""
    names = weight_names(spec, NAMES)
    if spec.moe is None:
        return names
    made = tuple(
        stacked_experts(
            f"layers.{layer}.block_sparse_moe.{stored}.weight",
            tuple(f"layers.{layer}.mlp.experts.{index}.{ours}.weight" for index in range(spec.moe.num_experts)),
        )
        for layer in range(spec.num_layers)
        for stored, ours in (("input_linear", "up_proj"), ("output_linear", "down_proj"))
    )
    return dataclasses.replace(names, made=made)
