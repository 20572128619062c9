"""A small model by other names of its tensors: tied tables, names without a prefix, integers beside floats."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from pagoda_common.config.engine_config import EngineConfig, ModelConfig
from pagoda_common.errors import ModelLoadError
from pagoda_worker.worker import Worker

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
LAYER = "model.layers.0."
SHAPES = {
    "model.embed_tokens.weight": (40, 16),
    "model.norm.weight": (16,),
    f"{LAYER}input_layernorm.weight": (16,),
    f"{LAYER}post_attention_layernorm.weight": (16,),
    f"{LAYER}self_attn.q_proj.weight": (16, 16),
    f"{LAYER}self_attn.k_proj.weight": (8, 16),
    f"{LAYER}self_attn.v_proj.weight": (8, 16),
    f"{LAYER}self_attn.o_proj.weight": (16, 16),
    f"{LAYER}mlp.gate_proj.weight": (24, 16),
    f"{LAYER}mlp.up_proj.weight": (24, 16),
    f"{LAYER}mlp.down_proj.weight": (16, 24),
}
TENSORS = {
    name: torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    for seed, (name, shape) in enumerate(SHAPES.items())
}
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def load(directory: Path, tensors: dict[str, Tensor], **config: Any) -> tuple[dict[str, Tensor], list[tuple[int, int]]]:
    """Parameters by name, and the progress that was reported."""
    (directory / "config.json").write_text(json.dumps(CONFIG | config))
    save_file(tensors, directory / "model.safetensors")
    worker, told = Worker(num_threads=1), list[tuple[int, int]]()
    worker.init_device(EngineConfig(model=ModelConfig(model=str(directory), device="cpu", dtype="float32")))
    worker.load_model(lambda loaded, total: told.append((loaded, total)))
    assert worker._model is not None
    return {name: parameter.detach() for name, parameter in worker._model.named_parameters()}, told


def test_every_tensor_fills_its_rows(tmp_path: Path) -> None:
    found, told = load(tmp_path, TENSORS)
    expected = {
        "embed_tokens.weight": TENSORS[EMBED],
        "norm.weight": TENSORS["model.norm.weight"],
        "layers.0.attention_norm.weight": TENSORS[f"{LAYER}input_layernorm.weight"],
        "layers.0.mlp_norm.weight": TENSORS[f"{LAYER}post_attention_layernorm.weight"],
        "layers.0.attention.qkv_proj.weight": torch.cat([TENSORS[f"{LAYER}self_attn.{x}_proj.weight"] for x in "qkv"]),
        "layers.0.attention.o_proj.weight": TENSORS[f"{LAYER}self_attn.o_proj.weight"],
        "layers.0.mlp.up_proj.weight": torch.cat([TENSORS[f"{LAYER}mlp.{x}_proj.weight"] for x in ("gate", "up")]),
        "layers.0.mlp.down_proj.weight": TENSORS[f"{LAYER}mlp.down_proj.weight"],
    }
    assert found.keys() == expected.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)] == []
    total = 4 * sum(tensor.numel() for tensor in TENSORS.values())
    assert told[-1] == (total, total)
    assert len(told) == len(TENSORS)


def renamed(name: str) -> dict[str, Tensor]:
    """With the table under another name."""
    return {name if stored == EMBED else stored: tensor for stored, tensor in TENSORS.items()}


@pytest.mark.parametrize(
    "tensors",
    [
        renamed(HEAD),
        TENSORS | {HEAD: torch.full((40, 16), 9.0)},
        {name.removeprefix("model."): tensor for name, tensor in TENSORS.items()},
    ],
    ids=["the head's name", "both, of which the table's counts", "no prefix"],
)
def test_a_tied_table_has_two_names_and_a_prefix_may_be_missing(tensors: dict[str, Tensor], tmp_path: Path) -> None:
    found, _ = load(tmp_path, tensors)
    assert torch.equal(found["embed_tokens.weight"], TENSORS[EMBED])
    assert torch.equal(found["norm.weight"], TENSORS["model.norm.weight"])


def test_a_head_of_its_own_is_needed_where_nothing_is_tied(tmp_path: Path) -> None:
    head = torch.full((40, 16), 9.0)
    found, _ = load(tmp_path, TENSORS | {HEAD: head}, tie_word_embeddings=False)
    assert torch.equal(found[HEAD], head)
    assert torch.equal(found["embed_tokens.weight"], TENSORS[EMBED])
    with pytest.raises(ModelLoadError, match=r"does not fit LlamaForCausalLM; missing tensors: lm_head\.weight$"):
        load(tmp_path, TENSORS, tie_word_embeddings=False)
    with pytest.raises(ModelLoadError, match=r"missing tensors: model\.embed_tokens\.weight$"):
        load(tmp_path, renamed(HEAD), tie_word_embeddings=False)


def test_integers_beside_floats_of_the_same_matrix_become_floats_and_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    name = f"{LAYER}self_attn.q_proj"
    codes = torch.arange(256, dtype=torch.int64).sub(128).clamp(min=-127).to(torch.int8).view(16, 16)
    largest = torch.arange(1.0, 17.0)
    tensors = {**TENSORS, f"{name}.weight": codes, f"{name}.SCB": largest, f"{name}.bias": torch.zeros(16)}
    with caplog.at_level(logging.WARNING):
        found, told = load(
            tmp_path, tensors, quantization_config={"quant_method": "bitsandbytes", "load_in_8bit": True}
        )
    qkv = found["layers.0.attention.qkv_proj.weight"]
    torch.testing.assert_close(qkv[:16], codes.float() * largest[:, None] / 127)
    assert torch.equal(qkv[16:24], TENSORS[f"{LAYER}self_attn.k_proj.weight"])
    assert torch.equal(qkv[24:], TENSORS[f"{LAYER}self_attn.v_proj.weight"])
    assert caplog.messages == ["1 quantized matrices are held as float32: no kernel of cpu reads them as they are"], (
        "and a bias of zeros is none"
    )
    total = 4 * (sum(tensor.numel() for tensor in TENSORS.values()) - 256) + 256 + 4 * 16
    assert told[-1] == (total, total)
