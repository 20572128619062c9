"""The response bodies with vectors, labels, scores and ranks."""

import base64
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import orjson
from fastapi import Response
from pydantic import BaseModel

from pagoda_common.params.outputs import Embedding
from pagoda_frontend.pages.answers import UsageAnswer
from pagoda_frontend.pooling.binary_values import EmbedDtype, Endianness, to_bytes


class PoolingObject(BaseModel):
    """The result of one input."""

    index: int
    object: Literal["pooling"]
    data: list[Any] | str
    """Values, lists of values for each token, or base64."""


class PoolingAnswer(BaseModel):
    """POST /pooling."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[PoolingObject]
    usage: UsageAnswer


class ClassifyObject(BaseModel):
    """The labels of one input."""

    index: int
    label: str
    """The likeliest label."""
    probs: list[float]
    num_classes: int


class ClassifyAnswer(BaseModel):
    """POST /classify."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[ClassifyObject]
    usage: UsageAnswer


class ScoreObject(BaseModel):
    """The score of one pair."""

    index: int
    object: Literal["score"]
    score: float


class ScoreAnswer(BaseModel):
    """POST /score."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[ScoreObject]
    usage: UsageAnswer


class RankedDocument(BaseModel):
    """A document's relevance."""

    index: int
    """Index of the document in the request."""
    document: dict[str, str] | None = None
    relevance_score: float


class RerankAnswer(BaseModel):
    """POST /rerank."""

    id: str
    model: str
    usage: dict[str, int]
    results: list[RankedDocument]
    """The most relevant first."""
    meta: dict[str, Any]


class CohereEmbedAnswer(BaseModel):
    """POST /v2/embed."""

    id: str
    embeddings: dict[str, list[Any]]
    """Embeddings by type."""
    texts: list[str]
    meta: dict[str, Any]


def written(
    values: Embedding,
    encoding_format: str | None,
    dtype: EmbedDtype | None = None,
    endianness: Endianness | None = None,
) -> Any:
    """Values in the form of an answer: as numbers, or as base64 of their bytes."""
    if encoding_format == "base64":
        return base64.b64encode(to_bytes(values, dtype, endianness)).decode("ascii")
    return np.ascontiguousarray(values)


def bytes_answer(
    values: Sequence[Embedding],
    head: Mapping[str, Any],
    *,
    dtype: EmbedDtype | None = None,
    endianness: Endianness | None = None,
    has_metadata: bool,
) -> Response:
    """An answer whose body is the values of all inputs; `head`: what its header contains besides the place of each."""
    parts = [to_bytes(one, dtype, endianness) for one in values]
    places, start = [], 0
    for index, (one, part) in enumerate(zip(values, parts, strict=True)):
        place = {"index": index, "embed_dtype": dtype or "float32", "endianness": endianness or "little"}
        places.append(place | {"start": start, "end": start + len(part), "shape": list(one.shape)})
        start += len(part)
    told = orjson.dumps({**head, "data": places}).decode()
    headers = {"metadata": told} if has_metadata else {}
    return Response(b"".join(parts), media_type="application/octet-stream", headers=headers)


def cohere_forms(vectors: Sequence[Embedding], types: Sequence[str]) -> dict[str, list[Any]]:
    """Vectors in Cohere's types.

    int8 and uint8 map the values of a normalised vector from -1 to 1; binary and ubinary hold the signs, eight per
    byte.
    """
    return {name: [_cohere_form(vector, name) for vector in vectors] for name in dict.fromkeys(types)}


def _cohere_form(vector: Embedding, name: str) -> Any:
    if name == "float":
        return np.ascontiguousarray(vector)
    if name == "base64":
        return written(vector, "base64")
    if name in ("int8", "uint8"):
        scaled = np.clip(np.round(vector * 127), -128, 127).astype(np.int64)
        return (scaled + (128 if name == "uint8" else 0)).tolist()
    packed = np.packbits(vector > 0).astype(np.int64)
    return (packed - (128 if name == "binary" else 0)).tolist()
