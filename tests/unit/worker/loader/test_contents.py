"""The content of files under the model's names: what is dropped, renamed or refused before anything is read."""

import json
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from pagoda_common.config.engine_config import ModelConfig
from pagoda_common.errors import ModelLoadError
from pagoda_common.gguf.file import GgufTensor
from pagoda_kernels.linear.quantized_matrix import QuantizedMatrix
from pagoda_worker.loader import checkpoint as checkpoint_module
from pagoda_worker.loader.build import FAULTS, ModelBuilder
from pagoda_worker.loader.checkpoint import HUB_PATTERNS, open_checkpoint
from pagoda_worker.loader.formats.gptq_awq import Gptq
from pagoda_worker.loader.formats.stored_format import StoredFormat
from pagoda_worker.loader.gguf_file import GgufMatrix, gguf_matrices
from pagoda_worker.loader.mistral_tensors import mistral_tensors
from pagoda_worker.loader.model_weights import _check_same, stored_quantization
from pagoda_worker.loader.stored import StoredMatrix, StoredTensor, drop_empty_biases, join_quantized
from pagoda_worker.loader.tensor_file import TensorFile
from pagoda_worker.models.weights import WeightSource
from pagoda_worker.parallel.tensor_parallel import TensorParallel


def nowhere(name: str, shape: list[int], dtype: str = "F32") -> StoredTensor:
    return StoredTensor(cast("Any", None), name, shape, dtype)


# GGUF.


def gguf_of(*tensors: tuple[str, tuple[int, ...]], architecture: str = "llama", **keys: int) -> Any:
    """A file that was opened."""
    found = {
        name: SimpleNamespace(name=name, shape=shape, num_bytes=4 * torch.Size(shape).numel(), offset=0)
        for name, shape in tensors
    }
    metadata: dict[str, Any] = {"general.architecture": architecture, f"{architecture}.attention.head_count": 4}
    metadata |= {f"{architecture}.attention.{name}": value for name, value in keys.items()}
    return SimpleNamespace(file=SimpleNamespace(metadata=metadata, tensors=found, path=Path("model.gguf")))


def test_rows_of_queries_and_keys_are_reordered_by_their_own_heads() -> None:
    names = ("attn_q", "attn_k", "attn_v", "attn_output")
    opened = gguf_of(*((f"blk.0.{name}.weight", (16, 8)) for name in names), head_count_kv=2)
    found = {matrix.stored_name.split(".")[2]: matrix.num_heads for matrix in gguf_matrices([opened]).values()}
    assert found == {"attn_q": 4, "attn_k": 2, "attn_v": 0, "attn_output": 0}
    (only,) = gguf_matrices([gguf_of(("blk.0.attn_k.weight", (16, 8)))]).values()
    assert only.num_heads == 4, "as many as queries, where no other number is given"


@pytest.mark.parametrize(("rows", "fits"), [(8, True), (16, True), (12, False), (4, False)])
def test_queries_are_pairs_of_rows_of_each_head(rows: int, fits: bool) -> None:
    opened = gguf_of(("blk.0.attn_q.weight", (rows, 8)))
    if fits:
        assert len(gguf_matrices([opened])) == 1
        return
    with pytest.raises(ModelLoadError) as error:
        gguf_matrices([opened])
    assert str(error.value) == (
        f"model.gguf: blk.0.attn_q.weight has {rows} rows, must be a multiple of twice its 4 heads"
    )


def test_a_tensor_of_two_files_is_refused() -> None:
    opened = gguf_of(("blk.0.attn_v.weight", (16, 8)))
    with pytest.raises(ModelLoadError, match=r"^model\.gguf: blk\.0\.attn_v\.weight is there twice$"):
        gguf_matrices([opened, opened])


def test_an_expert_is_its_part_of_a_stacked_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.arange(24.0).view(3, 4, 2)
    path = tmp_path / "data"
    path.write_bytes(b"xxxx" + values.numpy().tobytes())
    kind = SimpleNamespace(name="F32")
    tensor = cast("GgufTensor", SimpleNamespace(name="t", shape=(3, 4, 2), num_bytes=96, offset=4, type=kind))
    with path.open("rb") as file:
        weights: Any = SimpleNamespace(descriptor=file.fileno(), file=SimpleNamespace(path=path))
        for index in range(3):
            matrix = GgufMatrix(weights=weights, tensor=tensor, index=index)
            assert (matrix.shape, matrix.num_bytes) == ([4, 2], 32)
            assert torch.equal(cast("Tensor", matrix.read()), values[index])
        matrix = GgufMatrix(weights=weights, tensor=tensor, index=1, num_heads=1, offset=1.0)
        assert cast("Tensor", matrix.read())[:, 0].tolist() == [7, 11, 9, 13], "pairs to halves, less the offset"


# safetensors.


def test_biases_of_mistral_s_queries_and_keys_are_reordered_too(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"head_dim": 4}')
    kinds = [f"layers.0.attention.w{part}.{leaf}" for part in "qkvo" for leaf in ("weight", "bias")]
    renamed = mistral_tensors({name: nowhere(name, [8, 2]) for name in kinds}, tmp_path)
    assert [tensor.paired_rows for tensor in renamed.values()] == [4, 4, 4, 4, 0, 0, 0, 0]


def test_a_bias_of_zeros_is_dropped_where_the_model_has_none(tmp_path: Path) -> None:
    tensors = {"a.bias": torch.zeros(2), "b.bias": torch.tensor([0.0, 1.0]), "c.bias": torch.zeros(2)}
    save_file(tensors, tmp_path / "x.safetensors")
    sources = [WeightSource(name=name, parameter="p") for name in ("a.weight", "b.weight", "c.weight", "c.bias")]
    with TensorFile(tmp_path / "x.safetensors") as file:
        found: dict[str, Any] = {name: StoredTensor(file, name, [2], "F32") for name in tensors}
        drop_empty_biases(found, sources)
    assert sorted(found) == ["b.bias", "c.bias"], "one has numbers, and one is the model's own"


def test_tensors_of_a_matrix_are_joined_and_scales_of_activations_are_left_out() -> None:
    class Format(Gptq):
        def of(self, name: str) -> StoredFormat:
            return other if name == "b.weight" else self

    other, names = Gptq({"bits": 8}), ["a.qweight", "a.scales", "a.qzeros"]
    stored = {name: nowhere(name, [4, 4]) for name in [*names, *(name.replace("a.", "b.") for name in names), "c.x"]}
    made = Format({"bits": 4})
    joined = join_quantized(stored, made)
    assert sorted(joined) == ["a.weight", "b.weight", "c.x"]
    a, b = joined["a.weight"], joined["b.weight"]
    assert isinstance(a, StoredMatrix)
    assert isinstance(b, StoredMatrix)
    assert (a.format, b.format, a.stored_name) == (made, other, "a.qweight")
    assert {leaf: tensor.stored_name for leaf, tensor in b.parts.items()} == {
        leaf: f"b.{leaf}" for leaf in ("qweight", "scales", "qzeros")
    }


@pytest.mark.parametrize("error", [ModelLoadError("no"), RuntimeError("no"), IndexError("no"), ValueError("no")])
def test_a_matrix_that_cannot_be_read_is_named(error: Exception) -> None:
    class Format(StoredFormat):
        def read(self, tensors: Any) -> QuantizedMatrix | Tensor:
            raise error

    matrix = StoredMatrix(format=Format(), stored_name="a.weight", parts={})
    for read in (matrix.read, matrix.read_scaled):
        with pytest.raises(ModelLoadError, match=r"^a\.weight cannot be read: no$"):
            read()


def test_what_is_no_matrix_is_named_with_its_shapes() -> None:
    parts = {"qweight": nowhere("a.qweight", [4]), "scales": nowhere("a.scales", [1, 2])}
    matrix = StoredMatrix(format=Gptq({"bits": 4}), stored_name="a.qweight", parts=parts)
    with pytest.raises(ModelLoadError, match=r"^a\.qweight is not a matrix: qweight \[4\], scales \[1, 2\]$"):
        _ = matrix.shape


# The checkpoint.


@pytest.mark.parametrize(
    ("load_format", "name", "is_fetched"),
    [
        *(("auto", name, True) for name in ("generation_config.json", "tokenizer.json", "tokenizer.model", "a.jinja")),
        *(("auto", name, True) for name in ("colbert_linear.pt", "sparse_linear.pt", "2_Dense/pytorch_model.bin")),
        *(("auto", name, True) for name in ("model-00001-of-00002.safetensors", "2_Dense/model.safetensors")),
        *(("auto", name, False) for name in ("pytorch_model.bin", "model.pt", "tf_model.h5", "README.md")),
        *(("dummy", name, True) for name in ("config.json", "modules.json", "sentence_bert_config.json")),
        *(("dummy", name, True) for name in ("1_Pooling/config.json", "2_Dense/config.json")),
        *(("dummy", name, False) for name in ("model.safetensors", "tokenizer.json", "sparse_linear.pt")),
    ],
)
def test_files_of_a_model_on_the_hub(
    load_format: Any, name: str, is_fetched: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[list[str]] = []

    def fetch(model: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        given.append(allow_patterns)
        (tmp_path / "config.json").write_text("{}")
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    monkeypatch.setattr(checkpoint_module, "resolve_model", lambda name: name)
    open_checkpoint(ModelConfig(model="org/model", load_format=load_format))
    assert given[0] == HUB_PATTERNS or load_format == "dummy"
    assert any(fnmatch(name, pattern) for pattern in given[0]) is is_fetched


def test_what_the_operator_says_of_a_config_goes_before_the_file_and_is_bounded_too(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 64, "eos_token_id": 1}))
    found = open_checkpoint(ModelConfig(model=str(tmp_path), hf_overrides='{"hidden_size": 32}'))
    assert found.config == {"hidden_size": 32, "eos_token_id": 1}
    with pytest.raises(ModelLoadError, match=r"^hidden_size is 1000000000 in config\.json, must be at most"):
        open_checkpoint(ModelConfig(model=str(tmp_path), hf_overrides='{"hidden_size": 1000000000}'))


def test_a_generation_config_is_kept_as_it_stands_and_must_be_an_object(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    text = '{ "temperature":0.5,\n "eos_token_id": [7] }'
    (tmp_path / "generation_config.json").write_text(text)
    found = open_checkpoint(ModelConfig(model=str(tmp_path)))
    assert (found.generation_config_json, found.generation_config) == (text, json.loads(text))
    (tmp_path / "generation_config.json").write_text("[]")
    with pytest.raises(ModelLoadError, match=r"generation_config\.json must hold a JSON object, got list$"):
        open_checkpoint(ModelConfig(model=str(tmp_path)))


# What a checkpoint is of.


def model_of(architecture: str = "A", **identity: Any) -> Any:
    return SimpleNamespace(architecture=architecture, identity=identity)


@pytest.mark.parametrize(
    ("theirs", "message", "field"),
    [
        (model_of("B", size=4), "architecture is 'B', the served one has 'A'", "architecture"),
        (model_of(size=5), "size is 5, the served one has 4", "size"),
        (model_of(), "size is None, the served one has 4", "size"),
        (model_of(size=4, more=1), "more is 1, the served one has None", "more"),
        (model_of(size="x" * 300), f"size is '{'x' * 199}…, the served one has 4", "size"),
    ],
)
def test_weights_of_another_model_are_told_apart(theirs: Any, message: str, field: str) -> None:
    checkpoint: Any = SimpleNamespace(directory="/m")
    _check_same(model_of(size=4), model_of(size=4), checkpoint)
    with pytest.raises(ModelLoadError) as error:
        _check_same(theirs, model_of(size=4), checkpoint)
    assert (str(error.value), error.value.field) == (f"/m is of another model: {message}", field)


FLOAT8, INT4 = {"quant_method": "fp8"}, {"quant_method": "gptq", "bits": 4}


@pytest.mark.parametrize(
    ("asked", "config", "method"),
    [
        (None, {}, None),
        (None, FLOAT8, "fp8"),
        ("fp8", FLOAT8, "fp8"),
        ("gptq", INT4, "gptq"),
        ("int8", {}, None),
        ("int8", FLOAT8, "fp8"),
        ("int8", {"quant_method": "gguf"}, "gguf"),
        ("int8", INT4, "quantized with gptq already"),
        ("gptq", FLOAT8, "quantized with fp8 already"),
        ("gptq", {}, "floats"),
    ],
)
def test_a_quantization_that_is_asked_for_fits_the_files(
    asked: str | None, config: dict[str, Any], method: str | None
) -> None:
    checkpoint: Any = SimpleNamespace(directory="/m", config={"quantization_config": config})
    if method not in (None, "fp8", "gptq", "gguf"):
        with pytest.raises(ModelLoadError) as error:
            stored_quantization(ModelConfig(quantization=asked), checkpoint)
        assert str(error.value) == f"quantization is {asked!r}, the weights of /m are {method}"
        assert error.value.field == "quantization"
        return
    found = stored_quantization(ModelConfig(quantization=asked), checkpoint)
    assert (None if found is None else found[0]) == method


@pytest.mark.parametrize("kind", FAULTS)
def test_whatever_a_config_makes_fail_is_one_line(kind: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: Any) -> None:
        raise kind("odd\nand more")

    monkeypatch.setattr("pagoda_worker.loader.build.factory_of", lambda config: fail)
    builder = ModelBuilder(config=cast("Any", None), parallel=TensorParallel())
    with pytest.raises(
        ModelLoadError, match=f"^cannot build a model from config.json: {kind.__name__}: '?odd"
    ) as error:
        builder.build()
    assert "\n" not in str(error.value)


def test_the_whole_model_is_built_for_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[tuple[int, int]] = []

    def build(*, config: Any, parallel: TensorParallel) -> Any:
        built.append((parallel.rank, parallel.world_size))
        return torch.empty(1)

    monkeypatch.setattr("pagoda_worker.loader.build.factory_of", lambda config: build)
    builder = ModelBuilder(config=cast("Any", None), parallel=TensorParallel(rank=1, world_size=2))
    part = builder.build()
    assert cast("Tensor", part).is_meta
    assert builder.build_whole(part) is not part
    alone = ModelBuilder(config=cast("Any", None), parallel=TensorParallel())
    assert alone.build_whole(part) is part
    assert built == [(1, 2), (0, 1)]
