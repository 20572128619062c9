"""A Llama in plain PyTorch whose parameter names are transformers' own, and its export as a Hugging Face checkpoint."""

import json
import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

END_OF_TEXT, IM_START, IM_END, PAD = 0, 1, 2, 3
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"]
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "vocab_size": 3072,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 7,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "initializer_range": 0.02,
    "bos_token_id": END_OF_TEXT,
    "eos_token_id": [END_OF_TEXT, IM_END],
    "pad_token_id": PAD,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}
GENERATION_CONFIG: dict[str, Any] = {
    "bos_token_id": END_OF_TEXT,
    "eos_token_id": [END_OF_TEXT, IM_END],
    "pad_token_id": PAD,
    "do_sample": True,
    "temperature": 0.7,
    "top_p": 0.9,
}
CHAT_TEMPLATE = (
    "{%- macro text(content) -%}"
    "{%- if content is string -%}{{- content -}}"
    "{%- elif content -%}{%- for part in content -%}{{- part['text'] | default('') -}}{%- endfor -%}"
    "{%- endif -%}"
    "{%- endmacro -%}"
    "{%- set ns = namespace(rest=messages) -%}"
    "{%- if tools -%}"
    "{{- '<|im_start|>system\\n' -}}"
    "{%- if messages and messages[0]['role'] == 'system' -%}"
    "{{- text(messages[0]['content']) + '\\n' -}}{%- set ns.rest = messages[1:] -%}"
    "{%- endif -%}"
    "{{- 'You can call these functions:\\n' -}}"
    "{%- for tool in tools -%}"
    "{{- (tool['function'] if tool['function'] is defined else tool) | tojson + '\\n' -}}"
    "{%- endfor -%}"
    '{{- \'To call one, answer with <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>\\n\' -}}'
    "{%- endif -%}"
    "{%- for message in ns.rest -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + text(message['content']) -}}"
    "{%- for call in message['tool_calls'] or [] -%}"
    "{%- set f = call['function'] if call['function'] is defined else call -%}"
    "{{- '<tool_call>\\n{\"name\": \"' + f['name'] + '\", \"arguments\": ' -}}"
    "{{- f['arguments'] if f['arguments'] is string else f['arguments'] | tojson -}}"
    "{{- '}\\n</tool_call>' -}}"
    "{%- endfor -%}"
    "{{- '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)
"""ChatML without a default system message; functions are offered as records.tool_system writes them."""


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding in the half-split form. Source: Su et al. 2021 (arXiv 2104.09864)."""
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention. Written out, since compiled it beats the fused CPU kernel at head_dim 32."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.head_dim = config["head_dim"]
        hidden, kv = config["hidden_size"], self.num_kv_heads * self.head_dim
        self.q_proj = nn.Linear(hidden, self.num_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(hidden, kv, bias=False)
        self.v_proj = nn.Linear(hidden, kv, bias=False)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.q_proj(x).view(batch, length, self.num_heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(batch, length, self.num_kv_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(batch, length, self.num_kv_heads, self.head_dim).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        groups = self.num_heads // self.num_kv_heads
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        scores = (q @ k.transpose(-1, -2)).float() * self.head_dim**-0.5 + mask  # [B, H, T, T]
        out = torch.softmax(scores, dim=-1).to(v.dtype) @ v  # [B, H, T, D]
        projected: Tensor = self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))
        return projected


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """One pre-norm decoder layer."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(config), MLP(config)
        self.input_layernorm = nn.RMSNorm(config["hidden_size"], config["rms_norm_eps"])
        self.post_attention_layernorm = nn.RMSNorm(config["hidden_size"], config["rms_norm_eps"])

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Body(nn.Module):
    """Everything but the head: token ids [B, T] to normed hidden states [B, T, hidden_size]."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config["vocab_size"], config["hidden_size"])
        self.layers = nn.ModuleList(Layer(config) for _ in range(config["num_hidden_layers"]))
        self.norm = nn.RMSNorm(config["hidden_size"], config["rms_norm_eps"])
        dim, length = config["head_dim"], config["max_position_embeddings"]
        inverse = config["rope_theta"] ** (-torch.arange(0, dim, 2).float() / dim)
        angle = torch.outer(torch.arange(length).float(), inverse).repeat(1, 2)
        self.cos: Tensor
        self.sin: Tensor
        self.mask: Tensor
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)
        self.register_buffer("mask", torch.full((length, length), -1e9).triu(1), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        x: Tensor = self.embed_tokens(ids)
        cos, sin, mask = self.cos[:length], self.sin[:length], self.mask[:length, :length]
        for layer in self.layers:
            x = layer(x, cos, sin, mask)
        normed: Tensor = self.norm(x)
        return normed


class Llama(nn.Module):
    """The body and the head, which shares the embedding's weight."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.model = Body(config)
        small = 0.02 / math.sqrt(2 * config["num_hidden_layers"])  # for the layers' outputs, after GPT-2
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=small if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02)

    def head(self, hidden: Tensor) -> Tensor:
        """Logits [..., vocab_size] of normed hidden states."""
        return F.linear(hidden, self.model.embed_tokens.weight)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.model(ids))


def load(model: Llama, folder: Path) -> None:
    """Read the weights of an exported checkpoint."""
    model.load_state_dict({name: value.float() for name, value in load_file(folder / "model.safetensors").items()})


def export(model: Llama, tokenizer: Tokenizer, folder: Path) -> None:
    """Write a checkpoint that transformers and Pagoda load: bf16 weights, configs, tokenizer, chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        name: value.detach().to("cpu", torch.bfloat16).contiguous() for name, value in model.state_dict().items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL_TOKENS[END_OF_TEXT],
        "eos_token": SPECIAL_TOKENS[END_OF_TEXT],
        "pad_token": SPECIAL_TOKENS[PAD],
        "additional_special_tokens": [SPECIAL_TOKENS[IM_START], SPECIAL_TOKENS[IM_END]],
        "model_max_length": CONFIG["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    files = {
        "config.json": CONFIG,
        "generation_config.json": GENERATION_CONFIG,
        "tokenizer_config.json": tokenizer_config,
    }
    for name, value in files.items():
        (folder / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
