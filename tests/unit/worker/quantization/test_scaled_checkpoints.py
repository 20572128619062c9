"""FP8 and int8 checkpoints give the log probabilities and tokens of the floats that their numbers stand for."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagoda_common.errors import ModelLoadError
from pagoda_common.params.sampling_params import SamplingParams
from pagoda_worker.models.quantized_method import QuantizedLinearMethod
from tests.checkpoints import make_checkpoint
from tests.unit.worker.driver import Driver
from tests.unit.worker.quantization.scaled_checkpoints import Scheme, compressed, write_scaled
from tests.unit.worker.quantization.test_quantized_checkpoints import (
    PROMPT,
    TOLERANCE,
    expected_logprobs,
    matrices,
    served_logprobs,
)

DEEPSEEK = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [24, 40]}
"""Blocks that end neither at the shards of two ranks nor at the projections' own ends."""


def groups(form: str, **schemes: Any) -> dict[str, Any]:
    """quantization_config of compressed-tensors."""
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": schemes,
        "ignore": ["lm_head"],
    }


def activation_scale() -> torch.Tensor:
    return torch.tensor(0.037)


BLOCKS = Scheme(config=DEEPSEEK, rows=24, columns=40, scale="weight_scale_inv")
PER_TENSOR = Scheme(
    config={"quant_method": "fp8", "activation_scheme": "static"},
    is_flat=True,
    extra={"input_scale": activation_scale, "k_scale": activation_scale},
)
PER_CHANNEL = Scheme(
    config=groups("float-quantized", group_0=compressed("float", "channel")), rows=1, scale_dtype=torch.bfloat16
)
STATIC = Scheme(
    config=groups("float-quantized", group_0=compressed("float", "tensor", activations=False)),
    extra={"input_scale": activation_scale},
)
W8A8 = Scheme(config=groups("int-quantized", group_0=compressed("int", "channel")), kind="int8", rows=1)
SCHEMES = {
    "blocks": BLOCKS,
    "blocks of powers of two": Scheme(
        config=DEEPSEEK | {"scale_fmt": "ue8m0"},
        rows=24,
        columns=40,
        scale="weight_scale_inv",
        scale_dtype=torch.float8_e8m0fnu,
    ),
    "per tensor": PER_TENSOR,
    "Mistral's names": Scheme(
        config={"quant_method": "fp8"},
        is_flat=True,
        scale="qscale_weight",
        extra={"qscale_act": activation_scale},
    ),
    "ModelOpt": Scheme(
        config={"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_scheme": {"num_bits": 8, "type": "float"}},
        is_flat=True,
        extra={"input_scale": activation_scale, "k_scale": activation_scale, "v_scale": activation_scale},
    ),
    "FBGEMM": Scheme(
        config={"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
        rows=1,
        extra={"input_scale_ub": activation_scale},
    ),
    "channel": PER_CHANNEL,
    "tensor, static": STATIC,
    "blocks of compressed-tensors": Scheme(
        config=groups("float-quantized", group_0=compressed("float", "block", block_structure=[24, 40])),
        rows=24,
        columns=40,
    ),
    "w8a8": W8A8,
    "w8a8, zero points": Scheme(
        config=groups("int-quantized", group_0=compressed("int", "channel", symmetric=False)),
        kind="int8",
        rows=1,
        has_zeros=True,
    ),
    "w8a8, static": Scheme(
        config=groups("int-quantized", group_0=compressed("int", "tensor", activations=False)),
        kind="int8",
        extra={"input_scale": activation_scale, "input_zero_point": lambda: torch.tensor(3, dtype=torch.int8)},
    ),
    "w8a16, groups": Scheme(
        config=groups("int-quantized", group_0=compressed("int", "group", group_size=32, activations=None)),
        kind="int8",
        rows=1,
        columns=32,
    ),
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("LlamaForCausalLM", tmp_path_factory.mktemp("llama"), intermediate_size=128)


def write(source: Path, directory: Path, scheme: Scheme) -> tuple[Path, Path]:
    """A checkpoint with all its projections of one scheme, and its twin."""
    target, twin = directory / "target", directory / "twin"
    write_scaled(source, target, twin, lambda name: scheme, scheme.config)
    return target, twin


def greedy(driver: Driver) -> list[int]:
    (sequence,) = driver.generate([PROMPT], SamplingParams(temperature=0, max_tokens=12), max_tokens=12)
    return sequence.output


def expected_tokens(directory: Path) -> list[int]:
    """Greedy ones of transformers, in float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    ids = list(PROMPT)
    with torch.inference_mode():
        for _ in range(12):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(PROMPT) :]


def assert_served_as(target: Path, twin: Path, **options: Any) -> Driver:
    driver = Driver(target, **options)
    torch.testing.assert_close(served_logprobs(driver), expected_logprobs(twin), atol=TOLERANCE, rtol=0)
    assert greedy(driver) == expected_tokens(twin)
    return driver


@pytest.mark.parametrize("name", SCHEMES)
def test_numbers_times_their_scales_are_served(llama: Path, tmp_path: Path, name: str) -> None:
    scheme = SCHEMES[name]
    driver = assert_served_as(*write(llama, tmp_path, scheme))
    assert driver.facts.quantization == scheme.config["quant_method"]
    is_held = isinstance(matrices(driver)["layers.1.attention.qkv_proj"].method, QuantizedLinearMethod)
    assert is_held == (scheme.kind == "int8")


@pytest.mark.parametrize("name", ["blocks", "per tensor", "channel", "w8a8", "w8a8, zero points"])
def test_two_ranks_share_them(llama: Path, tmp_path: Path, name: str) -> None:
    driver = assert_served_as(*write(llama, tmp_path, SCHEMES[name]), world_size=2)
    layers = [module for worker in driver.worker.workers for module in worker._model.modules()]
    held = [layer.prefix for layer in layers if isinstance(getattr(layer, "method", None), QuantizedLinearMethod)]
    assert len(held) == (2 * 3 * 4 if SCHEMES[name].kind == "int8" else 0)


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("Qwen3ForCausalLM", {}),
        ("Phi3ForCausalLM", {}),  # stored as qkv_proj and gate_up_proj
        ("MixtralForCausalLM", {}),
        ("Qwen3MoeForCausalLM", {"model_impl": "transformers"}),
        ("Qwen3MoeForCausalLM", {}),
    ],
)
def test_fused_projections_and_experts(architecture: str, options: dict[str, Any], tmp_path: Path) -> None:
    source = make_checkpoint(architecture, tmp_path / "source")
    assert_served_as(*write(source, tmp_path, BLOCKS), **options)


@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        ("DeepseekV3ForCausalLM", "blocks"),
        ("DeepseekV3ForCausalLM", "w8a8"),
        ("DeepseekV3ForCausalLM", "channel"),
        ("DeepseekV2ForCausalLM", "blocks"),
        ("MiniCPM3ForCausalLM", "w8a8"),
        ("Qwen3MoeForCausalLM", "blocks"),
        ("Qwen3MoeForCausalLM", "w8a8"),
        ("Qwen3MoeForCausalLM", "channel"),
        ("Glm4MoeForCausalLM", "blocks"),
        ("MiniMaxM2ForCausalLM", "blocks"),
        ("Llama4ForCausalLM", "channel"),
        ("Qwen3NextForCausalLM", "blocks"),
    ],
)
def test_two_ranks_share_latents_and_experts(architecture: str, name: str, tmp_path: Path) -> None:
    """The border between ranks is inside of blocks of 24 x 40."""
    target, twin = write(make_checkpoint(architecture, tmp_path / "source"), tmp_path, SCHEMES[name])
    driver = assert_served_as(target, twin, world_size=2)
    assert greedy(driver) == greedy(Driver(target))


def test_layers_have_schemes_of_their_own(llama: Path, tmp_path: Path) -> None:
    """By name, by pattern, by class, in this order; what is ignored stays floats."""
    named = compressed("int", "channel") | {"format": "int-quantized", "targets": ["model.layers.1.mlp.down_proj"]}
    pattern = compressed("float", "channel") | {"format": "float-quantized", "targets": ["re:.*mlp.*"]}
    others = compressed("int", "group", group_size=32, activations=None) | {"format": "int-quantized"}
    config = groups("mixed-precision", a=others, b=pattern, c=named)
    config["ignore"] += ["re:.*layers.2.*"]

    def scheme_of(name: str) -> Scheme | None:
        if ".layers.2." in name:
            return None
        if name == "model.layers.1.mlp.down_proj":
            return W8A8
        return PER_CHANNEL if ".mlp." in name else SCHEMES["w8a16, groups"]

    write_scaled(llama, tmp_path / "target", tmp_path / "twin", scheme_of, config)
    driver = assert_served_as(tmp_path / "target", tmp_path / "twin")
    held = {name for name, layer in matrices(driver).items() if isinstance(layer.method, QuantizedLinearMethod)}
    attention = {f"layers.{layer}.attention.{part}" for layer in (0, 1) for part in ("qkv_proj", "o_proj")}
    assert held == attention | {"layers.1.mlp.down_proj"}


def test_fp8_may_be_held_as_integers(llama: Path, tmp_path: Path) -> None:
    target, twin = write(llama, tmp_path, BLOCKS)
    driver = Driver(target, quantization="int8")
    assert driver.facts.quantization == "int8"
    same = served_logprobs(Driver(twin, quantization="int8"))
    torch.testing.assert_close(served_logprobs(driver), same, atol=TOLERANCE, rtol=0)
    assert isinstance(matrices(driver)["layers.1.mlp.down_proj"].method, QuantizedLinearMethod)


def respoilt(directory: Path, name: str, tensor: torch.Tensor | None) -> None:
    """Change or leave out one tensor."""
    tensors = load_file(directory / "model.safetensors")
    if tensor is None:
        del tensors[name]
    else:
        tensors[name] = tensor
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


DOWN = "model.layers.0.mlp.down_proj"


@pytest.mark.parametrize(
    ("scheme", "name", "tensor", "message"),
    [
        (
            BLOCKS,
            f"{DOWN}.weight_scale_inv",
            torch.ones(2, 4),
            rf"{DOWN}.weight cannot be read: scales are \[2, 4\], must be \[3, 4\] for \[64, 128\] in blocks of "
            r"\[24, 40\]",
        ),
        (BLOCKS, f"{DOWN}.weight_scale_inv", None, rf"{DOWN}.weight is F8_E4M3 without the scale"),
        (PER_TENSOR, f"{DOWN}.weight_scale", torch.ones(3), rf"{DOWN}.weight cannot be read: scales are \[3\]"),
        (PER_TENSOR, f"{DOWN}.weight", torch.ones(64, 128), rf"{DOWN}.weight cannot be read: data type is float32"),
        (PER_CHANNEL, f"{DOWN}.weight_scale", torch.ones(63, 1), r"scales are \[63, 1\], must be one, or one for each"),
        (W8A8, f"{DOWN}.weight", torch.ones(64, 128), "data type is float32, must be int8"),
        (W8A8, f"{DOWN}.weight", torch.ones(64, 120, dtype=torch.int8), r"has shape \[64, 120\], must be \[64, 128\]"),
    ],
)
def test_what_does_not_fit_is_named(
    llama: Path, tmp_path: Path, scheme: Scheme, name: str, tensor: torch.Tensor | None, message: str
) -> None:
    target, _ = write(llama, tmp_path, scheme)
    respoilt(target, name, tensor)
    with pytest.raises(ModelLoadError, match=message):
        Driver(target)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"weight_block_size is \[128\], must be two numbers"),
        ({"quant_method": "fp8", "weight_block_size": [0, 1]}, r"weight_block_size is \[0, 1\], must be two numbers"),
        ({"quant_method": "fp8", "fmt": "e3m4"}, "fmt is 'e3m4'"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_algo is 'NVFP4', must be one of 'FP8'"),
        (groups("float-quantized", a=compressed("float", "channel", num_bits=4)), "weights.num_bits is 4"),
        (groups("float-quantized", a={"weights": None}), "config_groups.a.weights is None, must be an object"),
        (groups("mixed-precision", a=compressed("int", "channel")), "config_groups.a.format is 'mixed-precision'"),
        (
            groups("int-quantized", a=compressed("int", "channel") | {"targets": ["re:.*mlp.*"]}),
            "k_proj.weight is quantized, but no target of quantization_config.config_groups fits it",
        ),
    ],
)
def test_what_config_says_wrongly_is_named(llama: Path, tmp_path: Path, config: dict[str, Any], message: str) -> None:
    target, _ = write(llama, tmp_path, W8A8)
    written = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(written | {"quantization_config": config}))
    with pytest.raises(ModelLoadError, match=message):
        Driver(target)
