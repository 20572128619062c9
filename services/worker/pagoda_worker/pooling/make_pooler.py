"""Makes the pooler of a model from its checkpoint's files and the operator's options. Reads files."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from pagoda_common.config.pooler_config import PoolerConfig, PoolingType
from pagoda_common.errors import ModelLoadError
from pagoda_common.params.pooling_params import PoolingTask
from pagoda_worker.models.hf_config import HfConfig
from pagoda_worker.models.model import Model, PoolingHeads
from pagoda_worker.models.registry import TOKEN_VECTORS, architectures_of
from pagoda_worker.pooling.dense import Dense, load_dense, read_tensors
from pagoda_worker.pooling.pooler import Pooler, PoolerSpec
from pagoda_worker.pooling.pooling_files import PoolingFiles


def make_pooler(
    *,
    model: Model,
    files: PoolingFiles,
    asked: PoolerConfig,
    checkpoint: HfConfig,
    directory: Path,
    weight_files: Sequence[Path],
    device: torch.device,
) -> Pooler:
    """
    Raises:
        ModelLoadError: the files ask for something that the model does not provide.
    """
    heads = model if isinstance(model, PoolingHeads) else None
    denses = [load_dense(file).to(device) for file in files.denses]
    is_token_model = any(name in TOKEN_VECTORS for name in architectures_of(checkpoint))
    token_matrix = _token_matrix(checkpoint, weight_files, has_dense=bool(denses)) if is_token_model else None
    if token_matrix is not None:
        denses = [token_matrix.to(device)]
    classifier = _classifier(checkpoint, directory, weight_files)
    lexical, token_dense = _bge_m3(directory) if heads is not None and heads.head == "none" else (None, None)
    poolings = _poolings(heads, files, asked, checkpoint)
    size = model.embedding_size * len(poolings)
    for dense in denses:
        if dense.in_features not in (size, model.embedding_size):
            raise ModelLoadError(f"modules.json has a Dense of {dense.in_features} inputs, the pooling gives {size}")
        size = dense.out_features
    is_sparse = heads is not None and heads.head == "vocabulary"
    num_labels = classifier.out_features if classifier is not None else 0 if heads is None else heads.num_labels
    tasks = _tasks(heads, num_labels, has_pooling=files.has_pooling or not files.has_modules, is_lexical=bool(lexical))
    if is_token_model:
        tasks = ("token_embed",)
    if asked.task is not None and asked.task not in tasks:
        raise ModelLoadError(f"pooler_config has task {asked.task!r}, the checkpoint is made for {', '.join(tasks)}")
    spec = PoolerSpec(
        tasks=tasks if asked.task is None else (asked.task,),
        unserved_tasks=() if asked.task is None else tuple(task for task in tasks if task != asked.task),
        poolings=poolings,
        normalizes=files.normalizes if asked.normalize is None else asked.normalize,
        activation=_activation(checkpoint, num_labels),
        uses_activation=asked.use_activation is not False,
        is_sparse=is_sparse,
        sparse_sums=files.sparse_sums,
        dimensions=asked.dimensions,
        step_tag_id=asked.step_tag_id,
        returned_token_ids=asked.returned_token_ids,
        lexical_ends=(_token(checkpoint, "bos_token_id"), _token(checkpoint, "eos_token_id")),
        num_values=model.vocab_size if is_sparse else min(size, asked.dimensions or size),
        labels=_labels(checkpoint, num_labels),
        matryoshka=_matryoshka(checkpoint),
    )
    return Pooler(
        spec=spec,
        heads=heads,
        denses=denses,
        classifier=None if classifier is None else classifier.to(device),
        token_dense=None if token_dense is None else token_dense.to(device),
        lexical=None if lexical is None else lexical.to(device),
    )


def needs_weight_files(checkpoint: HfConfig) -> bool:
    """Whether the checkpoint has pooling tensors besides the model's own."""
    return bool(checkpoint.get("classifier_from_token")) or any(
        name in TOKEN_VECTORS for name in architectures_of(checkpoint)
    )


def _tasks(
    heads: PoolingHeads | None, num_labels: int, *, has_pooling: bool, is_lexical: bool
) -> tuple[PoolingTask, ...]:
    if heads is None:
        return ("embed",)
    if heads.head == "vocabulary":
        return ("embed", "sparse")
    if heads.head == "token":
        return ("token_classify",)
    if num_labels:
        return ("classify", "score", "token_classify") if num_labels == 1 else ("classify", "token_classify")
    tasks: tuple[PoolingTask, ...] = ("embed", "token_embed") if has_pooling else ("token_embed", "embed")
    return (*tasks, "token_classify") if is_lexical else tasks


def _poolings(
    heads: PoolingHeads | None, files: PoolingFiles, asked: PoolerConfig, checkpoint: HfConfig
) -> tuple[PoolingType, ...]:
    if asked.pooling_type in ("all", "step"):
        return files.poolings or ("last",)
    if asked.pooling_type is not None:
        chosen: tuple[PoolingType, ...] = (asked.pooling_type,)
    elif heads is not None and heads.head == "sequence":
        chosen = (heads.label_pooling,)
    else:
        chosen = files.poolings or (("last",) if heads is None else (heads.label_pooling,))
    if heads is None and (chosen != ("last",)):
        raise ModelLoadError(
            f"pooling {'+'.join(chosen)} needs the hidden states of all tokens: --runner pooling computes them"
        )
    return chosen


def _activation(checkpoint: HfConfig, num_labels: int) -> str:
    """The activation, chosen like CrossEncoder of sentence-transformers and transformers' pipelines."""
    stated = checkpoint.get("sentence_transformers")
    name = stated.get("activation_fn") if isinstance(stated, dict) else None
    name = str(name or checkpoint.get("sbert_ce_default_activation_function") or "").rpartition(".")[2]
    if name in ("Identity", "Sigmoid", "Softmax"):
        return "" if name == "Identity" else name.lower()
    kind = checkpoint.get("problem_type")
    if kind == "regression":
        return ""
    return "sigmoid" if kind == "multi_label_classification" or num_labels == 1 else "softmax"


def _labels(checkpoint: HfConfig, num_labels: int) -> tuple[str, ...]:
    names = checkpoint.get("id2label")
    if not isinstance(names, dict):
        names = {}
    return tuple(str(names.get(str(place), f"LABEL_{place}"))[:200] for place in range(num_labels))


def _token(checkpoint: HfConfig, name: str) -> int | None:
    value = checkpoint.get(name)
    return value if isinstance(value, int) else None


def _matryoshka(checkpoint: HfConfig) -> tuple[int, ...] | None:
    lengths = checkpoint.get("matryoshka_dimensions")
    if isinstance(lengths, list) and all(isinstance(one, int) and one > 0 for one in lengths):
        return tuple(lengths)
    return () if checkpoint.get("is_matryoshka") is True else None


def _classifier(checkpoint: HfConfig, directory: Path, weight_files: Sequence[Path]) -> Dense | None:
    """A head from rows of tokens in the language model head: for two tokens, the second's row less the first's.

    Source: Qwen3-Reranker, and vLLM's classifier_from_token.
    """
    tokens = checkpoint.get("classifier_from_token")
    if not tokens:
        return None
    if not isinstance(tokens, list) or not 1 <= len(tokens) <= 1000:
        raise ModelLoadError(f"classifier_from_token is {str(tokens)[:100]}, must be a list of tokens")
    ids = [_token_id(token, directory) for token in tokens]
    rows = _rows(ids, weight_files, tied=bool(checkpoint.get("tie_word_embeddings")))
    if len(ids) == 2 and checkpoint.get("method", "from_2_way_softmax") == "from_2_way_softmax":
        rows = rows[1:] - rows[:1]
    return Dense(weight=rows, bias=None)


def _token_id(token: Any, directory: Path) -> int:
    if isinstance(token, int):
        return token
    try:
        vocabulary = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
        ids = vocabulary["model"]["vocab"]
        if isinstance(ids, list):  # Unigram: pieces with their scores
            ids = {piece: place for place, (piece, _) in enumerate(ids)}
        added = {one["content"]: one["id"] for one in vocabulary.get("added_tokens", ())}
        found = added.get(token, ids.get(token))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"classifier_from_token needs {directory}/tokenizer.json: {error}") from error
    if not isinstance(found, int):
        raise ModelLoadError(f"classifier_from_token has {str(token)[:60]!r}, which is not a token")
    return found


def _rows(ids: list[int], files: Sequence[Path], *, tied: bool) -> torch.Tensor:
    endings = ("embed_tokens.weight", "wte.weight") if tied else ("lm_head.weight", "embed_tokens.weight")
    for ending in endings:
        for path in files:
            with safe_open(path, framework="pt") as file:
                for name in sorted(file.keys()):
                    if name.endswith(ending):
                        stored = file.get_slice(name)
                        return torch.cat([stored[one : one + 1] for one in ids]).float()
    raise ModelLoadError("classifier_from_token needs the matrix lm_head, which the checkpoint does not have")


def _token_matrix(checkpoint: HfConfig, weight_files: Sequence[Path], *, has_dense: bool) -> Dense | None:
    """The matrix that shortens token vectors (ColBERT); None if a Dense of modules.json does."""
    name = next(TOKEN_VECTORS[name] for name in architectures_of(checkpoint) if name in TOKEN_VECTORS)
    for path in weight_files:
        with safe_open(path, framework="pt") as file:
            if name in file.keys():  # noqa: SIM118 (no dict)
                return Dense(weight=file.get_tensor(name), bias=None)
    if has_dense:
        return None
    raise ModelLoadError(f"the checkpoint has no {name}, which its architecture needs")


def _bge_m3(directory: Path) -> tuple[Dense | None, Dense | None]:
    """The heads for lexical weights and token vectors, if the checkpoint has them."""
    found: list[Dense | None] = []
    for name, activation in (("sparse_linear", "relu"), ("colbert_linear", "")):
        path, pickled = directory / f"{name}.safetensors", directory / f"{name}.pt"
        if not path.is_file() and not pickled.is_file():
            found.append(None)
            continue
        tensors = read_tensors(path, pickled)
        if "weight" not in tensors:
            raise ModelLoadError(f"{directory}/{name} has no tensor named weight")
        found.append(Dense(weight=tensors["weight"], bias=tensors.get("bias"), activation=activation))
    return found[0], found[1]
