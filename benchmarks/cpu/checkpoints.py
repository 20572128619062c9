"""Checkpoints with random weights and a tokenizer of the right size, made once: what every engine loads.

    python -m benchmarks.cpu.checkpoints 125m DIRECTORY

The tokenizer has the 256 bytes, one merge, and ordinary words that no text is cut into: prompts are token ids, and each
output is a few letters, so that no engine waits for the rest of a character before it sends.
"""

import json
import math
import sys
from pathlib import Path
from typing import Any

from benchmarks.cpu.shapes import SHAPES, Shape
from benchmarks.cpu.workloads import MAX_MODEL_LEN

SEED = 7
BOS, EOS = "<s>", "</s>"


def make_checkpoint(shape: Shape, folder: Path) -> Path:
    """Write config.json, tokenizer and model.safetensors (bf16) into `folder`, unless they are there."""
    if (folder / "model.safetensors").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / "config.json", config(shape))
    _write(
        folder / "generation_config.json", {"bos_token_id": shape.vocab_size - 2, "eos_token_id": shape.vocab_size - 1}
    )
    _write(folder / "tokenizer.json", tokenizer(shape.vocab_size))
    _write(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BOS,
            "eos_token": EOS,
            "model_max_length": 2 * MAX_MODEL_LEN,
            "clean_up_tokenization_spaces": False,
        },
    )
    write_weights(shape, folder / "model.safetensors")
    return folder


def config(shape: Shape) -> dict[str, Any]:
    """config.json as transformers writes it."""
    return {
        "architectures": [shape.architecture],
        "model_type": shape.model_type,
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate_size,
        "vocab_size": shape.vocab_size,
        "tie_word_embeddings": shape.is_tied,
        "max_position_embeddings": 2 * MAX_MODEL_LEN,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": shape.vocab_size - 2,
        "eos_token_id": shape.vocab_size - 1,
    } | _experts_config(shape)


def _experts_config(shape: Shape) -> dict[str, Any]:
    if shape.experts is None:
        return {}
    return {
        "num_experts": shape.experts.num_experts,
        "num_experts_per_tok": shape.experts.num_chosen,
        "moe_intermediate_size": shape.experts.intermediate_size,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def tokenizer(vocab_size: int) -> dict[str, Any]:
    """tokenizer.json: byte-level BPE with `vocab_size` tokens, the last two special."""
    vocab = {letter: place for place, letter in enumerate(byte_letters())}
    vocab["ab"] = len(vocab)
    for place in range(len(vocab), vocab_size - 2):
        vocab["Ġ" + word(place)] = place
    special = [
        {
            "id": vocab_size - 2 + place,
            "content": content,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for place, content in enumerate((BOS, EOS))
    ]
    vocab |= {token["content"]: token["id"] for token in special}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": ["a b"],
        },
    }


def byte_letters() -> list[str]:
    """The letter that stands for each byte in a byte-level vocabulary: itself where it is printable."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (byte for byte in range(256) if byte not in printable)
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + place) for place, byte in enumerate(others)}
    return [letters[byte] for byte in range(256)]


def word(number: int) -> str:
    """A word of four small letters, another one for each number below 26 ** 4."""
    letters = ""
    for _ in range(4):
        number, letter = divmod(number, 26)
        letters += chr(ord("a") + letter)
    return letters


def write_weights(shape: Shape, path: Path) -> None:
    """Random normal weights in bf16.

    Attention and MLP write about as much into the residual stream as the embedding has put there: the next token
    depends on all of the context, and greedy decoding moves through the vocabulary instead of repeating one token.
    """
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(SEED)

    def normal(*size: int, std: float) -> torch.Tensor:
        return (torch.randn(size, generator=generator) * std).to(torch.bfloat16)

    def ones(size: int) -> torch.Tensor:
        return torch.ones(size, dtype=torch.bfloat16)

    hidden, heads = shape.hidden_size, shape.head_dim * shape.num_heads
    kv_heads, inner = shape.head_dim * shape.num_kv_heads, shape.intermediate_size
    std = 1 / math.sqrt(hidden)
    tensors = {"model.embed_tokens.weight": normal(shape.vocab_size, hidden, std=std)}
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}."
        tensors |= {
            f"{prefix}input_layernorm.weight": ones(hidden),
            f"{prefix}post_attention_layernorm.weight": ones(hidden),
            f"{prefix}self_attn.q_proj.weight": normal(heads, hidden, std=2 * std),
            f"{prefix}self_attn.k_proj.weight": normal(kv_heads, hidden, std=2 * std),
            f"{prefix}self_attn.v_proj.weight": normal(kv_heads, hidden, std=std),
            f"{prefix}self_attn.o_proj.weight": normal(hidden, heads, std=std),
        }
        experts = [f"{prefix}mlp."]
        if shape.experts is not None:
            tensors[f"{prefix}mlp.gate.weight"] = normal(shape.experts.num_experts, hidden, std=std)
            experts = [f"{prefix}mlp.experts.{index}." for index in range(shape.experts.num_experts)]
            inner = shape.experts.intermediate_size
        for place in experts:
            tensors[f"{place}gate_proj.weight"] = normal(inner, hidden, std=std)
            tensors[f"{place}up_proj.weight"] = normal(inner, hidden, std=std)
            tensors[f"{place}down_proj.weight"] = normal(hidden, inner, std=std)
        if shape.model_type.startswith("qwen3"):
            for name in ("q_norm", "k_norm"):
                tensors[f"{prefix}self_attn.{name}.weight"] = ones(shape.head_dim)
    tensors["model.norm.weight"] = ones(hidden)
    if not shape.is_tied:
        tensors["lm_head.weight"] = normal(shape.vocab_size, hidden, std=std)
    save_file(tensors, path, metadata={"format": "pt"})


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    make_checkpoint(SHAPES[sys.argv[1]], Path(sys.argv[2]))
