"""Reads pooling options from a checkpoint's sentence-transformers files. Knows files; no tensors and no models."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagoda_common.config.pooler_config import PoolingType
from pagoda_common.errors import ModelLoadError

_POOLINGS: dict[str, PoolingType] = {
    "cls": "cls",
    "mean": "mean",
    "max": "max",
    "mean_sqrt_len": "mean_sqrt_len",
    "weightedmean": "weightedmean",
    "lasttoken": "last",
}
"""Pooling methods by their names in Pooling's config.json."""
_ACTIVATIONS = {"": "", "Identity": "", "Tanh": "tanh", "ReLU": "relu", "GELU": "gelu", "SiLU": "silu"}
_WIDE_CONFIGS = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
SUPPORTED = "Transformer, Pooling, Dense, Normalize, MLMTransformer, SpladePooling and LayerNorm"


@dataclass(frozen=True, slots=True)
class DenseFile:
    """A dense layer after pooling, or before the normalisation of tokens."""

    directory: Path
    activation: str
    """Empty: none; else tanh, relu, gelu or silu."""
    is_norm: bool = False
    """Whether it is a layer norm instead of a matrix."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolingFiles:
    """The pooling of a checkpoint's files; defaults are for missing files."""

    has_modules: bool = False
    """Whether there is a modules.json."""
    poolings: tuple[PoolingType, ...] = ()
    """Pooling methods, whose results are concatenated; empty: not given."""
    has_pooling: bool = False
    """Whether modules.json has a Pooling; without one, tokens keep their vectors (ColBERT)."""
    denses: tuple[DenseFile, ...] = ()
    normalizes: bool = True
    is_sparse: bool = False
    """Whether the result is a weight for each entry of the vocabulary (SPLADE)."""
    sparse_sums: bool = False
    """Whether tokens' weights are summed instead of taking the maximum."""
    max_seq_length: int | None = None
    """Number of tokens to which sentence-transformers truncates a text."""


NO_FILES = PoolingFiles()


def read_pooling_files(directory: Path) -> PoolingFiles:
    """Read the files of a checkpoint.

    Raises:
        ModelLoadError: a file cannot be read, or asks for a module or a pooling that is not supported.
    """
    modules = _read(directory / "modules.json", None)
    length = _max_seq_length(directory)
    if modules is None:
        pooling = _read(directory / "1_Pooling" / "config.json", None)
        poolings = () if pooling is None else _poolings(pooling, "1_Pooling")
        return PoolingFiles(poolings=poolings, has_pooling=bool(poolings), max_seq_length=length)
    poolings, denses, names = (), [], []
    sparse: Mapping[str, Any] = {}
    for module in modules if isinstance(modules, list) else [modules]:
        kind = str(module.get("type", "")) if isinstance(module, dict) else repr(module)[:200]
        name, path = kind.rpartition(".")[2], str(module.get("path") or "") if isinstance(module, dict) else ""
        if path.startswith("/") or ".." in path.split("/"):
            raise ModelLoadError(f"modules.json names {path[:200]!r}, must be below the checkpoint's directory")
        names.append(name)
        config = _read(directory / path / "config.json", {}) if path else {}
        if name == "Pooling":
            poolings = _poolings(config, path)
        elif name in ("Dense", "LayerNorm"):
            denses.append(DenseFile(directory / path, _activation(config, path), is_norm=name == "LayerNorm"))
        elif name == "SpladePooling":
            sparse = config
        elif name not in ("Transformer", "MLMTransformer", "Normalize"):
            raise ModelLoadError(
                f"modules.json has a module of type {kind!r}, which is not supported; supported are {SUPPORTED}"
            )
    return PoolingFiles(
        has_modules=True,
        poolings=poolings,
        has_pooling="Pooling" in names,
        denses=tuple(denses),
        normalizes="Normalize" in names or ("Pooling" not in names and "SpladePooling" not in names),
        is_sparse="SpladePooling" in names,
        sparse_sums=sparse.get("pooling_strategy") == "sum",
        max_seq_length=length,
    )


def _poolings(config: Any, path: str) -> tuple[PoolingType, ...]:
    """The enabled pooling methods, in either form: names, or a boolean each."""
    if not isinstance(config, dict):
        raise ModelLoadError(f"{path}/config.json must hold a JSON object")
    if config.get("include_prompt") is False:
        raise ModelLoadError(f"{path}/config.json leaves prompts out of the pooling, which is not supported")
    named = config.get("pooling_mode")
    if isinstance(named, str):
        modes = [named]
    elif isinstance(named, list):
        modes = [str(mode) for mode in named]
    else:
        prefix = "pooling_mode_"
        switched = [name.removeprefix(prefix) for name, value in config.items() if name.startswith(prefix) and value]
        modes = [name.removesuffix("_tokens").removesuffix("_token") for name in switched]
    unknown = [mode for mode in modes if mode not in _POOLINGS]
    if unknown:
        raise ModelLoadError(
            f"{path}/config.json asks for pooling {unknown[0][:60]!r}, which is not supported; supported are "
            f"{', '.join(_POOLINGS)}"
        )
    order = list(_POOLINGS)
    return tuple(_POOLINGS[mode] for mode in sorted(modes, key=order.index))


def _activation(config: Any, path: str) -> str:
    name = str(config.get("activation_function") or "") if isinstance(config, dict) else ""
    last = name.rpartition(".")[2]
    if last not in _ACTIVATIONS:
        raise ModelLoadError(f"{path}/config.json has activation_function {name[:100]!r}, which is not supported")
    return _ACTIVATIONS[last]


def _max_seq_length(directory: Path) -> int | None:
    for name in _WIDE_CONFIGS:
        config = _read(directory / name, None)
        if isinstance(config, dict):
            length = config.get("max_seq_length")
            return length if isinstance(length, int) and length > 0 else None
    return None


def _read(path: Path, missing: Any) -> Any:
    if not path.is_file():
        return missing
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"cannot read {path}: {error}") from error
