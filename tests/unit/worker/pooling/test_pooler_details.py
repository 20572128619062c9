"""What few checkpoints say of pooling: activations, lengths in other files, heads of files, tasks that are left out."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from pagoda_common.config.pooler_config import PoolerConfig, PoolingType
from pagoda_common.errors import ModelLoadError
from pagoda_worker.models.hf_config import HfConfig
from pagoda_worker.models.model import Head, PoolingHeads
from pagoda_worker.pooling import make_pooler as module
from pagoda_worker.pooling.dense import Dense, load_dense, read_tensors
from pagoda_worker.pooling.make_pooler import make_pooler
from pagoda_worker.pooling.pooler import Pooler
from pagoda_worker.pooling.pooling_files import NO_FILES, DenseFile, PoolingFiles, read_pooling_files

CPU = torch.device("cpu")


class Heads(PoolingHeads):
    """A model with heads, as far as a pooler is made of it."""

    embedding_size = 4
    vocab_size = 30
    label_pooling: PoolingType = "cls"

    def __init__(self, head: Head, num_labels: int = 0) -> None:
        self.head, self.num_labels = head, num_labels

    def classify(self, pooled: torch.Tensor) -> torch.Tensor:
        return pooled

    def classify_tokens(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


def make(
    model: Any, directory: Path, files: PoolingFiles = NO_FILES, *, weights: tuple[Path, ...] = (), **given: Any
) -> Pooler:
    asked = PoolerConfig(**given.pop("asked", {}))
    return make_pooler(
        model=model,
        files=files,
        asked=asked,
        checkpoint=HfConfig({"architectures": ["A"], **given}),
        directory=directory,
        weight_files=weights,
        device=CPU,
    )


# Files.


@pytest.mark.parametrize(
    ("name", "activation"),
    [
        ("torch.nn.modules.linear.Identity", ""),
        ("torch.nn.modules.activation.Tanh", "tanh"),
        ("torch.nn.modules.activation.ReLU", "relu"),
        ("torch.nn.GELU", "gelu"),
        ("SiLU", "silu"),
        (None, ""),
    ],
)
def test_activations_of_a_matrix_by_their_classes(name: str | None, activation: str, tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text(json.dumps([{"type": "x.Dense", "path": "d"}]))
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "config.json").write_text(json.dumps({"activation_function": name}))
    assert read_pooling_files(tmp_path).denses == (DenseFile(tmp_path / "d", activation),)


@pytest.mark.parametrize(("activation", "expected"), [("", -1.0), ("gelu", -0.1587), ("relu", 0.0)])
def test_a_matrix_computes_its_activation(activation: str, expected: float) -> None:
    dense = Dense(weight=torch.tensor([[1.0, -1.0]]), bias=None, activation=activation)
    assert float(dense(torch.tensor([[1.0, 2.0]]))) == pytest.approx(expected, abs=1e-4)


FAMILIES = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_has_a_file_of_its_length(family: str, tmp_path: Path) -> None:
    (tmp_path / f"sentence_{family}_config.json").write_text('{"max_seq_length": 77}')
    assert read_pooling_files(tmp_path).max_seq_length == 77
    (tmp_path / "modules.json").write_text("[]")
    assert read_pooling_files(tmp_path).max_seq_length == 77
    (tmp_path / f"sentence_{family}_config.json").write_text("{")
    with pytest.raises(ModelLoadError, match=rf"^cannot read .*sentence_{family}_config\.json: "):
        read_pooling_files(tmp_path)


def test_the_first_of_several_lengths_counts(tmp_path: Path) -> None:
    for length, family in enumerate(FAMILIES, start=1):
        (tmp_path / f"sentence_{family}_config.json").write_text(json.dumps({"max_seq_length": length}))
    assert read_pooling_files(tmp_path).max_seq_length == 1


def test_a_pooling_that_names_nothing_leaves_it_open(tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text(json.dumps([{"type": "x.Pooling", "path": "1_Pooling"}]))
    files = read_pooling_files(tmp_path)
    assert (files.poolings, files.has_pooling, files.normalizes) == ((), True, False)


def test_one_module_may_stand_alone(tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text(json.dumps({"type": "x.Normalize", "path": None}))
    assert read_pooling_files(tmp_path) == PoolingFiles(has_modules=True, normalizes=True)


def test_weights_of_a_matrix_have_their_bias_and_the_safe_file_goes_first(tmp_path: Path) -> None:
    safe, pickled = tmp_path / "model.safetensors", tmp_path / "pytorch_model.bin"
    torch.save({"linear.weight": torch.full((1, 2), 2.0), "linear.bias": torch.ones(1)}, pickled)
    dense = load_dense(DenseFile(tmp_path, ""))
    assert dense.bias is not None
    assert (dense.weight.tolist(), dense.bias.tolist(), dense._is_norm) == ([[2, 2]], [1], False)
    save_file({"linear.weight": torch.ones(1, 2), "norm.weight": torch.ones(2), "norm.bias": torch.zeros(2)}, safe)
    assert read_tensors(safe, pickled)["linear.weight"].tolist() == [[1, 1]]
    assert load_dense(DenseFile(tmp_path, "")).bias is None
    norm = load_dense(DenseFile(tmp_path, "", is_norm=True))
    assert norm.bias is not None
    assert (norm.bias.tolist(), norm._is_norm) == ([0, 0], True)
    moved = dense.to(torch.device("meta"))
    assert moved.bias is not None
    assert moved.weight.is_meta
    assert moved.bias.is_meta


# Heads.


@pytest.mark.parametrize(
    ("tied", "names", "expected"),
    [
        (False, ("lm_head.weight", "model.embed_tokens.weight"), 0),
        (True, ("lm_head.weight", "model.embed_tokens.weight"), 1),
        (False, ("transformer.wte.weight", "model.embed_tokens.weight"), 1),
        (True, ("lm_head.weight", "transformer.wte.weight"), 1),
        (True, ("transformer.wte.weight", "model.embed_tokens.weight"), 1),
        (False, ("transformer.wte.weight",), None),
    ],
)
def test_rows_of_a_head_of_tokens_are_those_of_its_matrix(
    tied: bool, names: tuple[str, ...], expected: int | None, tmp_path: Path
) -> None:
    """In any file: the name decides."""
    files = []
    for number, name in enumerate(names):
        files.append(tmp_path / f"{number}.safetensors")
        save_file({name: torch.arange(6.0).view(3, 2) + 100 * number}, files[-1])
    if expected is None:
        with pytest.raises(ModelLoadError, match="needs the matrix lm_head"):
            module._rows([2], files, tied=tied)
        return
    rows = module._rows([2, 0], [*reversed(files)], tied=tied)
    assert rows.tolist() == [[4 + 100 * expected, 5 + 100 * expected], [100 * expected, 1 + 100 * expected]]


def test_a_head_of_tokens_makes_labels(tmp_path: Path) -> None:
    save_file({"lm_head.weight": torch.arange(12.0).view(3, 4).half()}, tmp_path / "a.safetensors")
    model, weights = Heads("none"), (tmp_path / "a.safetensors",)
    two = make(model, tmp_path, weights=weights, classifier_from_token=[0, 2])
    assert (two.spec.tasks, two.spec.labels) == (("classify", "score", "token_classify"), ("LABEL_0",))
    assert two.spec.activation == "sigmoid"
    assert two._classifier is not None
    assert (two._classifier.weight.tolist(), two._classifier.weight.dtype) == ([[8, 8, 8, 8]], torch.float32)
    three = make(model, tmp_path, weights=weights, classifier_from_token=[0, 1, 2], id2label={"1": "b"})
    assert (three.spec.tasks, three.spec.activation) == (("classify", "token_classify"), "softmax")
    assert three.spec.labels == ("LABEL_0", "b", "LABEL_2")


@pytest.mark.parametrize(
    ("head", "num_labels", "is_sparse", "num_values"),
    [("none", 0, False, 4), ("sequence", 2, False, 4), ("token", 3, False, 4), ("vocabulary", 0, True, 30)],
)
def test_a_spec_is_that_of_the_models_head(
    head: Head, num_labels: int, is_sparse: bool, num_values: int, tmp_path: Path
) -> None:
    model = Heads(head, num_labels)
    pooler = make(model, tmp_path, PoolingFiles(sparse_sums=True), bos_token_id=3, eos_token_id=[4])
    spec = pooler.spec
    assert pooler._heads is model
    assert (spec.is_sparse, spec.sparse_sums, spec.num_values) == (is_sparse, True, num_values)
    assert (spec.labels, spec.poolings) == (tuple(f"LABEL_{n}" for n in range(num_labels)), ("cls",))
    assert (spec.lexical_ends, spec.unserved_tasks) == ((3, None), ())
    assert make(model, tmp_path, bos_token_id=None, eos_token_id=4).spec.lexical_ends == (None, 4)


def test_tasks_that_are_left_out_are_known(tmp_path: Path) -> None:
    spec = make(Heads("sequence", 1), tmp_path, asked={"task": "score"}).spec
    assert (spec.tasks, spec.unserved_tasks) == (("score",), ("classify", "token_classify"))
    with pytest.raises(ModelLoadError, match="has task 'embed', the checkpoint is made for classify, score, token_cl"):
        make(Heads("sequence", 1), tmp_path, asked={"task": "embed"})


def dense_file(directory: Path, number: int, rows: int, columns: int) -> DenseFile:
    (directory / str(number)).mkdir()
    save_file({"linear.weight": torch.ones(rows, columns)}, directory / str(number) / "model.safetensors")
    return DenseFile(directory / str(number), "")


def test_matrices_after_a_pooling_fit_each_other(tmp_path: Path) -> None:
    both = (dense_file(tmp_path, 0, 6, 8), dense_file(tmp_path, 1, 3, 6))
    pooler = make(Heads("none"), tmp_path, PoolingFiles(poolings=("cls", "mean"), denses=both))
    assert (pooler.spec.num_values, [dense.out_features for dense in pooler._denses]) == (3, [6, 3])
    of_tokens = (dense_file(tmp_path, 2, 5, 4),)
    assert make(Heads("none"), tmp_path, PoolingFiles(poolings=("cls", "mean"), denses=of_tokens)).spec.num_values == 5
    with pytest.raises(ModelLoadError, match=r"^modules\.json has a Dense of 6 inputs, the pooling gives 8$"):
        make(Heads("none"), tmp_path, PoolingFiles(poolings=("cls", "mean"), denses=both[1:]))
    with pytest.raises(ModelLoadError, match=r"^modules\.json has a Dense of 8 inputs, the pooling gives 6$"):
        make(Heads("none"), tmp_path, PoolingFiles(poolings=("cls", "mean"), denses=(both[0], both[0])))


def test_heads_of_bge_m3_are_read_beside_a_model_without_another(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(1, 4), "bias": torch.ones(1)}, tmp_path / "sparse_linear.safetensors")
    torch.save({"weight": torch.full((4, 4), 2.0)}, tmp_path / "colbert_linear.pt")
    pooler = make(Heads("none"), tmp_path)
    assert pooler.spec.tasks == ("embed", "token_embed", "token_classify")
    assert pooler._lexical is not None
    assert pooler._token_dense is not None
    assert (pooler._lexical.weight.shape, pooler._lexical._activation) == ((1, 4), "relu")
    assert pooler._lexical.bias is not None
    assert (pooler._token_dense.weight[0, 0], pooler._token_dense._activation) == (2, "")
    assert make(Heads("sequence", 2), tmp_path)._lexical is None
    (tmp_path / "sparse_linear.safetensors").unlink()
    assert make(Heads("none"), tmp_path).spec.tasks == ("embed", "token_embed")
    save_file({"other": torch.ones(1)}, tmp_path / "colbert_linear.safetensors")
    with pytest.raises(ModelLoadError, match=r"/colbert_linear has no tensor named weight$"):
        make(Heads("none"), tmp_path)


def test_the_matrix_of_colbert_is_in_the_weights_or_in_a_module(tmp_path: Path) -> None:
    (architecture, name), *_ = module.TOKEN_VECTORS.items()
    save_file({name: torch.ones(3, 4), "other": torch.ones(1)}, tmp_path / "a.safetensors")
    save_file({"other": torch.ones(1)}, tmp_path / "b.safetensors")
    config, weights = {"architectures": [architecture]}, (tmp_path / "b.safetensors", tmp_path / "a.safetensors")
    pooler = make(Heads("none"), tmp_path, weights=weights, **config)
    assert (pooler.spec.tasks, pooler.spec.num_values) == (("token_embed",), 3)
    files = PoolingFiles(denses=(dense_file(tmp_path, 0, 2, 4),))
    assert make(Heads("none"), tmp_path, files, weights=weights, **config).spec.num_values == 3
    assert make(Heads("none"), tmp_path, files, weights=weights[:1], **config).spec.num_values == 2
    with pytest.raises(ModelLoadError, match=f"^the checkpoint has no {name}, which its architecture needs$"):
        make(Heads("none"), tmp_path, weights=weights[:1], **config)


def test_a_vocabulary_without_the_parts_of_a_tokenizer_is_one_error(tmp_path: Path) -> None:
    for content in ({}, {"model": {}}, {"model": {"vocab": 3}}, [], {"model": {"vocab": {}}, "added_tokens": [{}]}):
        (tmp_path / "tokenizer.json").write_text(json.dumps(content))
        with pytest.raises(ModelLoadError, match=r"^classifier_from_token needs .*/tokenizer\.json: "):
            module._token_id("yes", tmp_path)


def test_what_generates_has_no_head(tmp_path: Path) -> None:
    pooler = make(SimpleNamespace(embedding_size=4, vocab_size=30), tmp_path)
    assert (pooler._heads, pooler._lexical, pooler._token_dense, pooler._classifier) == (None,) * 4
