"""Converts params.json to config.json, and the tensor names of consolidated.safetensors to transformers'."""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pagoda_common.config.checkpoint.translated_files import translated_directory
from pagoda_common.errors import ModelLoadError

PARAMS = "params.json"
MODEL_NAMES = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}
LAYER_NAMES = {
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "feed_forward.gate": "block_sparse_moe.gate",
    "block_sparse_moe.gate": "block_sparse_moe.gate",
}
_EXPERT = re.compile(r"(?:feed_forward|block_sparse_moe)\.experts\.(\d+)\.(w[123])")
_LAYER = re.compile(r"layers\.(\d+)\.(.+)\.(weight|bias|qscale_weight|qscale_act)")
_UNREAD = ("vision_encoder", "audio_model", "mla", "llama_4_scaling", "lora", "q_lora_rank", "multimodal")
"""Keys that make a params.json another kind of model."""


def mistral_directory(directory: Path) -> Path:
    """The directory of such a checkpoint in the usual form.

    Raises:
        ModelLoadError: params.json cannot be read, or describes what is not supported.
    """
    whole = Path(os.path.abspath(directory))
    weights = sorted(whole.glob("consolidated*.safetensors*"))
    tokenizer = [path for name in ("tekken.json", "chat_template.jinja") if (path := whole / name).is_file()]

    def translate() -> dict[str, str]:
        return {
            "config.json": json.dumps(model_config(whole / PARAMS)),
            "generation_config.json": json.dumps({"bos_token_id": 1, "eos_token_id": 2}),
        }

    return translated_directory([whole / PARAMS, *weights, *tokenizer], translate)


def model_config(path: Path) -> dict[str, Any]:
    """The equivalent config.json.

    Raises:
        ModelLoadError: the file is not a JSON object, lacks a size, or describes what is not supported.
    """
    try:
        params = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"cannot read {path}: {error}", field="model") from error
    if not isinstance(params, dict):
        raise ModelLoadError(f"{path} must hold a JSON object, got {type(params).__name__}", field="model")
    for name in _UNREAD:
        if params.get(name):
            raise ModelLoadError(f"{path} has {name}, which is not supported in this form of checkpoints")
    sizes = {name: _size(params, name, path) for name in ("dim", "n_layers", "hidden_dim", "n_heads", "vocab_size")}
    length = params.get("max_position_embeddings") or params.get("model_max_length") or params.get("max_seq_len")
    config: dict[str, Any] = {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "hidden_size": sizes["dim"],
        "num_hidden_layers": sizes["n_layers"],
        "intermediate_size": sizes["hidden_dim"],
        "num_attention_heads": sizes["n_heads"],
        "num_key_value_heads": params.get("n_kv_heads") or sizes["n_heads"],
        "head_dim": params.get("head_dim") or sizes["dim"] // max(1, sizes["n_heads"]),
        "vocab_size": sizes["vocab_size"],
        "max_position_embeddings": length or 128_000,
        "rms_norm_eps": params.get("norm_eps", 1e-5),
        "rope_parameters": _rope(params, path),
        "hidden_act": "silu",
        "sliding_window": _window(params, path),
        "tie_word_embeddings": bool(params.get("tied_embeddings", False)),
        "dtype": "bfloat16",
    }
    if isinstance(moe := params.get("moe"), dict):
        config |= {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "num_local_experts": _size(moe, "num_experts", path),
            "num_experts_per_tok": _size(moe, "num_experts_per_tok", path),
        }
    if quantization := params.get("quantization"):
        if not isinstance(quantization, dict) or quantization.get("qformat_weight") != "fp8_e4m3":
            raise ModelLoadError(f"{path} has quantization {str(quantization)[:200]}, must be of fp8_e4m3")
        config["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "static"}
    return config


def _size(params: Mapping[str, Any], name: str, path: Path) -> int:
    value = params.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelLoadError(f"{name} is {str(value)[:200]} in {path}, must be at least 1", field="model")
    return value


def _window(params: Mapping[str, Any], path: Path) -> int | None:
    window = params.get("sliding_window") or None
    if window is not None and not isinstance(window, int):
        raise ModelLoadError(f"sliding_window is {str(window)[:200]} in {path}, must be one number", field="model")
    return window


def _rope(params: Mapping[str, Any], path: Path) -> dict[str, Any]:
    theta, yarn = params.get("rope_theta", 10000.0), params.get("yarn")
    if yarn is None:
        return {"rope_type": "default", "rope_theta": theta}
    if not isinstance(yarn, dict) or not {"factor", "original_max_position_embeddings"} <= yarn.keys():
        raise ModelLoadError(f"yarn in {path} must have factor and original_max_position_embeddings", field="model")
    scale = {} if yarn.get("apply_scale", True) else {"attention_factor": 1.0}
    return scale | {
        "rope_type": "yarn",
        "rope_theta": theta,
        "factor": yarn["factor"],
        "original_max_position_embeddings": yarn["original_max_position_embeddings"],
        "beta_fast": yarn.get("beta", 32),
        "beta_slow": yarn.get("alpha", 1),
    }


def checkpoint_name(name: str) -> str:
    """transformers' name of a tensor; an unknown tensor keeps its name."""
    stem, _, leaf = name.rpartition(".")
    if stem in MODEL_NAMES:
        return f"{MODEL_NAMES[stem]}.{leaf}"
    match = _LAYER.fullmatch(name)
    if match is None:
        return name
    layer, part, leaf = match.groups()
    expert = _EXPERT.fullmatch(part)
    known = f"block_sparse_moe.experts.{expert[1]}.{expert[2]}" if expert else LAYER_NAMES.get(part)
    return name if known is None else f"model.layers.{layer}.{known}.{leaf}"
