"""Vectors, ranks and values of tokens as answers have them, in each type."""

import base64
import json
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import orjson
import pytest

from pagoda_frontend.pooling.answers import bytes_answer, cohere_forms, written
from pagoda_frontend.pooling.texts import _parts
from pagoda_frontend.pooling.work import Pooled, ranked

VECTOR = np.array([1.0, -1.0, 0.5, 0.0, -0.25, 0.003, 2.0, -2.0, 1.0], np.float32)


def test_vectors_in_coheres_types() -> None:
    made = cohere_forms([VECTOR], ["int8", "uint8", "binary", "ubinary", "base64", "float", "int8"])
    assert list(made) == ["int8", "uint8", "binary", "ubinary", "base64", "float"]
    assert made["int8"] == [[127, -127, 64, 0, -32, 0, 127, -128, 127]]
    assert made["uint8"] == [[255, 1, 192, 128, 96, 128, 255, 0, 255]]
    assert made["ubinary"] == [[0b10100110, 0b10000000]]
    assert made["binary"] == [[0b10100110 - 128, 0]]
    assert base64.b64decode(made["base64"][0]) == VECTOR.tobytes()
    np.testing.assert_array_equal(made["float"][0], VECTOR)


def test_vectors_as_they_stand_in_an_answer() -> None:
    two = np.array([1.0, 2.0], np.float32)
    assert orjson.loads(orjson.dumps(written(two, None), option=orjson.OPT_SERIALIZE_NUMPY)) == [1.0, 2.0]
    assert base64.b64decode(written(two, "base64")) == b"\x00\x00\x80?\x00\x00\x00@"
    assert base64.b64decode(written(two, "base64", "float16", "big")) == b"\x3c\x00\x40\x00"
    assert base64.b64decode(written(two, "base64", "bfloat16", "little")) == b"\x80\x3f\x00\x40"


def test_vectors_as_bytes_have_their_places_in_a_header() -> None:
    values = [np.ones((2, 3), np.float32), np.zeros(4, np.float32)]
    answer = bytes_answer(values, {"id": "x"}, dtype="float16", has_metadata=True)
    assert json.loads(answer.headers["metadata"]) == {
        "id": "x",
        "data": [
            {"index": 0, "embed_dtype": "float16", "endianness": "little", "start": 0, "end": 12, "shape": [2, 3]},
            {"index": 1, "embed_dtype": "float16", "endianness": "little", "start": 12, "end": 20, "shape": [4]},
        ],
    }
    assert answer.body == b"\x00\x3c" * 6 + bytes(8)
    assert answer.media_type == "application/octet-stream"
    plain = bytes_answer(values, {}, endianness="big", has_metadata=False)
    assert "metadata" not in plain.headers
    assert bytes(plain.body)[:4] == b"\x3f\x80\x00\x00"
    told = bytes_answer(values, {}, endianness="big", has_metadata=True).headers["metadata"]
    assert [(one["embed_dtype"], one["endianness"]) for one in json.loads(told)["data"]] == [("float32", "big")] * 2


def test_ranks_are_stable_and_cut() -> None:
    scores = [1.0, 3.0, 3.0, 2.0]
    assert ranked(scores, None) == ranked(scores, 0) == ranked(scores, 9) == [1, 2, 3, 0]
    assert ranked(scores, 2) == [1, 2]
    assert ranked([], 3) == []


@pytest.mark.parametrize(
    ("num_tokens", "num_values", "shape"), [(3, 6, (3, 2)), (3, 4, (2, 2)), (3, 5, (5, 1)), (1, 4, (1, 4))]
)
def test_values_of_tokens_are_rows(num_tokens: int, num_values: int, shape: tuple[int, int]) -> None:
    prompt: Any = SimpleNamespace(token_ids=[1] * num_tokens, pieces=[[1], [2], [3]])
    done = Pooled(cast("Any", None), [np.zeros(9, np.float32), np.arange(num_values, dtype=np.float32)], [prompt] * 2)
    assert done.by_token(1).shape == shape
    assert done.num_pieces(1) == 3


def test_texts_are_taken_by_threads_in_runs_of_a_size() -> None:
    light = 64 * 1024
    assert _parts([]) == []
    assert _parts(["a"] * 1024) == [["a"] * 1024], "each counts 64 at least"
    assert [len(part) for part in _parts(["a"] * 1025)] == [1024, 1]
    assert [len(part) for part in _parts(["a" * light, "b", ("c" * 40_000, "d" * 40_000), [1] * 10])] == [1, 1, 1, 1]
    assert [len(part) for part in _parts(["a" * (light - 64), "b", "c"])] == [2, 1]
