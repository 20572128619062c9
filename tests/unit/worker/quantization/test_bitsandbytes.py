"""bitsandbytes checkpoints give the log probabilities and tokens of the floats that their codes stand for.

Codes are made here one by one from the papers' descriptions: NF4's values are QLoRA's, of appendix E.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pagoda_common.errors import ModelLoadError
from pagoda_worker.models.quantized_method import QuantizedLinearMethod
from tests.checkpoints import make_checkpoint
from tests.unit.worker.driver import Driver
from tests.unit.worker.quantization.test_quantized_checkpoints import matrices
from tests.unit.worker.quantization.test_scaled_checkpoints import assert_served_as

NF4 = torch.tensor(
    [
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ]
)
MAP = torch.linspace(-1, 1, 256) ** 3
"""Of maxima that are quantized: checkpoints bring their own."""


def four_bits(weight: Tensor, stem: str, *, is_nested: bool) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors of a matrix and the floats that they stand for, in blocks of 64."""
    blocks = weight.flatten().view(-1, 64)
    largest = blocks.abs().amax(1)
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(weight.shape)}
    tensors: dict[str, Tensor] = {f"{stem}.weight.quant_map": NF4.clone()}
    if is_nested:
        offset = float(largest.mean())
        outer = torch.stack([part.abs().max() for part in (largest - offset).split(256)])
        scaled = (largest - offset) / outer.repeat_interleave(256)[: len(largest)]
        codes = (scaled[:, None] - MAP).abs().argmin(1)
        largest = MAP[codes] * outer.repeat_interleave(256)[: len(largest)] + offset
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
        tensors |= {
            f"{stem}.weight.absmax": codes.to(torch.uint8),
            f"{stem}.weight.nested_absmax": outer,
            f"{stem}.weight.nested_quant_map": MAP.clone(),
        }
    else:
        tensors[f"{stem}.weight.absmax"] = largest
    codes = ((blocks / largest[:, None])[..., None] - NF4).abs().argmin(-1)
    pairs = codes.flatten().view(-1, 2)
    tensors[f"{stem}.weight"] = (pairs[:, :1] * 16 + pairs[:, 1:]).to(torch.uint8)
    text = json.dumps(state).encode()
    tensors[f"{stem}.weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(text), dtype=torch.uint8)
    return tensors, (NF4[codes] * largest[:, None]).view(weight.shape)


def eight_bits(weight: Tensor, stem: str) -> tuple[dict[str, Tensor], Tensor]:
    """The same with 127 for the largest of each output."""
    largest = weight.abs().amax(1)
    codes = (weight / largest[:, None] * 127).round().to(torch.int8)
    tensors = {
        f"{stem}.weight": codes,
        f"{stem}.SCB": largest,
        f"{stem}.weight_format": torch.tensor(0, dtype=torch.uint8),
    }
    return tensors, codes.float() * largest[:, None] / 127


KINDS = {"nf4": {"is_nested": False}, "nf4, nested": {"is_nested": True}, "int8": {}}


def write(source: Path, directory: Path, kind: str) -> tuple[Path, Path]:
    """A checkpoint, and its twin of floats. One projection is left out of it, as llm_int8_skip_modules does."""
    stored: dict[str, Tensor] = {}
    floats: dict[str, Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        stem = name.removesuffix(".weight")
        if not stem.endswith("_proj") or stem.endswith("layers.0.mlp.up_proj") or not name.endswith(".weight"):
            stored[name] = floats[name] = tensor
            continue
        make = eight_bits if kind == "int8" else four_bits
        tensors, floats[name] = make(tensor.float(), stem, **KINDS[kind])  # type: ignore[operator]  # by kind
        stored |= tensors
    target, twin = directory / "target", directory / "twin"
    for made, tensors in ((target, stored), (twin, floats)):
        made.mkdir()
        for path in source.glob("*.json"):
            (made / path.name).write_bytes(path.read_bytes())
        save_file(tensors, made / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    options = {"quant_method": "bitsandbytes", "load_in_8bit": kind == "int8", "load_in_4bit": kind != "int8"}
    (target / "config.json").write_text(json.dumps(config | {"quantization_config": options}))
    return target, twin


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("LlamaForCausalLM", tmp_path_factory.mktemp("llama"), intermediate_size=128)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_codes_are_served_as_the_floats_they_stand_for(llama: Path, tmp_path: Path, kind: str, world_size: int) -> None:
    driver = assert_served_as(*write(llama, tmp_path, kind), world_size=world_size)
    assert driver.facts.quantization == "bitsandbytes"
    if world_size == 1:
        held = {name for name, one in matrices(driver).items() if isinstance(one.method, QuantizedLinearMethod)}
        assert ("layers.0.attention.o_proj" in held) == (kind == "int8")
        assert "layers.0.mlp.up_proj" not in held


STEM = "model.layers.1.mlp.down_proj"


@pytest.mark.parametrize(
    ("kind", "name", "tensor", "message"),
    [
        ("nf4", f"{STEM}.weight.absmax", torch.ones(3), "3 values of absmax, must be 128 .blocks of 64."),
        (
            "nf4",
            f"{STEM}.weight.absmax",
            None,
            rf"quant_state.bitsandbytes__nf4 is there, {STEM}.weight.absmax is",
        ),
        (
            "nf4",
            f"{STEM}.weight.quant_state.bitsandbytes__nf4",
            torch.ones(3, dtype=torch.uint8),
            "is not a JSON object",
        ),
        (
            "nf4",
            f"{STEM}.weight",
            torch.ones(5, 1, dtype=torch.uint8),
            r"5 bytes for \[64, 128\] numbers, must be",
        ),
        ("nf4, nested", f"{STEM}.weight.nested_quant_map", None, "nested_quant_map or nested_offset do not tell how"),
        ("int8", f"{STEM}.weight_format", torch.tensor(2, dtype=torch.uint8), "weight_format is 2, must be 0 .row."),
        ("int8", f"{STEM}.SCB", torch.ones(5), f"{STEM}.SCB cannot be read"),
    ],
)
def test_what_does_not_fit_is_named(
    llama: Path, tmp_path: Path, kind: str, name: str, tensor: Tensor | None, message: str
) -> None:
    target, _ = write(llama, tmp_path, kind)
    tensors = load_file(target / "model.safetensors")
    del tensors[name]
    if tensor is not None:
        tensors[name] = tensor
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=message):
        Driver(target)
