"""Converts a GGUF file's metadata to config.json, and its tensor names to transformers'."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pagoda_common.errors import ModelLoadError
from pagoda_common.gguf.file import GgufFile, GgufTensor


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufFamily:
    """How one value of general.architecture maps to transformers."""

    architecture: str
    model_type: str
    has_rope_order: bool = False
    """Rows of queries and keys are stored in the order of neighbouring pairs, not of halves."""
    extra: Callable[[Mapping[str, Any], str, GgufFile], dict[str, Any]] | None = None
    """More of config.json: from the metadata, the prefix of its keys, and the file."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Parts of layers that are called otherwise than in `LAYER_NAMES`."""
    norm_offset: int = 0
    """Number that the file adds to the weights of norms."""


LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
_GEMMA_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_MIXTRAL_NAMES = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}
_MODEL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
ROPE_FACTORS = "rope_freqs.weight"
"""Tensor with Llama 3's rope factors, which divide the frequencies."""


def _qwen_moe(metadata: Mapping[str, Any], prefix: str, file: GgufFile) -> dict[str, Any]:
    extra = {
        "num_experts": metadata.get(f"{prefix}.expert_count"),
        "num_experts_per_tok": metadata.get(f"{prefix}.expert_used_count"),
        "moe_intermediate_size": metadata.get(f"{prefix}.expert_feed_forward_length"),
        "norm_topk_prob": prefix == "qwen3moe",
        "decoder_sparse_step": 1,
    }
    shared = file.tensors.get("blk.0.ffn_up_shexp.weight")
    return extra | ({} if shared is None else {"shared_expert_intermediate_size": shared.shape[0]})


def _mixtral(metadata: Mapping[str, Any], prefix: str, file: GgufFile) -> dict[str, Any]:
    return {
        "num_local_experts": metadata.get(f"{prefix}.expert_count"),
        "num_experts_per_tok": metadata.get(f"{prefix}.expert_used_count"),
    }


def _gemma2(metadata: Mapping[str, Any], prefix: str, file: GgufFile) -> dict[str, Any]:
    head_dim = metadata.get(f"{prefix}.attention.key_length", 256)
    facts = _Facts(file)
    width, heads = facts.number("embedding_length"), facts.number("attention.head_count")
    is_27b = facts.number("block_count") == 46  # which alone divides by the width of a head in the embedding
    return {
        "attn_logit_softcapping": metadata.get(f"{prefix}.attn_logit_softcapping", 50.0),
        "final_logit_softcapping": metadata.get(f"{prefix}.final_logit_softcapping", 30.0),
        "query_pre_attn_scalar": width // max(heads, 1) if is_27b else head_dim,
        "hidden_activation": "gelu_pytorch_tanh",
    }


_MIXTRAL = GgufFamily(
    architecture="MixtralForCausalLM",
    model_type="mixtral",
    has_rope_order=True,
    extra=_mixtral,
    names=_MIXTRAL_NAMES,
)
FAMILIES = {
    "llama": GgufFamily(architecture="LlamaForCausalLM", model_type="llama", has_rope_order=True),
    "qwen2": GgufFamily(architecture="Qwen2ForCausalLM", model_type="qwen2"),
    "qwen3": GgufFamily(architecture="Qwen3ForCausalLM", model_type="qwen3"),
    "qwen2moe": GgufFamily(architecture="Qwen2MoeForCausalLM", model_type="qwen2_moe", extra=_qwen_moe),
    "qwen3moe": GgufFamily(architecture="Qwen3MoeForCausalLM", model_type="qwen3_moe", extra=_qwen_moe),
    "gemma2": GgufFamily(
        architecture="Gemma2ForCausalLM",
        model_type="gemma2",
        extra=_gemma2,
        names=_GEMMA_NORMS,
        norm_offset=1,
    ),
}
"""By general.architecture."""


def family_of(file: GgufFile) -> GgufFamily:
    """How a file's model is called elsewhere.

    Raises:
        ModelLoadError: none of FAMILIES.
    """
    name = str(file.metadata.get("general.architecture"))
    if name == "llama" and file.metadata.get("llama.expert_count"):
        return _MIXTRAL
    if name not in FAMILIES:
        raise ModelLoadError(
            f"{file.path} has general.architecture {name[:200]!r}, must be one of {', '.join(FAMILIES)}",
            field="model",
        )
    return FAMILIES[name]


def model_config(file: GgufFile, rope_factors: list[float] | None) -> dict[str, Any]:
    """The equivalent config.json.

    Args:
        rope_factors: values of the tensor ROPE_FACTORS, if there is one.

    Raises:
        ModelLoadError: a key is missing or of another kind, or the architecture is none of FAMILIES.
    """
    family, facts = family_of(file), _Facts(file)
    prefix = facts.prefix
    width, heads = facts.number("embedding_length"), facts.number("attention.head_count")
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "hidden_size": width,
        "num_hidden_layers": facts.number("block_count"),
        "intermediate_size": facts.number("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": facts.number("attention.head_count_kv", heads),
        "head_dim": facts.number("attention.key_length", width // max(heads, 1)),
        "max_position_embeddings": facts.number("context_length"),
        "rms_norm_eps": facts.real("attention.layer_norm_rms_epsilon", 1e-6),
        "vocab_size": facts.vocab_size(),
        "rope_parameters": facts.rope(rope_factors),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "dtype": _dtype(file),
        "quantization_config": {"quant_method": "gguf"},
    }
    if "blk.0.attn_output.bias" in file.tensors:
        config["attention_bias"] = True
    window = file.metadata.get(f"{prefix}.attention.sliding_window")
    if isinstance(window, int) and window:
        config["sliding_window"] = window
    if family.model_type != "gemma2":
        config["hidden_act"] = "silu"
    if family.extra is not None:
        config |= family.extra(file.metadata, prefix, file)
    return config


class _Facts:
    """Metadata of the model's own keys."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self.prefix = str(file.metadata["general.architecture"])

    def number(self, key: str, default: int | None = None) -> int:
        """A whole number; where each layer has its own, all must be the same."""
        value = self._file.metadata.get(f"{self.prefix}.{key}", default)
        if isinstance(value, list) and value and all(one == value[0] for one in value):
            value = value[0]
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise self._wrong(key, value, "a whole number")
        return value

    def real(self, key: str, default: float) -> float:
        """A number."""
        value = self._file.metadata.get(f"{self.prefix}.{key}", default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self._wrong(key, value, "a number")
        return float(value)

    def _wrong(self, key: str, value: object, wanted: str) -> ModelLoadError:
        shown = "missing" if value is None else repr(value)[:200]
        return ModelLoadError(f"{self._file.path}: {self.prefix}.{key} is {shown}, must be {wanted}", field="model")

    def vocab_size(self) -> int:
        """Rows of the embedding."""
        embedding = self._file.tensors.get("token_embd.weight")
        if embedding is None or len(embedding.shape) != 2:
            raise ModelLoadError(f"{self._file.path} has no tensor token_embd.weight of two dimensions", field="model")
        return embedding.shape[0]

    def rope(self, factors: list[float] | None) -> dict[str, Any]:
        """rope_parameters. Factors of frequencies are longrope's, the same for short and for long prompts."""
        theta = self.real("rope.freq_base", 10000.0)
        kind = self._file.metadata.get(f"{self.prefix}.rope.scaling.type", "none")
        if factors is not None:
            length = self.number("context_length")
            same = {"short_factor": factors, "long_factor": factors, "attention_factor": 1.0, "factor": 1.0}
            return {
                "rope_type": "longrope",
                "rope_theta": theta,
                "original_max_position_embeddings": length,
            } | same
        if kind == "none":
            return {"rope_type": "default", "rope_theta": theta}
        if kind not in ("linear", "yarn"):
            raise self._wrong("rope.scaling.type", kind, "one of none, linear, yarn")
        scaled = {"rope_type": kind, "rope_theta": theta, "factor": self.real("rope.scaling.factor", 1.0)}
        if kind == "yarn":
            scaled["original_max_position_embeddings"] = self.number("rope.scaling.original_context_length")
        return scaled


def _dtype(file: GgufFile) -> str:
    """float32 or float16 where all matrices are; else what quantized ones are computed in."""
    kinds = {tensor.type.name for tensor in file.tensors.values() if len(tensor.shape) > 1}
    return {frozenset({"F32"}): "float32", frozenset({"F16"}): "float16"}.get(frozenset(kinds), "bfloat16")


def checkpoint_names(family: GgufFamily, tensor: GgufTensor) -> list[str] | None:
    """transformers' name of a tensor, or of each stacked tensor of experts; None: it has no such tensor."""
    stem, _, leaf = tensor.name.rpartition(".")
    if stem in _MODEL_NAMES:
        return [f"{_MODEL_NAMES[stem]}.{leaf}"]
    match = _LAYER.fullmatch(tensor.name)
    if match is None:
        return None
    layer, part, leaf = match.groups()
    name = {**LAYER_NAMES, **family.names}.get(part)
    if name is None:
        return None
    whole = f"model.layers.{layer}.{name}.{leaf}"
    return [whole.format(index) for index in range(tensor.shape[0])] if "{}" in name else [whole]
