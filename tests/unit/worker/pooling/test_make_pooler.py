"""What a pooler is made of: tasks, poolings, activations and labels, by checkpoint and by what is asked for."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from pagoda_common.config.pooler_config import PoolerConfig
from pagoda_common.errors import ModelLoadError
from pagoda_worker.models.hf_config import HfConfig
from pagoda_worker.pooling import make_pooler as module
from pagoda_worker.pooling.make_pooler import make_pooler, needs_weight_files
from pagoda_worker.pooling.pooling_files import NO_FILES, DenseFile, PoolingFiles


def checkpoint(**config: Any) -> HfConfig:
    return HfConfig({"architectures": ["A"], **config})


def heads(head: str, num_labels: int = 0, pooling: str = "cls") -> Any:
    return SimpleNamespace(head=head, num_labels=num_labels, label_pooling=pooling)


@pytest.mark.parametrize(
    ("given", "num_labels", "has_pooling", "is_lexical", "tasks"),
    [
        (None, 0, True, False, ("embed",)),
        (heads("vocabulary"), 0, True, False, ("embed", "sparse")),
        (heads("token"), 3, True, False, ("token_classify",)),
        (heads("sequence"), 1, True, False, ("classify", "score", "token_classify")),
        (heads("sequence"), 2, True, False, ("classify", "token_classify")),
        (heads("none"), 0, True, False, ("embed", "token_embed")),
        (heads("none"), 0, False, False, ("token_embed", "embed")),
        (heads("none"), 0, True, True, ("embed", "token_embed", "token_classify")),
    ],
)
def test_tasks_are_those_of_the_head(
    given: Any, num_labels: int, has_pooling: bool, is_lexical: bool, tasks: tuple[str, ...]
) -> None:
    assert module._tasks(given, num_labels, has_pooling=has_pooling, is_lexical=is_lexical) == tasks


@pytest.mark.parametrize(
    ("given", "files", "asked", "poolings"),
    [
        (heads("none", pooling="mean"), (), None, ("mean",)),
        (heads("none"), ("mean", "cls"), None, ("mean", "cls")),
        (heads("none"), ("mean",), "max", ("max",)),
        (heads("sequence", pooling="cls"), ("mean",), None, ("cls",)),
        (heads("sequence", pooling="cls"), ("mean",), "last", ("last",)),
        (None, (), None, ("last",)),
        (None, ("last",), None, ("last",)),
        (heads("none"), (), "all", ("last",)),
        (heads("none"), ("mean",), "step", ("mean",)),
    ],
)
def test_poolings_are_asked_for_or_of_the_files_or_of_the_head(
    given: Any, files: Any, asked: Any, poolings: tuple[str, ...]
) -> None:
    config = PoolerConfig(pooling_type=asked)
    assert module._poolings(given, PoolingFiles(poolings=files), config, checkpoint()) == poolings


def test_a_model_that_generates_has_its_last_state_alone() -> None:
    with pytest.raises(ModelLoadError, match=r"^pooling mean\+cls needs the hidden states of all tokens: --runner"):
        module._poolings(None, PoolingFiles(poolings=("mean", "cls")), PoolerConfig(), checkpoint())


@pytest.mark.parametrize(
    ("config", "num_labels", "activation"),
    [
        ({}, 1, "sigmoid"),
        ({}, 2, "softmax"),
        ({"problem_type": "regression"}, 1, ""),
        ({"problem_type": "multi_label_classification"}, 3, "sigmoid"),
        ({"problem_type": "single_label_classification"}, 3, "softmax"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, 1, ""),
        ({"sentence_transformers": {"activation_fn": "torch.nn.Softmax"}}, 1, "softmax"),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.activation.Sigmoid"}, 2, "sigmoid"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.GELU"}}, 2, "softmax"),
        ({"sentence_transformers": "5.0", "problem_type": "regression"}, 2, ""),
    ],
)
def test_the_activation_is_stated_or_that_of_the_problem(
    config: dict[str, Any], num_labels: int, activation: str
) -> None:
    assert module._activation(checkpoint(**config), num_labels) == activation


@pytest.mark.parametrize(
    ("names", "labels"),
    [
        (None, ("LABEL_0", "LABEL_1")),
        ({"0": "bad", "1": "good"}, ("bad", "good")),
        ({"1": "good"}, ("LABEL_0", "good")),
        (["bad"], ("LABEL_0", "LABEL_1")),
        ({"0": "x" * 300, "1": 5}, ("x" * 200, "5")),
    ],
)
def test_labels_have_names(names: Any, labels: tuple[str, ...]) -> None:
    assert module._labels(checkpoint(id2label=names), 2) == labels


@pytest.mark.parametrize(
    ("config", "lengths"),
    [
        ({}, None),
        ({"is_matryoshka": True}, ()),
        ({"is_matryoshka": False}, None),
        ({"is_matryoshka": 1}, None),
        ({"matryoshka_dimensions": [64, 128]}, (64, 128)),
        ({"matryoshka_dimensions": [64, 0], "is_matryoshka": True}, ()),
        ({"matryoshka_dimensions": "64"}, None),
    ],
)
def test_lengths_of_shorter_embeddings(config: dict[str, Any], lengths: tuple[int, ...] | None) -> None:
    assert module._matryoshka(checkpoint(**config)) == lengths


def test_some_heads_are_read_from_the_weights() -> None:
    assert not needs_weight_files(checkpoint())
    assert needs_weight_files(checkpoint(classifier_from_token=["no", "yes"]))
    (name, *_) = module.TOKEN_VECTORS
    assert needs_weight_files(checkpoint(architectures=[name]))


def model_of(directory: Path) -> Path:
    table = torch.arange(12.0).reshape(6, 2)
    save_file({"model.embed_tokens.weight": table, "lm_head.weight": table * 10}, directory / "model.safetensors")
    vocabulary = {"model": {"vocab": {"no": 1, "yes": 4}}, "added_tokens": [{"content": "<yes>", "id": 5}]}
    (directory / "tokenizer.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    return directory / "model.safetensors"


@pytest.mark.parametrize(
    ("config", "weight"),
    [
        ({"classifier_from_token": ["no", "yes"]}, [[60, 60]]),
        ({"classifier_from_token": [1, 4]}, [[60, 60]]),
        ({"classifier_from_token": ["no", "<yes>"], "tie_word_embeddings": True}, [[8, 8]]),
        ({"classifier_from_token": ["yes"]}, [[80, 90]]),
        ({"classifier_from_token": ["no", "yes"], "method": "no_post_processing"}, [[20, 30], [80, 90]]),
        ({"classifier_from_token": [1, 2, 3]}, [[20, 30], [40, 50], [60, 70]]),
    ],
)
def test_a_head_of_tokens_is_made_of_their_rows(config: dict[str, Any], weight: list[Any], tmp_path: Path) -> None:
    files = [model_of(tmp_path)]
    made = module._classifier(checkpoint(**config), tmp_path, files)
    assert made is not None
    assert (made.weight.tolist(), made.bias) == (weight, None)


def test_a_token_may_be_a_piece_of_unigram(tmp_path: Path) -> None:
    file = model_of(tmp_path)
    pieces = [["<unk>", 0], ["no", -1.5], ["▁", -2], ["a", -3], ["yes", -4]]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": pieces}}), encoding="utf-8")
    made = module._classifier(checkpoint(classifier_from_token=["no", "yes"]), tmp_path, [file])
    assert made is not None
    assert made.weight.tolist() == [[60, 60]]


def test_without_tokens_there_is_no_such_head(tmp_path: Path) -> None:
    assert module._classifier(checkpoint(), tmp_path, []) is None


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (["maybe"], "classifier_from_token has 'maybe', which is not a token"),
        ("yes", "classifier_from_token is yes, must be a list of tokens"),
        ([0] * 1001, "must be a list of tokens"),
    ],
)
def test_tokens_of_a_head_are_known(tokens: Any, message: str, tmp_path: Path) -> None:
    files = [model_of(tmp_path)]
    with pytest.raises(ModelLoadError) as error:
        module._classifier(checkpoint(classifier_from_token=tokens), tmp_path, files)
    assert message in str(error.value)


def test_a_head_of_tokens_needs_files(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"needs the matrix lm_head, which the checkpoint does not have$"):
        module._classifier(checkpoint(classifier_from_token=[1]), tmp_path, [])
    with pytest.raises(ModelLoadError, match=r"^classifier_from_token needs .*tokenizer\.json: "):
        module._classifier(checkpoint(classifier_from_token=["yes"]), tmp_path, [])


def make(directory: Path, files: PoolingFiles = NO_FILES, **asked: Any) -> Any:
    return make_pooler(
        model=SimpleNamespace(embedding_size=8, vocab_size=30),  # type: ignore[arg-type]  # all that is asked of one that generates
        files=files,
        asked=PoolerConfig(**asked),
        checkpoint=checkpoint(),
        directory=directory,
        weight_files=(),
        device=torch.device("cpu"),
    ).spec


def test_what_is_asked_for_goes_before_the_files(tmp_path: Path) -> None:
    spec = make(tmp_path)
    assert (spec.tasks, spec.poolings, spec.normalizes, spec.num_values) == (("embed",), ("last",), True, 8)
    assert (spec.uses_activation, spec.dimensions, spec.step_tag_id, spec.returned_token_ids) == (True, None, None, ())
    assert (spec.is_sparse, spec.labels, spec.matryoshka) == (False, (), None)
    plain = PoolingFiles(normalizes=False)
    assert not make(tmp_path, plain).normalizes
    assert make(tmp_path, plain, normalize=True).normalizes
    assert not make(tmp_path, normalize=False).normalizes
    assert not make(tmp_path, use_activation=False).uses_activation
    assert (make(tmp_path, dimensions=4).num_values, make(tmp_path, dimensions=9).num_values) == (4, 8)
    assert make(tmp_path, dimensions=4).dimensions == 4
    assert make(tmp_path, step_tag_id=3).step_tag_id == 3
    assert make(tmp_path, returned_token_ids=(3, 4)).returned_token_ids == (3, 4)


def test_a_task_that_the_model_has_not_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError) as error:
        make(tmp_path, task="classify")
    assert str(error.value) == "pooler_config has task 'classify', the checkpoint is made for embed"


def dense_of(directory: Path, num_outputs: int, num_inputs: int) -> DenseFile:
    directory.mkdir()
    save_file({"linear.weight": torch.ones(num_outputs, num_inputs)}, directory / "model.safetensors")
    return DenseFile(directory, "")


def test_each_matrix_takes_what_comes_before_it(tmp_path: Path) -> None:
    first, second = dense_of(tmp_path / "1", 5, 8), dense_of(tmp_path / "2", 3, 5)
    assert make(tmp_path, PoolingFiles(denses=(first, second))).num_values == 3
    with pytest.raises(ModelLoadError, match=r"modules\.json has a Dense of 5 inputs, the pooling gives 8$"):
        make(tmp_path, PoolingFiles(denses=(second, first)))


def test_vectors_of_tokens_need_their_matrix(tmp_path: Path) -> None:
    name, tensor = next(iter(module.TOKEN_VECTORS.items()))
    config, path = checkpoint(architectures=[name]), tmp_path / "model.safetensors"
    with pytest.raises(ModelLoadError, match=f"^the checkpoint has no {tensor}, which its architecture needs$"):
        module._token_matrix(config, [], has_dense=False)
    assert module._token_matrix(config, [], has_dense=True) is None
    save_file({tensor: torch.ones(3, 8)}, path)
    made = module._token_matrix(config, [path], has_dense=True)
    assert made is not None
    assert (made.out_features, made.in_features, made.bias) == (3, 8, None)


def test_heads_of_bge_m3_have_weights(tmp_path: Path) -> None:
    assert module._bge_m3(tmp_path) == (None, None)
    save_file({"weight": torch.ones(1, 2), "bias": torch.ones(1)}, tmp_path / "sparse_linear.safetensors")
    lexical, vectors = module._bge_m3(tmp_path)
    assert lexical is not None
    assert vectors is None
    assert lexical(torch.tensor([[-3.0, 1.0]])).tolist() == [[0.0]], "no weight is below zero"
    save_file({"bias": torch.ones(1)}, tmp_path / "colbert_linear.safetensors")
    with pytest.raises(ModelLoadError, match=r"colbert_linear has no tensor named weight$"):
        module._bge_m3(tmp_path)
