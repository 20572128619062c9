"""Zamba2: Mamba-2 in all layers, and before some of them blocks that several layers share."""

import dataclasses
import re

from pagoda_common.errors import ModelLoadError
from pagoda_worker.models.config_keys import expect, unused
from pagoda_worker.models.hf_config import HfConfig, get, refuse, sizes
from pagoda_worker.models.hybrid_config import step_limits
from pagoda_worker.models.layer_options import SharedBlocksSpec
from pagoda_worker.models.recurrent_spec import Mamba2Spec, Mixer
from pagoda_worker.models.rope import rope_spec
from pagoda_worker.models.spec import DecoderSpec
from pagoda_worker.models.weights import TensorNames, WeightNames, WeightSource, weight_names

KINDS: dict[str, Mixer] = {"linear_attention": "recurrent", "mamba": "recurrent", "hybrid": "both"}
_REST = ["mamba"] * 4 + ["hybrid"] + ["mamba"] * 3 + ["hybrid"] + ["mamba"] * 2
DEFAULT_KINDS = ["mamba", *(["mamba"] * 5 + ["hybrid"]) * 7, *_REST]
NAMES = TensorNames(recurrent="mamba", block_norms={"attention_norm": "input_layernorm"}, norm="final_layernorm")


def zamba2_spec(config: HfConfig) -> DecoderSpec:
    """Zamba2ForCausalLM. Steps are bounded by time_step_limit, as Nemotron-H's."""
    refuse(config, "use_long_context")
    expect(config, use_shared_mlp_adapter=True, gated_linear_unit=True)
    unused(config, "use_mamba_kernels", "use_mem_eff_path", "use_conv_bias", "num_logits_to_keep", "chunk_size")
    unused(config, "time_step_min", "time_step_max", "time_step_floor", "mamba_headdim", "hybrid_layer_ids")
    unused(config, "attention_hidden_size", "attention_head_dim", "kv_channels", "num_query_groups", "ffn_hidden_size")
    hidden_size = int(get(config, "hidden_size", 2560))
    kinds = get(config, "layers_block_type", get(config, "layer_types", DEFAULT_KINDS))
    for kind in kinds:
        if kind not in KINDS:
            raise ModelLoadError(f"layer type {kind!r} is not supported; supported are {', '.join(KINDS)}")
    num_heads = int(get(config, "num_attention_heads", 32))
    given = {"intermediate_size": get(config, "intermediate_size", 4 * hidden_size), "num_attention_heads": num_heads}
    given |= {"num_hidden_layers": len(kinds), "head_dim": 2 * hidden_size // max(num_heads, 1)}
    options = sizes({"vocab_size": 32000, "hidden_size": 2560} | config | given, is_tied=True)
    unused(config, "num_hidden_layers")
    has_rope, bias = bool(get(config, "use_mem_rope", False)), bool(get(config, "add_bias_linear", False))
    rope = rope_spec(config)
    num_mamba_heads, num_groups = int(get(config, "n_mamba_heads", 8)), int(get(config, "mamba_ngroups", 1))
    return DecoderSpec(
        architecture="Zamba2ForCausalLM",
        max_position_embeddings=int(get(config, "max_position_embeddings", 4096)),
        activation=str(get(config, "hidden_act", "gelu")),
        norm_eps=float(get(config, "rms_norm_eps", 1e-5)),
        mlp_bias=bias,
        rope=rope if has_rope else None,
        has_positions=has_rope,
        scales=((options["head_dim"] / 2) ** -0.5,) * len(kinds),
        recurrence=Mamba2Spec(
            num_heads=num_mamba_heads,
            head_dim=int(get(config, "mamba_expand", 2) * hidden_size) // max(num_mamba_heads, 1),
            num_groups=num_groups,
            state_size=int(get(config, "mamba_d_state", 64)),
            conv_width=int(get(config, "mamba_d_conv", 4)),
            in_bias=bias,
            out_bias=bias,
            norm_groups=num_groups,
            norm_eps=1e-5,
            steps=step_limits(config),
        ),
        mixers=tuple(KINDS[kind] for kind in kinds),
        feed_forwards=(False,) * len(kinds),
        shared_blocks=SharedBlocksSpec(
            num_blocks=int(get(config, "num_mem_blocks", 1)),
            adapter_rank=int(get(config, "adapter_rank", 128)),
            adapts_attention=bool(get(config, "use_shared_attention_adapter", False)),
        ),
        **options,
    )


def zamba2_weights(spec: DecoderSpec) -> WeightNames:
    """All tensors: those of a shared block are stored with the first layer that has it, with the adapters of all
    layers."""
    shared = spec.shared_blocks
    assert shared is not None, "Zamba2 shares blocks"
    recurrent: Mixer = "recurrent"
    alone = dataclasses.replace(spec, mixers=(recurrent,) * spec.num_layers, shared_blocks=None)
    names = weight_names(alone, NAMES)
    attending = [layer for layer in range(spec.num_layers) if spec.attends(layer)]
    sources = [_within_decoder(source, attending) for source in names.sources]
    for number, layer in enumerate(attending):
        owner = attending[number % shared.num_blocks]
        place = f"layers.{owner}.shared_transformer"
        if owner == layer:
            sources += _block(spec, place, f"layers.{layer}.block")
        sources += _adapters(shared, place, f"layers.{layer}.block", number)
        sources.append(
            WeightSource(name=f"layers.{layer}.linear.weight", parameter=f"layers.{layer}.block.projection.weight")
        )
    others = "|".join(str(layer) for layer in attending[shared.num_blocks :])
    ignored = (*names.ignored, re.compile(rf"^layers\.({others})\.shared_transformer\.")) if others else names.ignored
    return dataclasses.replace(names, sources=sources, ignored=ignored)


def _within_decoder(source: WeightSource, attending: list[int]) -> WeightSource:
    """Layers with a block have their Mamba-2 one level deeper."""
    parts = source.name.split(".")
    if parts[0] != "layers" or int(parts[1]) not in attending:
        return source
    return dataclasses.replace(source, name=".".join((*parts[:2], "mamba_decoder", *parts[2:])))


def _block(spec: DecoderSpec, place: str, ours: str) -> list[WeightSource]:
    """The shared block."""
    query, key = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    whole = {
        "input_layernorm.weight": "attention_norm.weight",
        "pre_ff_layernorm.weight": "mlp_norm.weight",
        "self_attn.o_proj.weight": "attention.o_proj.weight",
    }
    for kind in ("weight", "bias") if spec.mlp_bias else ("weight",):
        whole[f"feed_forward.gate_up_proj.{kind}"] = f"mlp.up_proj.{kind}"
        whole[f"feed_forward.down_proj.{kind}"] = f"mlp.down_proj.{kind}"
    sources = [WeightSource(name=f"{place}.{stored}", parameter=f"{ours}.{name}") for stored, name in whole.items()]
    for stored, start, num_rows in (("q", 0, query), ("k", query, key), ("v", query + key, key)):
        sources.append(
            WeightSource(
                name=f"{place}.self_attn.{stored}_proj.weight",
                parameter=f"{ours}.attention.qkv_proj.weight",
                row_start=start,
                num_rows=num_rows,
            )
        )
    return sources


def _adapters(shared: SharedBlocksSpec, place: str, ours: str, number: int) -> list[WeightSource]:
    """One layer's additions to the block's matrices. `number`: index of the layer among those with a block."""
    stored = {f"feed_forward.gate_up_proj_adapter_list.{number}": "mlp_adapter"}
    if shared.adapts_attention:
        stored |= {
            f"self_attn.linear_{name}_adapter_list.{number}": f"qkv_adapters.{i}" for i, name in enumerate("qkv")
        }
    return [
        WeightSource(name=f"{place}.{theirs}.{part}.weight", parameter=f"{ours}.{name}.{side}.weight")
        for theirs, name in stored.items()
        for part, side in enumerate(("left", "right"))
    ]
