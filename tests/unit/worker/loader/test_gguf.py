"""GGUF files give the log probabilities and tokens that transformers gives with the weights it makes of them."""

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from pagoda_common.config.checkpoint import translated_files
from pagoda_common.errors import ModelLoadError
from pagoda_common.gguf.file import BLOCK_TYPES
from pagoda_kernels.linear.quantized_matrix import QuantizedMatrix
from pagoda_kernels.native.library import load_native, native
from pagoda_worker.loader.formats.ggml_blocks import read_blocks
from pagoda_worker.models.quantized_method import QuantizedLinearMethod
from tests.checkpoints import make_checkpoint
from tests.unit.worker.driver import Driver
from tests.unit.worker.loader.gguf_checkpoints import HALVES, blocks, write_gguf
from tests.unit.worker.quantization.test_quantized_checkpoints import (
    PROMPT,
    TOLERANCE,
    expected_logprobs,
    matrices,
    served_logprobs,
)
from tests.unit.worker.quantization.test_scaled_checkpoints import expected_tokens, greedy

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "rms_norm_eps": 1e-5}
"""Rows of whole blocks of 256."""
QUANTIZED = [kind for number in BLOCK_TYPES if (kind := Type(number)) not in (Type.F32, Type.F16, Type.BF16)]


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(translated_files, "cache_home", lambda: tmp_path / "cache")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("LlamaForCausalLM", tmp_path_factory.mktemp("llama"), **SIZES)


def plain_tokenizer(writer: gguf.GGUFWriter) -> None:
    """A vocabulary that says nothing: these tests compare ids."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(["a", "b", "ab", *(f"t{index}" for index in range(3, 300))])
    writer.add_token_types([1] * 300)
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(257)


def write(source: Path, target: Path, kind_of: Callable[[str], Type], **options: Any) -> Path:
    return write_gguf(source, target, kind_of, write_tokenizer=plain_tokenizer, **options)


def references(file: Path) -> tuple[torch.Tensor, list[int]]:
    """Log probabilities of the prompt and greedy tokens of transformers' own reader, in float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()
    ids = list(PROMPT)
    with torch.inference_mode():
        rows = model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
        for _ in range(12):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return rows[torch.arange(len(PROMPT) - 1), torch.tensor(PROMPT[1:])], ids[len(PROMPT) :]


def assert_served_as_transformers_does(file: Path, **options: Any) -> Driver:
    driver = Driver(file, **options)
    logprobs, tokens = references(file)
    torch.testing.assert_close(served_logprobs(driver), logprobs, atol=TOLERANCE * 2, rtol=0)
    assert greedy(driver) == tokens
    return driver


def has_kernel() -> bool:
    """Whether matrices stay quantized here: without a kernel for them they become floats."""
    return load_native() and native("quantized_linear") is not None


@pytest.mark.parametrize("kind", [Type(number) for number in BLOCK_TYPES], ids=lambda kind: kind.name)
def test_each_type_is_served_as_its_numbers(llama: Path, tmp_path: Path, kind: Type) -> None:
    driver = assert_served_as_transformers_does(write(llama, tmp_path / "model.gguf", lambda name: kind))
    assert driver.facts.quantization == "gguf"
    held = isinstance(matrices(driver)["layers.1.attention.qkv_proj"].method, QuantizedLinearMethod)
    assert held == (kind in QUANTIZED and has_kernel())


@pytest.mark.parametrize("kind", QUANTIZED, ids=lambda kind: kind.name)
def test_blocks_are_what_the_package_gguf_makes_of_them(kind: Type) -> None:
    """Random bits: every scale and every number there is."""
    data = blocks(np.zeros((64, 1024), np.float32), kind, np.random.default_rng(1)) if kind in HALVES else None
    if data is None:
        values = np.random.default_rng(2).normal(size=(64, 1024)).astype(np.float32)
        data = gguf.quants.quantize(values, kind)
    expected = torch.from_numpy(gguf.quants.dequantize(data, kind))
    matrix = read_blocks(kind.name, torch.from_numpy(data.copy()), 1024)
    assert isinstance(matrix, QuantizedMatrix)
    torch.testing.assert_close(matrix.dequantize(), expected, atol=2e-6, rtol=1e-5)


def mixed(name: str) -> Type:
    """As files called Q4_K_M are."""
    if name == "output.weight" or "attn_v" in name or "ffn_down" in name:
        return Type.Q6_K
    return Type.Q4_K


def test_queries_and_values_of_different_precision_are_one_matrix(llama: Path, tmp_path: Path) -> None:
    driver = assert_served_as_transformers_does(write(llama, tmp_path / "model.gguf", mixed))
    layers = matrices(driver)
    assert all(isinstance(layer.method, QuantizedLinearMethod) is has_kernel() for layer in layers.values())
    assert not has_kernel() or driver.facts.weight_bytes < 1.2 * driver.facts.num_parameters


@pytest.mark.parametrize("kind", [mixed, lambda name: Type.Q8_0, lambda name: Type.F16], ids=["mixed", "Q8_0", "F16"])
def test_two_ranks_share_a_file(llama: Path, tmp_path: Path, kind: Callable[[str], Type]) -> None:
    assert_served_as_transformers_does(write(llama, tmp_path / "model.gguf", kind), world_size=2)


GEMMA_KEYS = {
    "gemma2.attention.sliding_window": 27,
    "gemma2.attn_logit_softcapping": 4.0,
    "gemma2.final_logit_softcapping": 9.0,
}


@pytest.mark.parametrize(
    "architecture",
    ["Gemma2ForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "MixtralForCausalLM"],
)
def test_families_are_as_the_checkpoints_they_were_made_of(architecture: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"use_sliding_window": False} if architecture.startswith("Qwen2") else {}
    if architecture == "Qwen3MoeForCausalLM":
        options["mlp_only_layers"] = []
    if architecture == "Gemma2ForCausalLM":
        options["query_pre_attn_scalar"] = 20
    source = make_checkpoint(architecture, tmp_path / "source", **options)
    metadata: dict[str, Any] = GEMMA_KEYS if architecture == "Gemma2ForCausalLM" else {}
    driver = Driver(write(source, tmp_path / "model.gguf", lambda name: Type.F32, metadata=metadata))
    torch.testing.assert_close(served_logprobs(driver), expected_logprobs(source), atol=TOLERANCE, rtol=0)
    assert greedy(driver) == expected_tokens(source)


def test_a_head_that_is_the_embedding(tmp_path: Path) -> None:
    source = make_checkpoint("LlamaForCausalLM", tmp_path / "source", tie_word_embeddings=True, **SIZES)
    file = write(source, tmp_path / "model.gguf", lambda name: Type.Q6_K)
    assert "output.weight" not in {tensor.name for tensor in gguf.GGUFReader(file).tensors}
    assert_served_as_transformers_does(file)


def test_factors_of_frequencies_are_llama_3s_rope(tmp_path: Path) -> None:
    """llama.cpp's converter writes these factors in place of the numbers that they come from."""
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    source = make_checkpoint("LlamaForCausalLM", tmp_path / "source", rope_parameters=rope)
    factors = []
    for index in range(8):  # of 16 numbers a head, as Llama 3's reference code has it
        wavelength = 2 * np.pi * 500.0 ** (index / 8)
        low, high = 32 / 1.0, 32 / 4.0
        smooth = (32 / wavelength - 1.0) / (4.0 - 1.0)
        between = 1 / ((1 - smooth) / 8.0 + smooth)
        factors.append(1.0 if wavelength < high else 8.0 if wavelength > low else between)
    assert len(set(factors)) > 3
    tensors = {"rope_freqs.weight": np.array(factors, np.float32)}
    driver = Driver(write(source, tmp_path / "model.gguf", lambda name: Type.F32, tensors=tensors))
    torch.testing.assert_close(served_logprobs(driver), expected_logprobs(source), atol=TOLERANCE, rtol=0)


def test_a_directory_with_one_file_and_the_parts_of_one(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    whole = Driver(write(llama, tmp_path / "whole" / "model.gguf", lambda name: Type.Q8_0))
    assert served_logprobs(Driver(tmp_path / "whole")).equal(served_logprobs(whole))
    reader = gguf.GGUFReader(tmp_path / "whole" / "model.gguf")
    for part, tensors in enumerate((reader.tensors[:5], reader.tensors[5:]), 1):
        writer = gguf.GGUFWriter(tmp_path / f"model-{part:05}-of-00002.gguf", "llama")
        for key, value in reader.fields.items():
            if part == 1 and key.startswith(("llama.", "tokenizer.")):
                kinds = value.types
                writer.add_key_value(key, value.contents(), kinds[0], kinds[-1] if len(kinds) > 1 else None)
        for tensor in tensors:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    parts = tmp_path / "model-00001-of-00002.gguf"
    assert served_logprobs(Driver(parts)).equal(served_logprobs(whole))
    with pytest.raises(ModelLoadError, match=r"is a later part of a model: model-00001-of-00002\.gguf is its first"):
        Driver(tmp_path / "model-00002-of-00002.gguf")
    (tmp_path / "model-00002-of-00002.gguf").unlink()
    with pytest.raises(ModelLoadError, match=r"parts of .* are missing: model-00002-of-00002\.gguf"):
        Driver(parts)


def test_integers_of_a_file_may_become_others(llama: Path, tmp_path: Path) -> None:
    file = write(llama, tmp_path / "model.gguf", lambda name: Type.Q6_K)
    driver = Driver(file, quantization="int8")
    assert driver.facts.quantization == "int8"
    torch.testing.assert_close(served_logprobs(driver), references(file)[0], atol=0.05, rtol=0)
    with pytest.raises(ModelLoadError, match=r"quantization is 'gptq', the weights of .* are quantized with gguf"):
        Driver(file, quantization="gptq")


def with_bytes(file: Path, at: int, data: bytes) -> Path:
    content = bytearray(file.read_bytes())
    content[at : at + len(data)] = data
    file.write_bytes(content)
    return file


def entry(file: Path, name: str) -> int:
    """Where the entry of a tensor stands, after its name."""
    return file.read_bytes().index(struct.pack("<Q", len(name)) + name.encode()) + 8 + len(name)


NORM = "blk.0.attn_norm.weight"


def test_bad_files_are_one_sentence(llama: Path, tmp_path: Path) -> None:
    good = write(llama, tmp_path / "good.gguf", lambda name: Type.Q4_0)
    content = good.read_bytes()

    def spoilt(name: str, at: int, data: bytes) -> Path:
        (tmp_path / name).write_bytes(content)
        return with_bytes(tmp_path / name, at, data)

    def cut(name: str, size: int) -> Path:
        (tmp_path / name).write_bytes(content[:size])
        return tmp_path / name

    place = entry(good, "blk.0.attn_q.weight")  # dimensions, sizes, type, offset
    cases = [
        (spoilt("magic.gguf", 0, b"GGML"), r"magic\.gguf is not a GGUF file: it does not begin with GGUF"),
        (spoilt("version.gguf", 4, b"\x09"), r"version\.gguf is of GGUF version 9, must be one of 2, 3"),
        (spoilt("order.gguf", 4, b"\x00\x00\x00\x03"), "its bytes are in the other order"),
        (spoilt("tensors.gguf", 8, b"\xff" * 8), "has 18446744073709551615 tensors, must be at most"),
        (spoilt("keys.gguf", 16, b"\xff" * 8), "has 18446744073709551615 metadata keys"),
        (spoilt("key.gguf", 24, b"\xff" * 8), "has a metadata key of 18446744073709551615 bytes"),
        (cut("short.gguf", 3), "ends within its first four bytes"),
        (cut("header.gguf", 200), r"header\.gguf ends within "),
        (cut("end.gguf", len(content) - 100), r"end\.gguf ends within tensor "),
        (spoilt("type.gguf", place + 20, b"\x63"), r"tensor blk\.0\.attn_q\.weight of type 99, must be one of 0 \(F32"),
        (spoilt("dims.gguf", place, b"\x09"), r"tensor blk\.0\.attn_q\.weight of 9 dimensions"),
        (
            spoilt("rows.gguf", place + 4, b"\x07\x01"),
            r"attn_q\.weight of shape \[256, 263\], must be .* of 32",
        ),
        (
            spoilt("shape.gguf", place + 12, b"\x80\x00"),
            r"attn_q\.weight has shape \[128, 256\], must be \[256",
        ),
        (cut("empty.gguf", 0), "ends within its first four bytes"),
    ]
    for path, message in cases:
        with pytest.raises(ModelLoadError, match=message):
            Driver(path)
    Driver(good)
    with pytest.raises(ModelLoadError, match=r"model '.*missing\.gguf' is not a file"):
        Driver(tmp_path / "missing.gguf")


def test_what_is_missing_or_not_finite_is_named(llama: Path, tmp_path: Path) -> None:
    file = write(llama, tmp_path / "a.gguf", lambda name: Type.Q4_0, metadata={"llama.rope.scaling.type": "su"})
    with pytest.raises(ModelLoadError, match=r"llama\.rope\.scaling\.type is 'su', must be one of none, linear, yarn"):
        Driver(file)
    file = write(llama, tmp_path / "b.gguf", lambda name: Type.Q4_0, tensors={"blk.0.other": np.ones(4, np.float32)})
    with pytest.raises(ModelLoadError, match=r"unexpected tensors: blk\.0\.other"):
        Driver(file)
    file = write(llama, tmp_path / "c.gguf", lambda name: Type.Q4_0)
    tensor = next(tensor for tensor in gguf.GGUFReader(file).tensors if tensor.name == "blk.1.ffn_up.weight")
    with_bytes(file, int(tensor.data_offset), b"\x00\x7e")
    with pytest.raises(ModelLoadError, match=r"c\.gguf: blk\.1\.ffn_up\.weight has numbers that are not finite"):
        Driver(file)
    file = write(llama, tmp_path / "d.gguf", lambda name: Type.Q4_0)
    with_bytes(file, file.read_bytes().index(b"general.architecture") + 32, b"lxama")
    with pytest.raises(ModelLoadError, match=r"general\.architecture 'lxama', must be one of llama"):
        Driver(file)
