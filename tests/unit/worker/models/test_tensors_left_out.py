"""Tensors of published checkpoints that have no place in a model are left out; parameters keep the type they need."""

from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pagoda_common.config.engine_config import ModelConfig
from pagoda_worker.models.model import BuildConfig, Model
from pagoda_worker.models.registry import FAMILIES, pooling_head
from pagoda_worker.models.transformers_model.model import longest_sequence
from pagoda_worker.models.weights import WeightNames
from pagoda_worker.pooling.pooling_files import PoolingFiles
from tests.unit.worker.models.config_effects import written

OF_IMAGES = ("vision_tower.stem.weight", "embed_vision.embedding.weight")
OF_SOUND = ("audio_tower.layers.0.weight", "embed_audio.embedding.weight")
NEXT_TOKENS = ("mtp.layers.0.self_attn.q_proj.weight", "mtp.fc.weight")
ROTATION = ("layers.0.self_attn.rotary_emb.inv_freq",)
MASKS = ("h.0.attn.bias", "h.11.attn.masked_bias")
LEFT_OUT: dict[str, tuple[str, ...]] = {
    "LlamaForCausalLM": ROTATION,
    "GPT2LMHeadModel": (*MASKS, "lm_head.weight"),
    "GPTBigCodeForCausalLM": MASKS,
    "GPTJForCausalLM": MASKS,
    "GPTNeoXForCausalLM": (
        "layers.0.attention.bias",
        "layers.0.attention.masked_bias",
        "layers.0.attention.rotary_emb.inv_freq",
    ),
    "Qwen3NextForCausalLM": NEXT_TOKENS + ROTATION,
    "Qwen3_5ForCausalLM": (*NEXT_TOKENS, *ROTATION, "visual.blocks.0.weight", "model.visual.blocks.0.weight"),
    "Qwen3_5MoeForConditionalGeneration": (*NEXT_TOKENS, *ROTATION, "visual.merger.weight", "model.visual.merger.bias"),
    "NemotronHForCausalLM": NEXT_TOKENS + ROTATION,
    "DeepseekV3ForCausalLM": ("layers.2.eh_proj.weight", "layers.9.mlp.experts.0.up_proj.weight", *ROTATION),
    "Llama4ForConditionalGeneration": (
        "vision_model.layers.0.weight",
        "multi_modal_projector.linear.weight",
        *ROTATION,
    ),
    "Gemma4ForConditionalGeneration": OF_IMAGES + OF_SOUND,
    "Gemma3nForConditionalGeneration": OF_IMAGES + OF_SOUND,
    "Gemma3nForCausalLM": ("layers.3.self_attn.k_proj.weight", "layers.4.self_attn.v_norm.weight"),
    "Gemma4ForCausalLM": ("layers.4.self_attn.v_proj.weight", "layers.3.self_attn.k_norm.weight"),
}
KEPT: dict[str, tuple[str, ...]] = {
    "GPT2LMHeadModel": ("h.0.attn.c_attn.bias", "h.0.mlp.c_fc.bias", "wpe.weight"),
    "GPTNeoXForCausalLM": ("layers.0.attention.dense.bias", "layers.0.attention.query_key_value.bias"),
    "DeepseekV3ForCausalLM": ("layers.0.input_layernorm.weight", "layers.1.mlp.gate.weight", "layers.10.norm.weight"),
    "LlamaForCausalLM": ("lm_head.weight", "layers.0.self_attn.q_proj.weight"),
    "NemotronHForCausalLM": ("layers.0.mixer.mtp.weight",),
    "Gemma3nForCausalLM": ("layers.2.self_attn.k_proj.weight", "layers.3.self_attn.q_proj.weight"),
    "Gemma4ForConditionalGeneration": ("layers.0.self_attn.k_proj.weight", "embed_tokens.weight"),
}


@cache
def names_of(architecture: str) -> WeightNames:
    """Of the small checkpoint of an architecture."""
    if architecture == "Gemma3nForConditionalGeneration":
        config: dict[str, Any] = {"architectures": [architecture], "text_config": written("Gemma3nForCausalLM")}
    else:
        config = written(architecture)
    family = FAMILIES[architecture]
    return family.weights(family.spec(config))


@cache
def decoder(architecture: str) -> Model:
    with torch.device("meta"):
        return FAMILIES[architecture](config=BuildConfig(checkpoint=written(architecture)))


def is_left_out(architecture: str, name: str) -> bool:
    return any(rule.search(name) for rule in names_of(architecture).ignored)


@pytest.mark.parametrize("architecture", LEFT_OUT)
def test_what_a_model_has_no_place_for_is_left_out(architecture: str) -> None:
    assert [name for name in LEFT_OUT[architecture] if not is_left_out(architecture, name)] == []
    assert [name for name in KEPT.get(architecture, ()) if is_left_out(architecture, name)] == []


WIDE: dict[str, set[str]] = {
    "LlamaForCausalLM": set(),
    "DeepseekV3ForCausalLM": {"correction"},
    "GptOssForCausalLM": {"sinks"},
    "JambaForCausalLM": {"decay_log", "step_bias", "skip"},
    "Mamba2ForCausalLM": {"decay_log", "step_bias", "skip"},
    "Qwen3NextForCausalLM": {"decay_log", "step_bias"},
}


@pytest.mark.parametrize("architecture", WIDE)
def test_what_must_not_be_rounded_keeps_32_bits(architecture: str) -> None:
    model = decoder(architecture)
    model.cast(torch.bfloat16)
    types = {name.rpartition(".")[2]: parameter.dtype for name, parameter in model.named_parameters()}
    assert {name for name, dtype in types.items() if dtype == torch.float32} == WIDE[architecture]
    assert set(types.values()) <= {torch.float32, torch.bfloat16}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("layers.0.attention.qkv_proj.bias", 0.0),
        ("layers.0.attention.decay_log", 0.0),
        ("layers.0.attention.sinks", 0.0),
        ("layers.0.attention.skip", 1.0),
        ("layers.0.alt_up.output_scale", 1.0),
        ("layers.0.layer_scale", 1.0),
        ("layers.0.router_scale", 1.0),
        ("layers.0.expert_scale", 1.0),
        ("layers.0.attention_norm.bias", 0.0),
        ("layers.0.attention.qkv_proj.weight", None),
        ("embed_tokens.weight", None),
    ],
)
def test_values_without_a_checkpoint(name: str, value: float | None) -> None:
    for architecture, norm in (("LlamaForCausalLM", 1.0), ("Qwen3NextForCausalLM", 0.0)):
        assert decoder(architecture).dummy_value(name) == value
        assert decoder(architecture).dummy_value("layers.0.attention_norm.weight") == norm


@pytest.mark.parametrize(
    ("options", "longest"),
    [
        ({}, 32768),
        ({"max_position_embeddings": 700, "n_ctx": 5}, 700),
        ({"n_positions": 600, "max_seq_len": 5}, 600),
        ({"max_seq_len": 500, "seq_length": 5}, 500),
        ({"max_sequence_length": 400}, 400),
        ({"seq_length": 300, "n_ctx": 5}, 300),
        ({"n_ctx": 200}, 200),
        (
            {"max_position_embeddings": 700, "rope": {"rope_type": "longrope", "original_max_position_embeddings": 64}},
            64,
        ),
        (
            {"max_position_embeddings": 32, "rope": {"rope_type": "longrope", "original_max_position_embeddings": 64}},
            32,
        ),
        (
            {
                "max_position_embeddings": 100,
                "rope": {"rope_type": "yarn", "original_max_position_embeddings": 64, "factor": 2.5},
            },
            160,
        ),
        (
            {
                "max_position_embeddings": 300,
                "rope": {"rope_type": "yarn", "original_max_position_embeddings": 64, "factor": 2.5},
            },
            300,
        ),
        (
            {
                "max_position_embeddings": 100,
                "rope": {"full_attention": {"rope_type": "yarn", "original_max_position_embeddings": 64, "factor": 4}},
            },
            256,
        ),
        ({"max_position_embeddings": 100, "rope": {"rope_type": "linear", "factor": 4.0}}, 100),
    ],
)
def test_the_longest_sequence_of_a_transformers_module(options: dict[str, Any], longest: int) -> None:
    named = {"rope_parameters" if name == "rope" else name: value for name, value in options.items()}
    assert longest_sequence(SimpleNamespace(**named)) == longest


@pytest.mark.parametrize(
    ("names", "engine", "files", "checkpoint", "head"),
    [
        (["LlamaForCausalLM"], {}, {}, {}, None),
        (["LlamaForCausalLM"], {"runner": "pooling"}, {}, {}, "none"),
        (["LlamaForCausalLM"], {"convert": "embed"}, {}, {}, "none"),
        (["LlamaForCausalLM"], {"convert": "none"}, {}, {}, None),
        (["LlamaForCausalLM"], {}, {"poolings": ("last",), "has_modules": True, "has_pooling": True}, {}, None),
        (["LlamaForCausalLM"], {}, {"poolings": ("mean",)}, {}, "none"),
        (["LlamaForCausalLM"], {}, {"has_modules": True}, {}, "none"),
        (["LlamaForCausalLM"], {}, {}, {"is_causal": False}, "none"),
        (["LlamaForCausalLM"], {}, {}, {"is_causal": True}, None),
        (["LlamaForCausalLM"], {}, {}, {"use_bidirectional_attention": True}, "none"),
        (["LlamaForCausalLM"], {"pooler_config": '{"pooling_type": "mean"}'}, {}, {}, "none"),
        (["LlamaForCausalLM"], {"pooler_config": '{"pooling_type": "last"}'}, {}, {}, None),
        (["Qwen3ForCausalLM"], {"runner": "pooling"}, {}, {"classifier_from_token": ["no", "yes"]}, "none"),
        (["GPT2LMHeadModel"], {}, {}, {}, None),
        (["Gemma3ForConditionalGeneration"], {}, {}, {}, None),
        (["BertModel"], {}, {}, {}, "none"),
        (["BertModel"], {"runner": "generate"}, {}, {}, None),
        (["BertForMaskedLM"], {}, {}, {}, "none"),
        (["BertForMaskedLM"], {}, {"is_sparse": True}, {}, "vocabulary"),
        (["BertSpladeSparseEmbeddingModel"], {"convert": "embed"}, {}, {}, "vocabulary"),
        (["BertForSequenceClassification"], {}, {}, {}, "sequence"),
        (["BertForSequenceClassification"], {"convert": "embed"}, {}, {}, "none"),
        (["BertForTokenClassification"], {}, {}, {}, "token"),
        (["BertForPreTraining"], {}, {}, {}, "none"),
        (["HF_ColBERT"], {}, {}, {}, "none"),
        (["SomethingElse"], {}, {}, {}, None),
        (["SomethingElse"], {"runner": "pooling"}, {}, {}, "none"),
        (["SomethingElse"], {}, {"has_modules": True}, {}, "none"),
        ([], {}, {}, {}, None),
    ],
)
def test_the_head_of_a_checkpoint(
    names: list[str], engine: dict[str, Any], files: dict[str, Any], checkpoint: dict[str, Any], head: str | None
) -> None:
    config = BuildConfig(checkpoint=checkpoint, engine=ModelConfig(model="m", **engine), pooling=PoolingFiles(**files))
    assert pooling_head(config, names) == head
