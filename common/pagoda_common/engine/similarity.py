"""Similarity of texts by their vectors. Knows only numbers."""

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Vector: TypeAlias = npt.NDArray[np.float32]


def cosine(one: Vector, other: Vector) -> float:
    """Cosine of the angle between two vectors; 0 if one has length 0."""
    product = float(np.linalg.norm(one.astype(np.float64)) * np.linalg.norm(other.astype(np.float64)))
    return float(one.astype(np.float64) @ other.astype(np.float64)) / product if product else 0.0


def _dot(one: Vector, other: Vector) -> float:
    return float(one.astype(np.float64) @ other.astype(np.float64))


def _euclidean(one: Vector, other: Vector) -> float:
    return -float(np.linalg.norm(one.astype(np.float64) - other.astype(np.float64)))


def _manhattan(one: Vector, other: Vector) -> float:
    return -float(np.abs(one.astype(np.float64) - other.astype(np.float64)).sum())


SIMILARITIES: dict[str, Callable[[Vector, Vector], float]] = {
    "cosine": cosine,
    "dot": _dot,
    "euclidean": _euclidean,
    "manhattan": _manhattan,
}
"""By the name in sentence-transformers' files; distances are negative, so that more is more alike."""


def late_interaction(query: Vector, document: Vector) -> float:
    """Sum of the best match of each query token, for vectors of tokens [num_tokens, size] (ColBERT)."""
    return float((query.astype(np.float64) @ document.astype(np.float64).T).max(axis=1).sum())
