"""Scores of pairs: by a model that scores, by its vectors, or by vectors of tokens; and what is asked for of texts."""

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from pagoda_common.errors import InvalidRequest
from pagoda_common.params.pooling_params import PoolingParams
from pagoda_frontend.pooling import work
from pagoda_frontend.pooling.work import Pooled, _paired, score_pairs

VECTORS = {"a": [1.0, 0.0], "b": [0.0, 2.0], "c": [3.0, 4.0]}
"""Also the vectors of two tokens with one value each."""


async def scored(monkeypatch: pytest.MonkeyPatch, *tasks: str, similarity: Any = "dot") -> tuple[list[float], Any, int]:
    """Scores of two pairs, what was pooled, and the bytes of the work on a thread."""
    asked_for: list[Any] = []
    sizes: list[int] = []

    async def pool(asked: Any, given: Any, params: PoolingParams, *, serving: Any) -> Pooled:
        asked_for.append((list(given), params))
        values = [np.array(VECTORS.get(one, [0.5]), np.float32) for one in given]
        prompts = [SimpleNamespace(token_ids=[1, 2])] * len(values)
        return Pooled(cast("Any", None), values, cast("Any", prompts))

    async def run(made: Any, *, num_bytes: int) -> Any:
        sizes.append(num_bytes)
        return made()

    monkeypatch.setattr(work, "pool_texts", pool)
    files = SimpleNamespace(similarity=similarity)
    model = SimpleNamespace(
        pooling_tasks=tasks,
        prompt_files=files,
        embedding_size=2,
        unserved_pooling_tasks=(),
        has_matryoshka=False,
        matryoshka_dimensions=(),
    )
    monkeypatch.setattr(work, "maker_of", lambda model, **options: SimpleNamespace(cuts_pairs=False))
    asked = cast("Any", SimpleNamespace(model=model, field="queries", max_query_tokens=None, max_document_tokens=None))
    serving = cast("Any", SimpleNamespace(work=SimpleNamespace(run=run)))
    pairs = [("a", "b"), ("a", "c")]
    scores, _ = await score_pairs(asked, pairs, PoolingParams(task="score", use_activation=False), serving=serving)
    return scores, asked_for, sum(sizes)


async def test_a_model_that_scores_gets_the_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    scores, asked_for, _ = await scored(monkeypatch, "embed", "score")
    assert scores == [0.5, 0.5]
    assert asked_for == [([("a", "b"), ("a", "c")], PoolingParams(task="score", use_activation=False))]


@pytest.mark.parametrize(("similarity", "expected"), [("dot", [0.0, 3.0]), ("cosine", [0.0, 0.6])])
async def test_other_models_make_each_text_once_and_compare(
    monkeypatch: pytest.MonkeyPatch, similarity: str, expected: list[float]
) -> None:
    scores, asked_for, num_bytes = await scored(monkeypatch, "embed", "token_embed", similarity=similarity)
    assert scores == pytest.approx(expected)
    assert asked_for == [(["a", "b", "c"], PoolingParams(task="embed"))]
    assert num_bytes == 3 * 8


@pytest.mark.parametrize("tasks", [("token_embed",), ("token_embed", "embed")])
async def test_a_model_whose_default_is_vectors_of_tokens_adds_best_matches(
    monkeypatch: pytest.MonkeyPatch, tasks: tuple[str, ...]
) -> None:
    scores, asked_for, _ = await scored(monkeypatch, *tasks)
    assert scores == [2.0, 4.0]
    assert asked_for == [(["a", "b", "c"], PoolingParams(task="token_embed"))]


async def test_a_model_that_does_neither_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidRequest):
        await scored(monkeypatch, "classify")


def test_a_pair_says_where_its_second_text_begins() -> None:
    given = PoolingParams(task="score", use_activation=False)
    assert _paired(given, 0) is given
    assert _paired(given, 7) == PoolingParams(task="score", use_activation=False, second_text_start=7)
