"""Checkpoints in Mistral's form give the log probabilities and tokens of the transformers' ones they are made of."""

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pagoda_common.config.checkpoint import translated_files
from pagoda_common.errors import ModelLoadError
from tests.checkpoints import make_checkpoint
from tests.unit.worker.driver import Driver
from tests.unit.worker.quantization.test_quantized_checkpoints import TOLERANCE, expected_logprobs, served_logprobs
from tests.unit.worker.quantization.test_scaled_checkpoints import expected_tokens, greedy

NAMES = {
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "block_sparse_moe.gate": "feed_forward.gate",
}
OUTSIDE = {"model.embed_tokens": "tok_embeddings", "model.norm": "norm", "lm_head": "output"}


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(translated_files, "cache_home", lambda: tmp_path / "cache")


def write_tekken(path: Path) -> None:
    """Bytes alone."""
    vocab = [{"rank": byte, "token_bytes": base64.b64encode(bytes([byte])).decode()} for byte in range(256)]
    config = {"pattern": r"\S+|\s+", "default_vocab_size": 300, "default_num_special_tokens": 44, "version": "v7"}
    path.write_text(json.dumps({"config": config, "vocab": vocab}))


def write(
    source: Path, target: Path, *, store: Callable[[str, Tensor], dict[str, Tensor]] | None = None, **params: Any
) -> Path:
    """Write a checkpoint in Mistral's form; heads' halves in turns, as its rotation of neighbours wants them."""
    config = json.loads((source / "config.json").read_text())
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        stem, _, leaf = name.rpartition(".")
        if stem in OUTSIDE:
            tensors[f"{OUTSIDE[stem]}.{leaf}"] = tensor
            continue
        _, _, layer, part = stem.split(".", 3)
        known = part.replace("block_sparse_moe.experts", "feed_forward.experts") if ".experts." in part else NAMES[part]
        if known in ("attention.wq", "attention.wk"):
            heads = config["num_attention_heads" if known.endswith("q") else "num_key_value_heads"]
            halves = tensor.view(heads, 2, -1, tensor.shape[-1])
            tensor = torch.stack((halves[:, 0], halves[:, 1]), dim=2).reshape(tensor.shape)
        place = f"layers.{layer}.{known}"
        is_projection = tensor.dim() > 1 and "gate" not in known
        tensors |= store(place, tensor) if store and is_projection else {f"{place}.{leaf}": tensor}
    target.mkdir()
    save_file(tensors, target / "consolidated.safetensors")
    written = {
        "dim": config["hidden_size"],
        "n_layers": config["num_hidden_layers"],
        "head_dim": config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
        "hidden_dim": config["intermediate_size"],
        "n_heads": config["num_attention_heads"],
        "n_kv_heads": config["num_key_value_heads"],
        "norm_eps": config["rms_norm_eps"],
        "vocab_size": config["vocab_size"],
        "max_position_embeddings": config["max_position_embeddings"],
    }
    (target / "params.json").write_text(json.dumps(written | params))
    write_tekken(target / "tekken.json")
    return target


def assert_same(target: Path, twin: Path, **options: Any) -> Driver:
    driver = Driver(target, dtype="float32", **options)
    torch.testing.assert_close(served_logprobs(driver), expected_logprobs(twin), atol=TOLERANCE, rtol=0)
    assert greedy(driver) == expected_tokens(twin)
    return driver


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_dense_model(tmp_path: Path, world_size: int) -> None:
    source = make_checkpoint(
        "MistralForCausalLM", tmp_path / "source", sliding_window=None, tie_word_embeddings=False, rope_theta=500.0
    )
    theta = (json.loads((source / "config.json").read_text())["rope_parameters"])["rope_theta"]
    driver = assert_same(write(source, tmp_path / "target", rope_theta=theta), source, world_size=world_size)
    assert driver.facts.eos_token_ids == (2,)
    assert driver.facts.architecture == "MistralForCausalLM"


def test_a_window_and_tied_embeddings(tmp_path: Path) -> None:
    source = make_checkpoint("MistralForCausalLM", tmp_path / "source")
    theta = (json.loads((source / "config.json").read_text())["rope_parameters"])["rope_theta"]
    assert_same(write(source, tmp_path / "target", sliding_window=21, tied_embeddings=True, rope_theta=theta), source)


def test_experts(tmp_path: Path) -> None:
    source = make_checkpoint("MixtralForCausalLM", tmp_path / "source")
    theta = (json.loads((source / "config.json").read_text())["rope_parameters"])["rope_theta"]
    moe = {"num_experts": 4, "num_experts_per_tok": 2}
    driver = assert_same(write(source, tmp_path / "target", moe=moe, rope_theta=theta), source)
    assert driver.facts.architecture == "MixtralForCausalLM"


def test_fp8(tmp_path: Path) -> None:
    """A scale a matrix, and one of its activations."""
    source = make_checkpoint("MistralForCausalLM", tmp_path / "source", sliding_window=None, tie_word_embeddings=False)
    theta = (json.loads((source / "config.json").read_text())["rope_parameters"])["rope_theta"]
    twin, floats = tmp_path / "twin", load_file(source / "model.safetensors")

    def scaled(tensor: Tensor) -> tuple[Tensor, Tensor]:
        scale = tensor.abs().max() / 448
        return (tensor / scale).to(torch.float8_e4m3fn), scale

    def store(place: str, tensor: Tensor) -> dict[str, Tensor]:
        codes, scale = scaled(tensor)
        return {f"{place}.weight": codes, f"{place}.qscale_weight": scale, f"{place}.qscale_act": torch.tensor(0.1)}

    for name, tensor in floats.items():
        if "_proj" in name:
            codes, scale = scaled(tensor)
            floats[name] = codes.float() * scale
    twin.mkdir()
    for path in source.glob("*.json"):
        (twin / path.name).write_bytes(path.read_bytes())
    save_file(floats, twin / "model.safetensors", metadata={"format": "pt"})
    quantization = {"qformat_weight": "fp8_e4m3", "qscheme_act": "TENSOR"}
    target = write(source, tmp_path / "target", store=store, quantization=quantization, rope_theta=theta)
    assert assert_same(target, twin).facts.quantization == "fp8"


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"dim": None}, r"dim is None in .*params\.json, must be at least 1"),
        ({"vision_encoder": {"dim": 3}}, "has vision_encoder, which is not supported"),
        ({"quantization": {"qformat_weight": "nvfp4"}}, "quantization .*nvfp4.* must be of fp8_e4m3"),
        ({"yarn": {"factor": 2}}, "yarn in .* must have factor and original_max_position_embeddings"),
        ({"sliding_window": [1, 2]}, r"sliding_window is \[1, 2\]"),
        (
            {"head_dim": 10},
            r"layers\.0\.attention\.w[qk]\.weight has \d+ rows, must be a multiple of the head size, 10",
        ),
    ],
)
def test_what_is_not_read_is_named(tmp_path: Path, params: dict[str, Any], message: str) -> None:
    source = make_checkpoint("MistralForCausalLM", tmp_path / "source", tie_word_embeddings=False)
    with pytest.raises(ModelLoadError, match=message):
        Driver(write(source, tmp_path / "target", **params))
