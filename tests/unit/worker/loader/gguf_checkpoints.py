"""GGUF files of tiny checkpoints, written by the package gguf as llama.cpp's converter writes them.

Types whose numbers the package cannot make are made of random bits, with scales of the size that weights have.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from gguf import GGUFWriter
from safetensors.torch import load_file

NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
}
GEMMA_NAMES = NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
EXPERTS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}
ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MixtralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3moe",
    "Gemma2ForCausalLM": "gemma2",
}
WRITTEN = (Type.F16, Type.BF16, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0)
"""Those that the package can make of floats."""
HALVES = {
    Type.Q2_K: {80: 3e-4 * 4, 82: 1.5e-3 * 1.2},
    Type.Q3_K: {108: 6e-4},
    Type.Q4_K: {0: 1e-4, 2: 7.5e-4},
    Type.Q5_K: {0: 5e-5, 2: 7.5e-4},
    Type.Q6_K: {208: 2e-5},
}
"""Where each block of a type has floats, and which."""


def blocks(values: np.ndarray, kind: Type, generator: np.random.Generator) -> np.ndarray:
    """The bytes of a matrix [rows, columns]."""
    if kind in WRITTEN:
        return gguf.quants.quantize(values, kind)
    num_values, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    made = generator.integers(0, 256, (len(values), values.shape[1] // num_values, num_bytes), dtype=np.uint8)
    for place, size in HALVES[kind].items():
        made[:, :, place : place + 2] = np.frombuffer(np.float16(size).tobytes(), np.uint8)
    return made.reshape(len(values), -1)


def stored_rows(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows of queries or keys as llama.cpp wants them: the halves of each head in turns."""
    halves = weight.view(num_heads, 2, -1, *weight.shape[1:])
    return halves.transpose(1, 2).reshape(weight.shape)


def write_gguf(
    source: Path,
    target: Path,
    kind_of: Callable[[str], Type],
    *,
    metadata: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    write_tokenizer: Callable[[GGUFWriter], None] | None = None,
) -> Path:
    """Write a checkpoint of safetensors as one file.

    Args:
        kind_of: the type of a matrix, by its name in the file. What has one dimension is F32.
        metadata: further keys, or others.
        tensors: further float32 tensors.
    """
    config = json.loads((source / "config.json").read_text())
    architecture = ARCHITECTURES[config["architectures"][0]]
    writer = GGUFWriter(target, architecture)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config.get("rope_parameters") or {}
    writer.add_rope_freq_base(rope.get("rope_theta", config.get("rope_theta", 10000.0)))
    if config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    if num_experts := config.get("num_local_experts", config.get("num_experts")):
        writer.add_expert_count(num_experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config.get("moe_intermediate_size", config["intermediate_size"]))
    for key, value in (metadata or {}).items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        (writer.add_string if isinstance(value, str) else add)(key, value)
    generator = np.random.default_rng(3)
    for name, tensor in stored_tensors(source, config, architecture).items():
        values = tensor.float().numpy()
        kind = kind_of(name) if tensor.dim() > 1 else Type.F32
        if kind == Type.F32:
            writer.add_tensor(name, values)
        else:
            rows = blocks(values.reshape(-1, values.shape[-1]), kind, generator)
            writer.add_tensor(name, rows.reshape(*values.shape[:-1], -1), raw_dtype=kind)
    for name, values in (tensors or {}).items():
        writer.add_tensor(name, values)
    if write_tokenizer is not None:
        write_tokenizer(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def stored_tensors(source: Path, config: dict[str, Any], architecture: str) -> dict[str, torch.Tensor]:
    """By the names of the file, in its order of rows; experts stacked."""
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    found: dict[str, torch.Tensor] = {}
    experts: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if not name.startswith("model.layers."):
            stem = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
            found[f"{stem[name.removesuffix('.weight')]}.weight"] = tensor
            continue
        _, _, layer, rest = name.split(".", 3)
        place, _, leaf = rest.rpartition(".")
        if ".experts." in place:
            expert, part = place.split(".experts.")[1].split(".")
            experts.setdefault(f"blk.{layer}.ffn_{EXPERTS[part]}_exps.{leaf}", {})[int(expert)] = tensor
            continue
        part = (GEMMA_NAMES if architecture == "gemma2" else NAMES)[place]
        if architecture == "llama" and part in heads:
            tensor = stored_rows(tensor, heads[part])
        found[f"blk.{layer}.{part}.{leaf}"] = tensor
    for name, parts in experts.items():
        found[name] = torch.stack([parts[index] for index in range(len(parts))])
    if architecture == "gemma2":  # whose norms multiply with one more than their weights
        found = {name: tensor + 1 if name.endswith("norm.weight") else tensor for name, tensor in found.items()}
    return found
