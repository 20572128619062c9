"""Llama-Nemotron, assembled from transformers' Llama layers as block_configs says: transformers has no such model.

Importing this module makes transformers' Auto classes know model type nemotron-nas.
"""

import copy
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig
from transformers.models.llama import modeling_llama as llama

MODEL_TYPE = "nemotron-nas"


class DeciLMConfig(LlamaConfig):
    """Llama's, and what each layer has."""

    model_type = MODEL_TYPE
    block_configs: list | None = None
    """One object a layer."""
    num_key_value_heads_per_layer: list | None = None
    """As DeciLM-7B says what each layer has."""


def intermediate_size(ffn_mult: float, hidden_size: int) -> int:
    """The next multiple of 256 of two thirds."""
    size = int(2 * ffn_mult * hidden_size / 3)
    return size if size % 256 == 0 else size + 256 - size % 256


class LinearAttention(nn.Module):
    """One matrix in place of attention."""

    def __init__(self, config: DeciLMConfig) -> None:
        super().__init__()
        self.linear_attn = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, hidden_states: torch.Tensor, **options: Any) -> tuple[torch.Tensor, None]:
        return self.linear_attn(hidden_states), None


class LinearMLP(nn.Module):
    """One matrix in place of the feed-forward."""

    def __init__(self, config: DeciLMConfig) -> None:
        super().__init__()
        self.linear_mlp = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.linear_mlp(hidden_states)  # type: ignore[no-any-return]  # torch: Module calls are Any


class DeciLMLayer(llama.LlamaDecoderLayer):
    """A layer of Llama whose attention and feed-forward may be missing."""

    def __init__(self, config: DeciLMConfig, layer: int) -> None:
        attention, ffn = _block(config, layer)
        sized = copy.copy(config)
        if attention.get("n_heads_in_group") is not None:
            sized.num_key_value_heads = config.num_attention_heads // attention["n_heads_in_group"]
        if ffn.get("ffn_mult") is not None:
            sized.intermediate_size = intermediate_size(ffn["ffn_mult"], config.hidden_size)
        super().__init__(sized, layer)
        self.attends, self.transforms = not attention.get("no_op"), not ffn.get("no_op")
        if not self.attends:
            del self.self_attn, self.input_layernorm
        elif attention.get("replace_with_linear"):
            self.self_attn = LinearAttention(config)
        if not self.transforms:
            del self.mlp, self.post_attention_layernorm
        elif ffn.get("replace_with_linear"):
            self.mlp = LinearMLP(config)

    def forward(self, hidden_states: torch.Tensor, **options: Any) -> torch.Tensor:
        if self.attends:
            hidden_states = hidden_states + self.self_attn(self.input_layernorm(hidden_states), **options)[0]
        if self.transforms:
            hidden_states = hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))
        return hidden_states


def _block(config: DeciLMConfig, layer: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Attention and feed-forward of a layer."""
    if config.block_configs is not None:
        return config.block_configs[layer]["attention"], config.block_configs[layer]["ffn"]
    if config.num_key_value_heads_per_layer is not None:
        return {"n_heads_in_group": config.num_attention_heads // config.num_key_value_heads_per_layer[layer]}, {}
    return {}, {}


class DeciLMForCausalLM(llama.LlamaForCausalLM):
    """The language model."""

    config_class = DeciLMConfig

    def __init__(self, config: DeciLMConfig) -> None:
        super().__init__(config)
        self.model.layers = nn.ModuleList(DeciLMLayer(config, layer) for layer in range(config.num_hidden_layers))
        self.post_init()


AutoConfig.register(MODEL_TYPE, DeciLMConfig)
AutoModelForCausalLM.register(DeciLMConfig, DeciLMForCausalLM)
