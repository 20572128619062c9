"""The same model in plain PyTorch, without a cache, and a random checkpoint of it."""

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from pagoda_squares.model import angles, rotate

CONFIG = {
    "architectures": ["SquaresForCausalLM"],
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "vocab_size": 300,
    "max_position_embeddings": 512,
}


def write_checkpoint(directory: Path) -> None:
    """config.json and random weights."""
    size, rows = CONFIG["hidden_size"], {"qkv": 3, "gate": 1, "out": 1, "up": 2}
    shapes = {"embed.weight": (CONFIG["vocab_size"], size), "head.weight": (CONFIG["vocab_size"], size)}
    for layer in range(CONFIG["num_hidden_layers"]):
        shapes |= {f"layers.{layer}.{name}.weight": (count * size, size) for name, count in rows.items()}
        shapes[f"layers.{layer}.down.weight"] = (size, 2 * size)
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator) * shape[1] ** -0.5 for name, shape in shapes.items()}
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(CONFIG))


def greedy(directory: Path, prompt: list[int], num_tokens: int) -> list[int]:
    """What the model says after a prompt."""
    weights, tokens = load_file(directory / "model.safetensors"), list(prompt)
    for _ in range(num_tokens):
        tokens.append(int(_logits(weights, torch.tensor(tokens)).argmax()))
    return tokens[len(prompt) :]


def _logits(weights: dict[str, Tensor], tokens: Tensor) -> Tensor:
    x = weights["embed.weight"][tokens]
    size, heads = CONFIG["hidden_size"], CONFIG["num_attention_heads"]
    by = angles(size // heads, len(tokens))
    for layer in range(CONFIG["num_hidden_layers"]):
        part = {name: weights[f"layers.{layer}.{name}.weight"] for name in ("qkv", "gate", "out", "up", "down")}
        normed = F.rms_norm(x, (size,))
        query, key, value = (normed @ part["qkv"].T).view(-1, 3, heads, size // heads).unbind(1)
        query, key = rotate(query, by), rotate(key, by)
        rows = (each.transpose(0, 1) for each in (query, key, value))
        attended = F.scaled_dot_product_attention(*rows, is_causal=True).transpose(0, 1).flatten(1)
        x = x + (attended * torch.sigmoid(normed @ part["gate"].T)) @ part["out"].T
        x = x + F.relu(F.rms_norm(x, (size,)) @ part["up"].T) ** 2 @ part["down"].T
    return F.rms_norm(x[-1], (size,)) @ weights["head.weight"].T
