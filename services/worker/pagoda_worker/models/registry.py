"""Architecture names of config.json to the families that can run them."""

from collections.abc import Callable
from dataclasses import dataclass

from pagoda_common.errors import ModelLoadError
from pagoda_worker.models.gpt2 import gpt2_spec, gpt2_weights
from pagoda_worker.models.llama import llama_spec, llama_weights, mistral_spec, qwen2_spec, qwen3_spec
from pagoda_worker.models.opt import opt_spec, opt_weights
from pagoda_worker.models.spec import DecoderSpec, HfConfig
from pagoda_worker.models.weights import WeightNames


@dataclass(frozen=True, slots=True)
class Family:
    """How to read one architecture's checkpoints."""

    spec: Callable[[HfConfig], DecoderSpec]
    weights: Callable[[DecoderSpec], WeightNames]


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(llama_spec, llama_weights),
    "MistralForCausalLM": Family(mistral_spec, llama_weights),
    "Qwen2ForCausalLM": Family(qwen2_spec, llama_weights),
    "Qwen3ForCausalLM": Family(qwen3_spec, llama_weights),
    "GPT2LMHeadModel": Family(gpt2_spec, gpt2_weights),
    "OPTForCausalLM": Family(opt_spec, opt_weights),
}
"""Supported architectures."""


def family_of(config: HfConfig) -> Family:
    """The family of a checkpoint.

    Raises:
        ModelLoadError: none of its architectures is supported, or its weights are quantized.
    """
    quantization = config.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else quantization
        raise ModelLoadError(f"the checkpoint is quantized ({method}); only float weights are supported")
    names = config.get("architectures") or []
    for name in names:
        if name in FAMILIES:
            return FAMILIES[name]
    found = ", ".join(str(name) for name in names) or f"none named (model_type {config.get('model_type')!r})"
    raise ModelLoadError(f"architecture {found} is not supported; supported are {', '.join(FAMILIES)}")
