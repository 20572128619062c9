"""Builds a transformers module from a config.json: parameters without memory, buffers with their values."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from pagoda_common.errors import ModelLoadError
from pagoda_worker.models.hf_config import HfConfig
from pagoda_worker.models.transformers_model.attention import NAME, register
from pagoda_worker.models.transformers_model.fault import part_at_fault

_LOCK = threading.Lock()
_REGISTER = nn.Module.register_parameter


def build_backbone(config: HfConfig) -> PreTrainedModel:
    """The causal language model of a checkpoint.

    Raises:
        ModelLoadError: transformers has no such model with only attention, or cannot build it from this config.json.
    """
    register()
    parsed, model_class = parse_config(config)
    parsed._attn_implementation = NAME
    try:
        with parameters_on_meta():
            model: PreTrainedModel = model_class._from_config(
                parsed, attn_implementation=NAME, experts_implementation="eager", dtype=torch.float32
            )
    except KeyError as error:
        if error.args != (NAME,):
            raise _unbuilt(error) from error
        raise ModelLoadError("its attention does not go through transformers' AttentionInterface") from error
    except Exception as error:  # whatever modules raise
        raise _unbuilt(error) from error
    model.eval().requires_grad_(False)
    return model


def _unbuilt(error: Exception) -> ModelLoadError:
    part = part_at_fault(error) or "module"
    name = getattr(error, "name", None)
    if isinstance(error, ImportError) and name:
        return ModelLoadError(f"its {part} needs the package {name}, which is not installed")
    if isinstance(error, AttributeError) and name:
        return ModelLoadError(f"its {part} wants {name}, which config.json does not have")
    return ModelLoadError(f"its {part} cannot be built of such a config.json")


def parse_config(config: HfConfig) -> tuple[Any, Any]:
    """transformers' config object for a config.json, and the class of its causal language model.

    Raises:
        ModelLoadError: transformers has no causal language model for it, or one with more than attention.
    """
    model_type = str(config.get("model_type"))
    if model_type not in CONFIG_MAPPING:
        raise ModelLoadError(f"transformers {transformers.__version__} does not know model_type {model_type!r}")
    config_class = CONFIG_MAPPING[model_type]
    model_class = _model_class(config_class, config)
    if model_class is None:
        raise ModelLoadError(f"transformers has no causal language model of model_type {model_type!r}")
    named = [str(name) for name in config.get("architectures") or [model_class.__name__]]
    if model_class.__name__.lower() not in {name.lower() for name in named}:
        raise ModelLoadError(f"the causal language model of model_type {model_type!r} is {model_class.__name__}")
    if getattr(model_class, "_is_stateful", False):
        raise ModelLoadError("it has recurrent layers")
    if config.get("is_encoder_decoder"):
        raise ModelLoadError("it is an encoder and a decoder")
    try:
        return AutoConfig.for_model(**config), model_class
    except Exception as error:  # whatever a config class raises
        reason = " ".join(str(error).split())
        raise ModelLoadError(f"config.json cannot be understood: {type(error).__name__}: {reason[:80]}") from error


def _model_class(config_class: Any, config: HfConfig) -> Any:
    """By the type of the config; if that is a whole multimodal model, by the architecture."""
    if config_class in MODEL_FOR_CAUSAL_LM_MAPPING:
        return MODEL_FOR_CAUSAL_LM_MAPPING[config_class]
    names = [name for name in config.get("architectures") or [] if str(name).endswith("ForCausalLM")]
    found = getattr(transformers, names[0], None) if names else None
    return found if getattr(found, "config_class", None) is config_class else None


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Context in which this thread's modules get parameters without memory; buffers are computed as usual."""
    register_parameter, thread = _REGISTER, threading.get_ident()

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if threading.get_ident() == thread and parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=False)
        register_parameter(module, name, parameter)

    with _LOCK:
        nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign, assignment]
        try:
            with torch.device("cpu"):
                yield
        finally:
            nn.Module.register_parameter = register_parameter  # type: ignore[method-assign]
