"""Builds the module of transformers that a checkpoint for pooling names: an encoder, with or without a head.

Knows architectures and config.json; no weights.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    MODEL_MAPPING,
)

from pagoda_common.errors import ModelLoadError
from pagoda_worker.models.encoders.gte import MODEL_TYPES, gte_config
from pagoda_worker.models.encoders.jina_bert import build_jina_bert, is_jina_bert
from pagoda_worker.models.encoders.packed_attention import NAME, register
from pagoda_worker.models.hf_config import HfConfig
from pagoda_worker.models.model import Head
from pagoda_worker.models.transformers_model.backbone import parameters_on_meta

_MAPPINGS: dict[Head, Any] = {
    "none": MODEL_MAPPING,
    "sequence": MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    "token": MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    "vocabulary": MODEL_FOR_MASKED_LM_MAPPING,
}
UNPACKED = ("mpnet", "deberta", "deberta-v2", "gpt_oss")
"""Model types with their own attention, or with sinks: sequences of equal length run as a batch, without padding."""


@dataclass(frozen=True, slots=True)
class Backbone:
    """The built module."""

    module: PreTrainedModel
    is_packed: bool
    """Whether its attention supports packed sequences; else sequences of equal length run as a batch."""
    is_decoder: bool
    """Whether it was made to generate, so that its last token has seen the whole text."""


def check_encoder(config: HfConfig) -> None:
    """
    Raises:
        ModelLoadError: transformers has no such encoder, or only with the checkpoint's own code.
    """
    model_type = str(config.get("model_type"))
    code = config.get("auto_map")
    if model_type not in CONFIG_MAPPING:
        hint = ", and code of a checkpoint is not run" if code else ""
        raise ModelLoadError(f"transformers {transformers.__version__} does not know model_type {model_type!r}{hint}")
    if config.get("position_embedding_type") not in (None, "absolute", "rope"):
        kind = str(config["position_embedding_type"])[:40]
        raise ModelLoadError(f"position_embedding_type {kind!r} is not supported by transformers' {model_type}")
    if config.get("is_encoder_decoder"):
        raise ModelLoadError("it is an encoder and a decoder")


def build_encoder(config: HfConfig, head: Head) -> Backbone:
    """The module of a checkpoint.

    Raises:
        ModelLoadError: transformers has no module of this type with such a head, or cannot build it from this
        config.json.
    """
    if config.get("model_type") in MODEL_TYPES:
        config = gte_config(config)
    if is_jina_bert(config):
        return Backbone(_on_meta(lambda: build_jina_bert(config, head)), is_packed=True, is_decoder=False)
    check_encoder(config)
    register()
    model_type = str(config["model_type"])
    mapping = _MAPPINGS[head]
    config_class = CONFIG_MAPPING[model_type]
    if config_class not in mapping:
        raise ModelLoadError(f"transformers has no {model_type} with the head of {head} classification")
    try:
        parsed = AutoConfig.for_model(**config)
    except Exception as error:  # whatever a config class raises
        raise ModelLoadError(f"config.json cannot be understood: {_reason(error)}") from error
    model_class = mapping[config_class]
    if isinstance(model_class, tuple):
        model_class = model_class[0]
    is_packed = model_type not in UNPACKED and not getattr(parsed, "attn_logit_softcapping", None)

    def build() -> PreTrainedModel:
        implementation = NAME if is_packed else "eager"
        parsed._attn_implementation = implementation
        return model_class._from_config(parsed, attn_implementation=implementation, dtype=torch.float32)

    module = _on_meta(build)
    if is_packed and _mixes_along_tokens(module):
        is_packed = False
        module = _on_meta(build)
    is_decoder = config_class in MODEL_FOR_CAUSAL_LM_MAPPING and config_class not in MODEL_FOR_MASKED_LM_MAPPING
    return Backbone(module, is_packed, is_decoder)


def _mixes_along_tokens(module: PreTrainedModel) -> bool:
    """Whether layers other than attention read neighbouring tokens, which in a packed pass may be of other texts."""
    return any(isinstance(part, nn.Conv1d) for part in module.modules())


def _on_meta(build: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    try:
        with parameters_on_meta():
            module = build()
    except ModelLoadError:
        raise
    except Exception as error:  # whatever modules raise
        raise ModelLoadError(f"its module cannot be built: {_reason(error)}") from error
    return module.eval().requires_grad_(False)


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:90]}"
