"""Each field of the answers with vectors, labels, scores and ranks over gRPC, and what the engine gets."""

from typing import Any

import grpc
import numpy as np
import pytest

from pagoda.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from pagoda_common.text.tokenizer import Tokenizer
from tests.service.frontend.harness import Running, running_frontend
from tests.service.frontend.pooling.pooling_engine import (
    CLASSIFY,
    EMBED,
    SCORE,
    TOKEN_EMBED,
    PoolingEngine,
    sent_pooling,
)

pytestmark = pytest.mark.usefixtures("pinned")


def stub_of(running: Running) -> Any:
    return inference_pb2_grpc.InferenceStub(running.channel)


def inputs(*given: str | list[int]) -> list[inference_pb2.EmbedInput]:
    return [
        inference_pb2.EmbedInput(text=one)
        if isinstance(one, str)
        else inference_pb2.EmbedInput(token_ids=types_pb2.TokenIds(ids=one))
        for one in given
    ]


CALL: dict[str, Any] = {"request_id": "r", "model": "alias", "priority": -4, "cache_salt": "s"}
"""What every call has."""


def check_call(submits: Any) -> None:
    """Whether CALL came to the engine."""
    assert {(one.priority, one.cache_salt) for one in submits} == {(-4, "s")}
    assert all(one.request_id.startswith("r-") for one in submits)


async def test_embed_and_pool_over_grpc() -> None:
    fake = PoolingEngine(TOKEN_EMBED, EMBED, has_matryoshka=True)
    fake.num_cached_tokens = 1
    async with running_frontend(fake) as running:
        stub = stub_of(running)
        pooling = types_pb2.PoolingParams(normalize=False, dimensions=3, task=TOKEN_EMBED, second_text_start=9)
        request = inference_pb2.EmbedRequest(inputs=inputs([5, 6], [7]), pooling=pooling, **CALL)
        assert await stub.Embed(request) == inference_pb2.EmbedResponse(
            request_id="r",
            embeddings=[
                inference_pb2.Embedding(values=[2, 6, 0, -1]),
                inference_pb2.Embedding(values=[1, 7, 0, -1]),
            ],
            usage=inference_pb2.Usage(num_prompt_tokens=3, num_cached_tokens=2),
        )
        assert sent_pooling(running) == [types_pb2.PoolingParams(task=EMBED, normalize=False, dimensions=3)] * 2
        check_call(fake.submits)
        fake.submits.clear()
        fake.made = {6: [1, 2, 3, 4], 7: [5, 6]}
        pool = inference_pb2.PoolRequest(inputs=inputs([5, 6], [7]), **CALL)
        assert await stub.Pool(pool) == inference_pb2.PoolResponse(
            request_id="r",
            texts=[
                inference_pb2.PooledText(values=[1, 2, 3, 4], num_rows=2),
                inference_pb2.PooledText(values=[5, 6], num_rows=1),
            ],
            usage=inference_pb2.Usage(num_prompt_tokens=3, num_cached_tokens=2),
        )
        assert sent_pooling(running) == [types_pb2.PoolingParams(task=TOKEN_EMBED)] * 2
        check_call(fake.submits)
        fake.submits.clear()
        pool.pooling.CopyFrom(types_pb2.PoolingParams(task=EMBED, use_activation=False, dimensions=2))
        answer = await stub.Pool(pool)
        assert [(list(one.values), one.num_rows) for one in answer.texts] == [([1, 2, 3, 4], 1), ([5, 6], 1)]
        sent = types_pb2.PoolingParams(task=EMBED, normalize=False, dimensions=2, use_activation=False)
        assert sent_pooling(running)[0] == sent


async def test_classify_over_grpc() -> None:
    fake = PoolingEngine(CLASSIFY, labels=["good", "bad"])
    fake.made = {6: [0.25, 0.75], 7: [0.75, 0.25]}
    async with running_frontend(fake) as running:
        pooling = types_pb2.PoolingParams(use_activation=False)
        request = inference_pb2.ClassifyRequest(inputs=inputs([5, 6], [7]), pooling=pooling, **CALL)
        assert await stub_of(running).Classify(request) == inference_pb2.ClassifyResponse(
            request_id="r",
            texts=[
                inference_pb2.Labels(label="bad", probabilities=[0.25, 0.75]),
                inference_pb2.Labels(label="good", probabilities=[0.75, 0.25]),
            ],
            usage=inference_pb2.Usage(num_prompt_tokens=3),
        )
        sent = types_pb2.PoolingParams(task=CLASSIFY, use_activation=False, normalize=False)
        assert sent_pooling(running) == [sent, sent]
        check_call(fake.submits)


async def test_score_and_rerank_over_grpc() -> None:
    tokenizer = Tokenizer.load("pagoda-tiny")
    fake = PoolingEngine(SCORE)
    texts = ["one", "two", "four"]
    for text, score in zip(texts, (0.25, 0.75, 0.5), strict=True):
        fake.made[tokenizer.encode(text)[-1]] = [score]
    pooling = types_pb2.PoolingParams(use_activation=False)
    async with running_frontend(fake) as running:
        stub = stub_of(running)
        asked_score = inference_pb2.ScoreRequest(queries=["q"], documents=texts, pooling=pooling, **CALL)
        answer = await stub.Score(asked_score)
        usage = inference_pb2.Usage(num_prompt_tokens=sum(len(one.prompt_token_ids) // 4 for one in fake.submits))
        assert answer == inference_pb2.ScoreResponse(request_id="r", scores=[0.25, 0.75, 0.5], usage=usage)
        assert sent_pooling(running)[0].use_activation is False
        check_call(fake.submits)
        ranks = [
            inference_pb2.RankedDocument(index=index, relevance_score=score)
            for index, score in ((1, 0.75), (2, 0.5), (0, 0.25))
        ]
        for top_n, shown in ((0, 3), (1, 1), (2, 2), (9, 3)):
            fake.submits.clear()
            request = inference_pb2.RerankRequest(query="q", documents=texts, top_n=top_n, pooling=pooling, **CALL)
            ranked = inference_pb2.RerankResponse(request_id="r", results=ranks[:shown], usage=usage)
            assert await stub.Rerank(request) == ranked
            check_call(fake.submits)
            assert [(one.task, one.use_activation) for one in sent_pooling(running)] == [(SCORE, False)] * 3


async def test_texts_are_cut_over_grpc_and_from_the_right_where_the_model_only_pools() -> None:
    for only_pools in (False, True):
        fake = PoolingEngine(EMBED, CLASSIFY, SCORE, only_pools=only_pools)
        fake.made = {}
        async with running_frontend(fake) as running:
            stub = stub_of(running)
            given = inputs([3, 4, 5, 6])
            for call in (
                stub.Pool(inference_pb2.PoolRequest(inputs=given, truncate_prompt_tokens=3)),
                stub.Classify(inference_pb2.ClassifyRequest(inputs=given, truncate_prompt_tokens=3)),
            ):
                await call
                ids = np.frombuffer(fake.submits[-1].prompt_token_ids, "<u4").tolist()
                assert ids == ([3, 4, 5] if only_pools else [4, 5, 6])
            words = ["some words of a text"]
            for call in (
                stub.Score(inference_pb2.ScoreRequest(queries=["q"], documents=words, truncate_prompt_tokens=3)),
                stub.Rerank(inference_pb2.RerankRequest(query="q", documents=words, truncate_prompt_tokens=3)),
            ):
                await call
                assert len(fake.submits[-1].prompt_token_ids) == 12


@pytest.mark.parametrize(
    ("name", "request_", "field"),
    [
        ("Embed", inference_pb2.EmbedRequest(), "inputs"),
        ("Embed", inference_pb2.EmbedRequest(inputs=inputs([5]), cache_salt="a/b"), "cache_salt"),
        ("Pool", inference_pb2.PoolRequest(), "inputs"),
        ("Pool", inference_pb2.PoolRequest(inputs=inputs([5]), cache_salt="a/b"), "cache_salt"),
        ("Pool", inference_pb2.PoolRequest(inputs=inputs([5]), truncate_prompt_tokens=-2), "truncate_prompt_tokens"),
        ("Classify", inference_pb2.ClassifyRequest(inputs=inputs([5])), "model"),
        ("Score", inference_pb2.ScoreRequest(documents=["a"]), "queries"),
        ("Score", inference_pb2.ScoreRequest(queries=["a"]), "documents"),
        ("Rerank", inference_pb2.RerankRequest(query="a"), "documents"),
        ("Rerank", inference_pb2.RerankRequest(query="a", documents=[""] * 2049), "documents"),
    ],
)
async def test_what_is_wrong_is_named_over_grpc(name: str, request_: Any, field: str) -> None:
    async with running_frontend(PoolingEngine(EMBED)) as running:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await getattr(stub_of(running), name)(request_)
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        trailers = dict(caught.value.trailing_metadata() or ())
        assert field.encode() in trailers["grpc-status-details-bin"]
        assert not running.fake.submits
