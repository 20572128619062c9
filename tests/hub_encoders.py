"""Encoders that are published with code of their own, in plain PyTorch in float32, and small checkpoints of them.

Written from the published descriptions: GTE of 2024 (`Alibaba-NLP/new-impl`) and JinaBERT in its two forms. They are
what the worker is compared with, and read tensors under the names of the hub's checkpoints.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from tests.encoders import PAD, SEED, write_pair_tokenizer

SIZES = {
    "vocab_size": 264,
    "hidden_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "intermediate_size": 128,
    "max_position_embeddings": 1024,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "hidden_act": "gelu",
    "pad_token_id": PAD,
}
NTK = {"type": "ntk", "factor": 8.0}
GTE = SIZES | {
    "architectures": ["NewModel"],
    "model_type": "new",
    "auto_map": {"AutoModel": "Alibaba-NLP/new-impl--modeling.NewModel"},
    "position_embedding_type": "rope",
    "rope_theta": 20_000,
    "rope_scaling": NTK,
    "layer_norm_type": "layer_norm",
    "logn_attention_scale": False,
    "pack_qkv": True,
    "unpad_inputs": True,
}
JINA = SIZES | {
    "architectures": ["JinaBertForMaskedLM"],
    "model_type": "bert",
    "auto_map": {"AutoModel": "jinaai/jina-bert-implementation--modeling_bert.JinaBertModel"},
    "position_embedding_type": "alibi",
    "feed_forward_type": "geglu",
    "emb_pooler": "mean",
}
JINA_CODE = JINA | {
    "architectures": ["JinaBertModel"],
    "auto_map": {"AutoModel": "jinaai/jina-bert-v2-qk-post-norm--modeling_bert.JinaBertModel"},
}


def write_hub_encoder(directory: Path, config: Mapping[str, Any], *, prefix: str = "", labels: int = 0) -> None:
    """Save a checkpoint of random weights.

    Args:
        prefix: before the names of the encoder's own tensors.
        labels: rows of a head after the first token's transformation; 0: there is no head.
    """
    is_gte = config["model_type"] != "bert"
    shapes = _gte_shapes(config) if is_gte else _jina_shapes(config)
    size = int(config["hidden_size"])
    if labels:
        shapes |= {"pooler.dense.weight": (size, size), "pooler.dense.bias": (size,)}
    named = {prefix + name: shape for name, shape in shapes.items()}
    if labels:
        named |= {"classifier.weight": (labels, size), "classifier.bias": (labels,)}
        config = {**config, "id2label": {str(place): f"LABEL_{place}" for place in range(labels)}}
    generator = torch.Generator().manual_seed(SEED)
    tensors = {}
    for name, shape in named.items():
        values = torch.randn(shape, generator=generator)
        if "embeddings" in name and len(shape) > 1:
            tensors[name] = values * 0.5
        elif len(shape) > 1:
            tensors[name] = values * 0.15
        else:  # of a norm, or a bias
            tensors[name] = values * 0.1 + (1.0 if name.endswith("weight") else 0.0)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config))
    write_pair_tokenizer(directory)


def _embedding_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    size = int(config["hidden_size"])
    shapes: dict[str, tuple[int, ...]] = {"embeddings.word_embeddings.weight": (config["vocab_size"], size)}
    if config["type_vocab_size"]:
        shapes["embeddings.token_type_embeddings.weight"] = (config["type_vocab_size"], size)
    return shapes | _norm("embeddings.LayerNorm", size)


def _norm(name: str, size: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (size,), f"{name}.bias": (size,)}


def _linear(name: str, outputs: int, inputs: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}


def _gte_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    size, inner = int(config["hidden_size"]), int(config["intermediate_size"])
    shapes = _embedding_shapes(config)
    for layer in range(config["num_hidden_layers"]):
        at = f"encoder.layer.{layer}."
        shapes |= _linear(f"{at}attention.qkv_proj", 3 * size, size) | _linear(f"{at}attention.o_proj", size, size)
        shapes |= {f"{at}mlp.up_gate_proj.weight": (2 * inner, size)} | _linear(f"{at}mlp.down_proj", size, inner)
        shapes |= _norm(f"{at}attn_ln", size) | _norm(f"{at}mlp_ln", size)
    return shapes


def _jina_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    size, inner = int(config["hidden_size"]), int(config["intermediate_size"])
    shapes = _embedding_shapes(config)
    for layer in range(config["num_hidden_layers"]):
        at = f"encoder.layer.{layer}."
        for name in ("self.query", "self.key", "self.value", "output.dense"):
            shapes |= _linear(f"{at}attention.{name}", size, size)
        shapes |= _norm(f"{at}attention.output.LayerNorm", size)
        if _has_qk_norm(config):
            shapes |= _norm(f"{at}attention.self.layer_norm_q", size) | _norm(f"{at}attention.self.layer_norm_k", size)
            shapes |= {f"{at}mlp.up_gated_layer.weight": (2 * inner, size)}
            shapes |= _linear(f"{at}mlp.down_layer", size, inner)
            shapes |= _norm(f"{at}layer_norm_1", size) | _norm(f"{at}layer_norm_2", size)
        else:
            shapes |= {f"{at}mlp.gated_layers.weight": (2 * inner, size)} | _linear(f"{at}mlp.wo", size, inner)
            shapes |= _norm(f"{at}mlp.layernorm", size)
    return shapes


def _has_qk_norm(config: Mapping[str, Any]) -> bool:
    return "qk-post-norm" in str(config.get("auto_map"))


class Reference:
    """One checkpoint: [num_tokens] ids of one text alone to [num_tokens, hidden_size]."""

    def __init__(self, directory: Path) -> None:
        from safetensors.torch import load_file

        self.config = json.loads((directory / "config.json").read_text())
        stored = load_file(directory / "model.safetensors")
        self.tensors = {name.removeprefix("new.").removeprefix("bert."): value for name, value in stored.items()}
        self.eps = float(self.config["layer_norm_eps"])
        self.num_heads = int(self.config["num_attention_heads"])

    @torch.inference_mode()
    def hidden(self, ids: Sequence[int], types: Sequence[int] | None = None) -> Tensor:
        """The last hidden states."""
        x = self.tensors["embeddings.word_embeddings.weight"][list(ids)]
        if self.config["type_vocab_size"]:
            x = x + self.tensors["embeddings.token_type_embeddings.weight"][list(types or [0] * len(ids))]
        x = self._norm("embeddings.LayerNorm", x)
        layer = self._jina_layer if self.config["model_type"] == "bert" else self._gte_layer
        for place in range(self.config["num_hidden_layers"]):
            x = layer(f"encoder.layer.{place}.", x)
        return x

    def logits(self, ids: Sequence[int], types: Sequence[int] | None = None) -> Tensor:
        """Of the head over the first token."""
        first = torch.tanh(self._linear("pooler.dense", self.hidden(ids, types)[0]))
        return self._linear("classifier", first)

    def token_logits(self, ids: Sequence[int]) -> Tensor:
        """[num_tokens, labels], of the head over each token."""
        return self._linear("classifier", self.hidden(ids))

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    def _norm(self, name: str, x: Tensor) -> Tensor:
        weight, bias = self.tensors[f"{name}.weight"], self.tensors[f"{name}.bias"]
        return F.layer_norm(x, x.shape[-1:], weight, bias, self.eps)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None) -> Tensor:
        """[heads, tokens, head_dim] to [tokens, hidden_size]."""
        scores = query @ key.transpose(1, 2) / math.sqrt(query.shape[-1])
        weights = (scores if bias is None else scores + bias).softmax(-1)
        return (weights @ value).transpose(0, 1).flatten(1)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, -1)).transpose(0, 1)

    def _gte_layer(self, at: str, x: Tensor) -> Tensor:
        query, key, value = (self._heads(one) for one in self._linear(f"{at}attention.qkv_proj", x).chunk(3, dim=-1))
        query, key = self._rotated(query), self._rotated(key)
        attended = self._linear(f"{at}attention.o_proj", self._attend(query, key, value))
        x = self._norm(f"{at}attn_ln", x + attended)
        up, gate = self._linear(f"{at}mlp.up_gate_proj", x).chunk(2, dim=-1)
        return self._norm(f"{at}mlp_ln", x + self._linear(f"{at}mlp.down_proj", up * F.gelu(gate)))

    def _rotated(self, x: Tensor) -> Tensor:
        angles = torch.arange(x.shape[1])[:, None] * self._frequencies(x.shape[-1])[None]
        cos, sin = angles.cos(), angles.sin()
        low, high = x.chunk(2, dim=-1)
        return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)

    def _frequencies(self, size: int) -> Tensor:
        """Su 2023 (kexue.fm/archives/9706), equations 6, 10 and 13."""
        base = float(self.config["rope_theta"])
        scaling = self.config.get("rope_scaling")
        powers = torch.arange(0, size, 2) / size
        if scaling is None:
            return base**-powers
        factor = float(scaling["factor"])
        if "mixed_b" not in scaling:
            return (base * factor) ** -powers / factor ** (2 / size)
        b = float(scaling["mixed_b"])
        steepness = math.log(factor) / (size / 2) ** b
        return base**-powers / torch.exp(steepness * torch.arange(1, size // 2 + 1) ** b)

    def _jina_layer(self, at: str, x: Tensor) -> Tensor:
        query, key, value = (self._linear(f"{at}attention.self.{name}", x) for name in ("query", "key", "value"))
        is_code = _has_qk_norm(self.config)
        if is_code:
            query, key = (
                self._norm(f"{at}attention.self.layer_norm_q", query),
                self._norm(f"{at}attention.self.layer_norm_k", key),
            )
        places = torch.arange(x.shape[0])
        bias = -self._slopes()[:, None, None] * (places[:, None] - places[None]).abs()
        attended = self._attend(*(self._heads(one) for one in (query, key, value)), bias)
        attended = self._norm(
            f"{at}attention.output.LayerNorm", self._linear(f"{at}attention.output.dense", attended) + x
        )
        act = F.relu if self.config["feed_forward_type"] == "reglu" else F.gelu
        if is_code:
            x = self._norm(f"{at}layer_norm_1", attended + x)
            up, gate = self._linear(f"{at}mlp.up_gated_layer", x).chunk(2, dim=-1)
            return self._norm(f"{at}layer_norm_2", x + self._linear(f"{at}mlp.down_layer", up * act(gate)))
        gate, up = self._linear(f"{at}mlp.gated_layers", attended).chunk(2, dim=-1)
        return self._norm(f"{at}mlp.layernorm", attended + self._linear(f"{at}mlp.wo", act(gate) * up))

    def _slopes(self) -> Tensor:
        """Press et al. 2021: a geometric sequence; heads beyond a power of two take odd members of the next one."""
        power = 2 ** math.floor(math.log2(self.num_heads))
        first = [2 ** (-8 / power * (head + 1)) for head in range(power)]
        beyond = [2 ** (-8 / (2 * power) * (head + 1)) for head in range(0, 2 * power, 2)]
        return torch.tensor((first + beyond)[: self.num_heads])
