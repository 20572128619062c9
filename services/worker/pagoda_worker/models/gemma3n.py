"""Gemma 3n (text part): several hidden states per token, token vectors for each layer, a sparse feed-forward in the
first layers, and last layers that read the keys and values of earlier ones."""

import dataclasses
import re
from collections.abc import Sequence

from pagoda_common.errors import ModelLoadError
from pagoda_worker.models.config_keys import unused
from pagoda_worker.models.gemma import GEMMA2_NAMES
from pagoda_worker.models.hf_config import GLOBAL, LOCAL, HfConfig, get, layer_kinds, refuse, required, sizes, windows
from pagoda_worker.models.layer_options import AltUpSpec, LayerInputsSpec, LayerSizes
from pagoda_worker.models.rope import max_positions, rope_specs_by_kind
from pagoda_worker.models.spec import DecoderSpec
from pagoda_worker.models.weights import WeightNames, weight_names

SPARSE_LAYERS, SPARSITY = 10, 0.95
"""Default for models with more layers, if config.json has none."""

MULTIMODAL_NAMES = dataclasses.replace(
    GEMMA2_NAMES,
    prefixes=("model.language_model.", "language_model.model.", "language_model.", "model."),
    ignored=(re.compile(r"^(vision_tower|audio_tower|embed_vision|embed_audio)\."),),
)


def gemma3n_spec(config: HfConfig) -> DecoderSpec:
    """Gemma3nForCausalLM. Coefficients of hidden states are bounded (altup_coef_clip) in training alone."""
    unused(config, "altup_coef_clip")
    refuse(config, "use_bidirectional_attention")
    widths = config.get("intermediate_size")
    first = widths[0] if isinstance(widths, Sequence) and widths else widths
    options = sizes(
        {"vocab_size": 262400} | config | {"intermediate_size": first}, num_kv_heads=2, head_dim=256, is_tied=True
    )
    num_layers = options["num_layers"]
    kinds = layer_kinds(config, num_layers, lambda layer: (layer + 1) % 5 != 0)
    ropes = rope_specs_by_kind(config, default_thetas={GLOBAL: 1e6, LOCAL: 1e4})
    owners = cache_owners(kinds, int(get(config, "num_kv_shared_layers", 15)))
    bias = bool(get(config, "attention_bias", False))
    layers = tuple(
        LayerSizes(
            num_kv_heads=options["num_kv_heads"],
            head_dim=options["head_dim"],
            intermediate_size=width,
            cache_of=owner,
            sparsity=sparsity,
        )
        for width, owner, sparsity in zip(
            _widths(widths, num_layers), owners, _sparsities(config, num_layers), strict=True
        )
    )
    return DecoderSpec(
        architecture="Gemma3nForCausalLM",
        max_position_embeddings=max_positions(ropes[GLOBAL], int(get(config, "max_position_embeddings", 32768))),
        activation=str(get(config, "hidden_activation", "gelu_pytorch_tanh")),
        norm_eps=float(get(config, "rms_norm_eps", 1e-6)),
        norms="both",
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="head",
        norms_values=True,
        rope=ropes[GLOBAL],
        layer_ropes=tuple(ropes[kind] for kind in kinds),
        windows=windows(kinds, config.get("sliding_window", 512)),
        scales=(1.0,) * num_layers,
        logit_softcap=config.get("final_logit_softcapping", 30.0),
        embedding_multiplier=options["hidden_size"] ** 0.5,
        layer_sizes=layers,
        layer_inputs=LayerInputsSpec(
            width=int(get(config, "hidden_size_per_layer_input", 256)),
            vocab_size=int(get(config, "vocab_size_per_layer_input", 262144)),
        ),
        alt_up=AltUpSpec(
            num_streams=int(get(config, "altup_num_inputs", 4)),
            active=int(get(config, "altup_active_idx", 0)),
            has_output_scale=bool(get(config, "altup_correct_scale", True)),
            laurel_rank=int(get(config, "laurel_rank", 64)),
        ),
        **options,
    )


def gemma3n_multimodal_spec(config: HfConfig) -> DecoderSpec:
    """Gemma3nForConditionalGeneration: the text part; what sees and hears is left out."""
    unused(config, "vocab_size", "audio_config", "vision_soft_tokens_per_image", "audio_soft_tokens_per_image")
    text_config = required(config, "text_config")
    if config.get("tie_word_embeddings") is not None:
        text_config = text_config | {"tie_word_embeddings": config["tie_word_embeddings"]}
    return dataclasses.replace(gemma3n_spec(text_config), architecture="Gemma3nForConditionalGeneration")


def cache_owners(kinds: Sequence[str], num_shared: int) -> list[int | None]:
    """For each of the last `num_shared` layers, the layer whose keys and values it reads: the last of its kind before
    them; None for earlier layers.

    Raises:
        ModelLoadError: there is none.
    """
    first = len(kinds) - num_shared
    if not 0 < first <= len(kinds):
        raise ModelLoadError(f"num_kv_shared_layers is {num_shared}, must be from 0 to below {len(kinds)}")
    last = {kind: layer for layer, kind in enumerate(kinds[:first])}
    for kind in kinds[first:]:
        if kind not in last:
            raise ModelLoadError(f"num_kv_shared_layers is {num_shared}, but no layer before has {kind}")
    return [None if layer < first else last[kind] for layer, kind in enumerate(kinds)]


def _widths(given: int | Sequence[int] | None, num_layers: int) -> list[int]:
    widths = list(given) if isinstance(given, Sequence) else [int(given or 0)] * num_layers
    if len(widths) != num_layers:
        raise ModelLoadError(f"intermediate_size has {len(widths)} entries for {num_layers} layers")
    return [int(width) for width in widths]


def _sparsities(config: HfConfig, num_layers: int) -> list[float]:
    given = config.get("activation_sparsity_pattern")
    if given is None:
        count = SPARSE_LAYERS if num_layers > SPARSE_LAYERS else 0
        return [SPARSITY] * count + [0.0] * (num_layers - count)
    pattern = list(given) if isinstance(given, Sequence) else [given] * num_layers
    if len(pattern) != num_layers:
        raise ModelLoadError(f"activation_sparsity_pattern has {len(pattern)} entries for {num_layers} layers")
    return [float(share) for share in pattern]


def gemma3n_weights(spec: DecoderSpec) -> WeightNames:
    """All tensors of a text-only checkpoint."""
    return shared_left_out(spec, weight_names(spec, GEMMA2_NAMES))


def gemma3n_multimodal_weights(spec: DecoderSpec) -> WeightNames:
    """All tensors of the text part of a multimodal checkpoint."""
    return shared_left_out(spec, weight_names(spec, MULTIMODAL_NAMES))


def shared_left_out(spec: DecoderSpec, names: WeightNames) -> WeightNames:
    """Ignored tensors: keys and values of layers that read those of others."""
    shared = "|".join(str(layer) for layer in range(spec.num_layers) if not spec.keeps_tokens(layer))
    rule = re.compile(rf"^layers\.({shared})\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\.")
    return dataclasses.replace(names, ignored=(*names.ignored, rule)) if shared else names
