"""Poolers value by value: vectors, labels and weights of tokens, and what a request may ask for."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pagoda_common.errors import ModelLoadError
from pagoda_common.params.pooling_params import PoolingParams
from pagoda_worker.pooling.dense import Dense, load_dense, read_tensors
from pagoda_worker.pooling.pooler import LAST_TOKEN, Pooler, PoolerSpec
from pagoda_worker.pooling.pooling_files import (
    NO_FILES,
    SUPPORTED,
    DenseFile,
    PoolingFiles,
    read_pooling_files,
)
from pagoda_worker.pooling.sequence_pooling import pool_sequences

HIDDEN = torch.tensor([[3.0, 4.0], [6.0, 8.0], [1.0, 0.0], [0.0, -2.0], [5.0, 12.0]])
IDS = torch.tensor([7, 8, 7, 9, 7])
STARTS = [0, 2, 5]
"""Two texts, of two and of three tokens."""


class Heads:
    """Labels of texts are twice, and of tokens three times their vectors."""

    def __init__(self) -> None:
        self.dtypes: list[torch.dtype] = []

    def classify(self, pooled: Tensor) -> Tensor:
        self.dtypes.append(pooled.dtype)
        return 2 * pooled.float()

    def classify_tokens(self, hidden: Tensor) -> Tensor:
        self.dtypes.append(hidden.dtype)
        return 3 * hidden.float()


def pool(spec: PoolerSpec, *params: PoolingParams, hidden: Tensor = HIDDEN, **parts: Any) -> list[list[Any]]:
    made = Pooler(spec=spec, **parts).pool(hidden, IDS, STARTS, params)
    assert {one.dtype for one in made} == {torch.float32}
    return [torch.round(one, decimals=4).tolist() for one in made]


def embed(**fields: Any) -> PoolingParams:
    return PoolingParams(task="embed", **fields)


def rounded(values: Any) -> list[Any]:
    result: list[Any] = torch.round(torch.as_tensor(values, dtype=torch.float32), decimals=4).tolist()
    return result


def test_a_spec_has_defaults() -> None:
    assert LAST_TOKEN.tasks == ("embed",)
    assert (LAST_TOKEN.poolings, LAST_TOKEN.normalizes, LAST_TOKEN.activation) == (("last",), True, "")
    assert (LAST_TOKEN.uses_activation, LAST_TOKEN.is_sparse, LAST_TOKEN.sparse_sums) == (True, False, False)
    assert (LAST_TOKEN.dimensions, LAST_TOKEN.step_tag_id, LAST_TOKEN.returned_token_ids) == (None, None, ())
    assert (LAST_TOKEN.num_values, LAST_TOKEN.labels, LAST_TOKEN.matryoshka) == (0, (), None)


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [
        ("cls", [[3, 4], [1, 0]]),
        ("last", [[6, 8], [5, 12]]),
        ("max", [[6, 8], [5, 12]]),
        ("mean", [[4.5, 6], [2, 10 / 3]]),
        ("mean_sqrt_len", [[9 / 2**0.5, 12 / 2**0.5], [6 / 3**0.5, 10 / 3**0.5]]),
        ("weightedmean", [[15 / 3, 20 / 3], [16 / 6, 32 / 6]]),
    ],
)
def test_a_vector_of_each_text(pooling: Any, expected: list[list[float]]) -> None:
    assert rounded(pool_sequences(HIDDEN, STARTS, (pooling,))) == rounded(expected)


def test_several_poolings_stand_one_after_the_other() -> None:
    assert pool_sequences(HIDDEN, STARTS, ("cls", "last")).tolist() == [[3, 4, 6, 8], [1, 0, 5, 12]]


def test_a_pooling_of_no_single_vector_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^step gives no single vector$"):
        pool_sequences(HIDDEN, STARTS, ("step",))  # type: ignore[arg-type]  # not one of those


def test_embeddings_are_normalised_unless_either_says_otherwise() -> None:
    assert pool(LAST_TOKEN, embed(), embed(normalize=False)) == [rounded([0.6, 0.8]), [5, 12]]
    plain = PoolerSpec(tasks=("embed",), normalizes=False)
    assert pool(plain, embed(), embed(normalize=True)) == [[6, 8], rounded([5 / 13, 12 / 13])]


def test_embeddings_are_cut_before_they_are_normalised() -> None:
    assert pool(LAST_TOKEN, embed(dimensions=1), embed()) == [[1.0], rounded([5 / 13, 12 / 13])]
    short = PoolerSpec(tasks=("embed",), dimensions=1, normalizes=False)
    assert pool(short, embed(), embed(dimensions=2)) == [[6], [5, 12]]


def test_matrices_come_after_the_pooling_in_their_order() -> None:
    denses = [
        Dense(weight=torch.tensor([[1.0, 1.0]]), bias=torch.tensor([1.0])),
        Dense(weight=torch.tensor([[2.0]]), bias=None),
    ]
    assert pool(LAST_TOKEN, embed(normalize=False), embed(normalize=False), denses=denses) == [[30], [36]]


def test_labels_are_activated_unless_either_says_otherwise() -> None:
    heads = Heads()
    spec = PoolerSpec(tasks=("classify",), poolings=("cls",), activation="softmax")
    asked = PoolingParams(task="classify"), PoolingParams(task="classify", use_activation=False)
    half = HIDDEN.to(torch.bfloat16)
    assert pool(spec, *asked, heads=heads, hidden=half) == [rounded(torch.tensor([6.0, 8.0]).softmax(-1)), [2, 0]]
    assert heads.dtypes == [torch.bfloat16]
    spec = PoolerSpec(tasks=("classify",), poolings=("cls",), activation="sigmoid", uses_activation=False)
    asked = PoolingParams(task="classify"), PoolingParams(task="classify", use_activation=True)
    assert pool(spec, *asked, heads=Heads()) == [[6, 8], rounded(torch.tensor([2.0, 0.0]).sigmoid())]
    spec = PoolerSpec(tasks=("classify",), poolings=("cls",))
    assert pool(spec, PoolingParams(task="classify"), asked[1], heads=Heads()) == [[6, 8], [2, 0]]


def test_a_classifier_goes_before_the_head() -> None:
    spec = PoolerSpec(tasks=("classify",))
    classifier = Dense(weight=torch.tensor([[1.0, 0.0]]), bias=None)
    asked = PoolingParams(task="classify")
    assert pool(spec, asked, asked, heads=Heads(), classifier=classifier) == [[6], [5]]


def test_an_unknown_task_is_the_models_first() -> None:
    pooler = Pooler(spec=PoolerSpec(tasks=("classify", "embed")))
    assert pooler.task_of(embed()) == "embed"
    assert pooler.task_of(PoolingParams(task="sparse")) == "classify"


def test_each_text_has_its_own_task() -> None:
    spec = PoolerSpec(tasks=("embed", "token_embed"), normalizes=False)
    tokens = PoolingParams(task="token_embed", normalize=False)
    assert pool(spec, tokens, embed()) == [[[3, 4], [6, 8]], [5, 12]]
    assert pool(spec, embed(), tokens) == [[6, 8], [[1, 0], [0, -2], [5, 12]]]


def test_vectors_of_tokens_pass_the_matrices() -> None:
    spec = PoolerSpec(tasks=("token_embed",), normalizes=False)
    asked = PoolingParams(task="token_embed")
    sums = Dense(weight=torch.tensor([[1.0, 1.0]]), bias=None)
    assert pool(spec, asked, asked, denses=[sums]) == [[[7], [14]], [[1], [-2], [17]]]
    assert pool(spec, asked, asked, token_dense=sums) == [[[14]], [[-2], [17]]], "without the first token"


def test_the_only_token_keeps_its_vector() -> None:
    spec = PoolerSpec(tasks=("token_embed",), normalizes=False)
    sums = Dense(weight=torch.tensor([[1.0, 1.0]]), bias=None)
    pooler = Pooler(spec=spec, token_dense=sums)
    (made,) = pooler.pool(HIDDEN[:1], IDS[:1], [0, 1], [PoolingParams(task="token_embed")])
    assert made.tolist() == [[7]]


def test_labels_of_tokens_may_be_some_columns_of_some_tokens() -> None:
    asked = PoolingParams(task="token_classify")
    spec = PoolerSpec(tasks=("token_classify",))
    assert pool(spec, asked, asked) == [HIDDEN[:2].tolist(), HIDDEN[2:].tolist()]
    assert pool(spec, asked, asked, heads=Heads())[0] == [[9, 12], [18, 24]]
    lexical = Dense(weight=torch.tensor([[0.0, 1.0]]), bias=None)
    assert pool(spec, asked, asked, heads=Heads(), lexical=lexical)[0] == [[4], [8]]
    for ends, weights in (
        ((None, None), [[4], [8]]),
        ((int(IDS[0]), None), [[8]]),
        ((None, int(IDS[1])), [[4]]),
        ((int(IDS[0]), int(IDS[1])), []),
        ((int(IDS[1]), int(IDS[0])), [[4], [8]]),
    ):
        ended = PoolerSpec(tasks=("token_classify",), lexical_ends=ends)
        assert pool(ended, asked, asked, heads=Heads(), lexical=lexical)[0] == weights
    spec = PoolerSpec(tasks=("token_classify",), returned_token_ids=(1,))
    assert pool(spec, asked, asked)[1] == [[0], [-2], [12]]
    spec = PoolerSpec(tasks=("token_classify",), step_tag_id=7)
    assert pool(spec, asked, asked) == [[[3, 4]], [[1, 0], [5, 12]]]
    spec = PoolerSpec(tasks=("token_classify",), activation="sigmoid")
    classifier = Dense(weight=torch.tensor([[0.0, 0.0]]), bias=None)
    assert pool(spec, asked, asked, heads=Heads(), classifier=classifier)[0] == [[0.5], [0.5]]


@pytest.mark.parametrize("sums", [False, True])
def test_weights_of_the_vocabulary(sums: bool) -> None:
    spec = PoolerSpec(tasks=("embed",), is_sparse=True, sparse_sums=sums)
    weights = torch.log1p(torch.relu(3 * HIDDEN))
    expected = [rounded(part.sum(0) if sums else part.amax(0)) for part in (weights[:2], weights[2:])]
    assert pool(spec, embed(), embed(), heads=Heads()) == expected


@pytest.mark.parametrize(("activation", "expected"), [("", -1.0), ("tanh", -0.7616), ("relu", 0.0), ("silu", -0.2689)])
def test_matrices_have_activations(activation: str, expected: float) -> None:
    dense = Dense(weight=torch.tensor([[1.0, -1.0]]).half(), bias=torch.tensor([1.0]).half(), activation=activation)
    assert (dense.out_features, dense.in_features, dense.weight.dtype) == (1, 2, torch.float32)
    assert rounded(dense(torch.tensor([[1.0, 3.0]]))) == rounded([[expected]])


def test_a_norm_is_no_matrix() -> None:
    norm = Dense(weight=torch.tensor([2.0, 1.0]), bias=torch.tensor([0.5, 0.0]), is_norm=True)
    assert rounded(norm(torch.tensor([[1.0, 3.0]]))) == [[-1.5, 1.0]]
    assert norm.in_features == norm.out_features == 2


def test_a_matrix_of_a_file(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    with pytest.raises(ModelLoadError, match=r"has no model\.safetensors$"):
        load_dense(DenseFile(tmp_path, "tanh"))
    save_file({"linear.weight": torch.ones(1, 2), "norm.weight": torch.ones(3)}, tmp_path / "model.safetensors")
    dense = load_dense(DenseFile(tmp_path, "tanh"))
    assert (dense.weight.tolist(), dense.bias, dense._activation) == ([[1, 1]], None, "tanh")
    assert load_dense(DenseFile(tmp_path, "", is_norm=True)).weight.tolist() == [1, 1, 1]
    (tmp_path / "model.safetensors").unlink()
    torch.save({"linear.bias": torch.ones(1)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match=r"has no linear\.weight$"):
        load_dense(DenseFile(tmp_path, ""))
    (tmp_path / "pytorch_model.bin").write_bytes(b"nothing")
    with pytest.raises(ModelLoadError, match=r"^cannot read .*: "):
        read_tensors(tmp_path / "model.safetensors", tmp_path / "pytorch_model.bin")


def files_of(directory: Path, **contents: Any) -> PoolingFiles:
    for name, content in contents.items():
        path = directory / name.replace("__", "/")
        path = path.with_name(f"{path.name}.json")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content), encoding="utf-8")
    return read_pooling_files(directory)


def module(kind: str, path: str = "") -> dict[str, str]:
    return {"type": f"sentence_transformers.models.{kind}", "path": path}


def test_without_files_nothing_is_said(tmp_path: Path) -> None:
    assert read_pooling_files(tmp_path) == NO_FILES
    assert (NO_FILES.has_modules, NO_FILES.poolings, NO_FILES.has_pooling, NO_FILES.denses) == (False, (), False, ())
    assert (NO_FILES.normalizes, NO_FILES.is_sparse, NO_FILES.max_seq_length) == (True, False, None)


def test_a_pooling_without_modules_counts(tmp_path: Path) -> None:
    files = files_of(tmp_path, **{"1_Pooling__config": {"pooling_mode_mean_tokens": True}})
    assert files == PoolingFiles(poolings=("mean",), has_pooling=True)


@pytest.mark.parametrize(
    ("config", "poolings"),
    [
        ({"pooling_mode": "lasttoken"}, ("last",)),
        ({"pooling_mode": ["mean", "cls"]}, ("cls", "mean")),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, ("cls",)),
        ({"pooling_mode_max_tokens": True, "pooling_mode_cls_token": True}, ("cls", "max")),
        ({"pooling_mode_mean_sqrt_len_tokens": True, "word_embedding_dimension": 3}, ("mean_sqrt_len",)),
        ({"pooling_mode_weightedmean_tokens": True, "include_prompt": True}, ("weightedmean",)),
        ({"pooling_mode_lasttoken": True}, ("last",)),
    ],
)
def test_poolings_have_two_forms(config: dict[str, Any], poolings: tuple[str, ...], tmp_path: Path) -> None:
    modules = [module("Transformer"), module("Pooling", "1_Pooling")]
    files = files_of(tmp_path, modules=modules, **{"1_Pooling__config": config})
    assert files == PoolingFiles(has_modules=True, poolings=poolings, has_pooling=True, normalizes=False)  # type: ignore[arg-type]  # names of poolings


def test_all_that_modules_may_say(tmp_path: Path) -> None:
    files = files_of(
        tmp_path,
        modules=[
            module("Transformer"),
            module("Pooling", "1_Pooling"),
            module("Dense", "2_Dense"),
            module("LayerNorm", "3_LayerNorm"),
            module("Normalize"),
        ],
        sentence_bert_config={"max_seq_length": 128},
        **{
            "1_Pooling__config": {"pooling_mode": "cls"},
            "2_Dense__config": {"activation_function": "torch.nn.modules.activation.Tanh"},
        },
    )
    assert files.denses == (
        DenseFile(tmp_path / "2_Dense", "tanh"),
        DenseFile(tmp_path / "3_LayerNorm", "", is_norm=True),
    )
    assert (files.normalizes, files.max_seq_length, files.is_sparse) == (True, 128, False)


@pytest.mark.parametrize(("strategy", "sums"), [("max", False), ("sum", True), (None, False)])
def test_weights_of_the_vocabulary_are_said_by_a_module(strategy: str | None, sums: bool, tmp_path: Path) -> None:
    modules = [module("MLMTransformer"), module("SpladePooling", "1_Splade")]
    files = files_of(tmp_path, modules=modules, **{"1_Splade__config": {"pooling_strategy": strategy}})
    assert (files.is_sparse, files.sparse_sums, files.normalizes, files.has_pooling) == (True, sums, False, False)


def test_tokens_without_a_pooling_are_normalised(tmp_path: Path) -> None:
    files = files_of(tmp_path, modules=[module("Transformer")])
    assert (files.has_modules, files.has_pooling, files.normalizes) == (True, False, True)


@pytest.mark.parametrize(
    ("length", "expected"), [(1, 1), (512, 512), (0, None), (-1, None), ("512", None), (None, None)]
)
def test_a_length_is_a_number_above_0(length: Any, expected: int | None, tmp_path: Path) -> None:
    assert files_of(tmp_path, sentence_roberta_config={"max_seq_length": length}).max_seq_length == expected


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ({"modules": [module("Router")]}, f"which is not supported; supported are {SUPPORTED}"),
        ({"modules": ["x"]}, "modules.json has a module of type"),
        ({"modules": [module("Dense", "/tmp")]}, "modules.json names '/tmp', must be below the checkpoint's directory"),
        ({"modules": [module("Dense", "a/../../b")]}, "modules.json names 'a/../../b', must be below"),
        (
            {"modules": [module("Pooling", "p")], "p__config": {"pooling_mode": "median"}},
            "p/config.json asks for pooling 'median', which is not supported; supported are cls, mean, max",
        ),
        (
            {"modules": [module("Pooling", "p")], "p__config": {"include_prompt": False}},
            "p/config.json leaves prompts out of the pooling, which is not supported",
        ),
        ({"modules": [module("Pooling", "p")], "p__config": []}, "p/config.json must hold a JSON object"),
        (
            {"modules": [module("Dense", "d")], "d__config": {"activation_function": "torch.Softplus"}},
            "d/config.json has activation_function 'torch.Softplus', which is not supported",
        ),
    ],
)
def test_what_is_not_supported_is_named(contents: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError) as error:
        files_of(tmp_path, **contents)
    assert message in str(error.value)
