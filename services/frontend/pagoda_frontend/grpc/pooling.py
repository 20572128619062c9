"""The pooling calls of Inference (vectors, labels, scores, ranks): messages to texts, and results to messages."""

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from pagoda.v1 import inference_pb2
from pagoda_common.engine.convert import pooling_params_from_proto
from pagoda_common.params.pooling_params import PoolingParams, PoolingTask
from pagoda_common.params.truncation import truncation_of
from pagoda_common.text.pooling_prompts import Given, pairs_of
from pagoda_frontend.budget.caller import hold_more
from pagoda_frontend.pooling.work import PER_TOKEN, Pooled, PoolingCall, pool_texts, ranked, score_pairs
from pagoda_frontend.requests.call_context import CallContext
from pagoda_frontend.requests.embeddings import check_task
from pagoda_frontend.serving.serving import Serving

Answer = TypeVar("Answer")

MESSAGE_FACTOR = 2
"""Bytes of memory that an answer takes for each byte of its values: as a message, and serialized."""


async def embed(
    request: inference_pb2.EmbedRequest, call: CallContext, *, serving: Serving
) -> inference_pb2.EmbedResponse:
    """Embed."""
    await serving.look_for(request.model)
    done = await _pool(request, call, pooling_params_from_proto(request.pooling), "embed", serving=serving)

    def answer() -> inference_pb2.EmbedResponse:
        embeddings = [
            inference_pb2.Embedding(values=values.tolist(), num_pieces=_num_pieces(done, place))
            for place, values in enumerate(done.values)
        ]
        return inference_pb2.EmbedResponse(request_id=call.request_id, embeddings=embeddings, usage=usage_of(done))

    return await _answered(answer, done, serving=serving)


async def _answered(make: Callable[[], Answer], done: Pooled, *, serving: Serving) -> Answer:
    """The result of `make` for all values, on a thread where they are many; raises QueueFull."""
    size = sum(values.nbytes for values in done.values)
    hold_more(MESSAGE_FACTOR * size)
    return await serving.work.run_sized(make, num_bytes=size)


def _num_pieces(done: Pooled, place: int) -> int:
    number = done.num_pieces(place)
    return number if number > 1 else 0


async def pool(
    request: inference_pb2.PoolRequest, call: CallContext, *, serving: Serving
) -> inference_pb2.PoolResponse:
    """Pool."""
    model = serving.model_named(request.model)
    given = pooling_params_from_proto(request.pooling)
    default: PoolingTask = next(iter(model.pooling_tasks), "embed")
    task = default if given.task is None else given.task
    done = await _pool(request, call, given, task, serving=serving)

    def text_of(place: int) -> inference_pb2.PooledText:
        rows = done.by_token(place) if task in PER_TOKEN else done.values[place].reshape(1, -1)
        pieces = _num_pieces(done, place)
        return inference_pb2.PooledText(values=rows.ravel().tolist(), num_rows=len(rows), num_pieces=pieces)

    def answer() -> inference_pb2.PoolResponse:
        texts = map(text_of, range(len(done.values)))
        return inference_pb2.PoolResponse(request_id=call.request_id, texts=texts, usage=usage_of(done))

    return await _answered(answer, done, serving=serving)


async def classify(
    request: inference_pb2.ClassifyRequest, call: CallContext, *, serving: Serving
) -> inference_pb2.ClassifyResponse:
    """Classify."""
    model = serving.model_named(request.model)
    done = await _pool(request, call, pooling_params_from_proto(request.pooling), "classify", serving=serving)

    def answer() -> inference_pb2.ClassifyResponse:
        texts = [
            inference_pb2.Labels(label=model.label(int(np.argmax(values))), probabilities=values.tolist())
            for values in done.values
        ]
        return inference_pb2.ClassifyResponse(request_id=call.request_id, texts=texts, usage=usage_of(done))

    return await _answered(answer, done, serving=serving)


async def score(
    request: inference_pb2.ScoreRequest, call: CallContext, *, serving: Serving
) -> inference_pb2.ScoreResponse:
    """Score."""
    pairs = pairs_of(request.queries, request.documents, field="queries", other="documents")
    scores, done = await _score(request, call, pairs, serving=serving)
    return inference_pb2.ScoreResponse(request_id=call.request_id, scores=scores, usage=usage_of(done))


async def rerank(
    request: inference_pb2.RerankRequest, call: CallContext, *, serving: Serving
) -> inference_pb2.RerankResponse:
    """Rerank."""
    pairs = pairs_of([request.query], request.documents, field="query", other="documents")
    scores, done = await _score(request, call, pairs, serving=serving)
    results = [
        inference_pb2.RankedDocument(index=place, relevance_score=scores[place])
        for place in ranked(scores, request.top_n)
    ]
    return inference_pb2.RerankResponse(request_id=call.request_id, results=results, usage=usage_of(done))


def usage_of(done: Pooled) -> inference_pb2.Usage:
    """Tokens of all texts together."""
    return inference_pb2.Usage(
        num_prompt_tokens=done.run.num_prompt_tokens, num_cached_tokens=done.run.num_cached_tokens
    )


async def _pool(
    request: inference_pb2.EmbedRequest | inference_pb2.PoolRequest | inference_pb2.ClassifyRequest,
    call: CallContext,
    params: PoolingParams,
    task: PoolingTask,
    *,
    serving: Serving,
) -> Pooled:
    prefix = serving.model_named(request.model).prompt_files.prompt_of(request.prompt_name or None)
    asked = _asked(request, call, "inputs", prefix=prefix, serving=serving)
    check_task(asked.model, task, dimensions=params.dimensions)
    given: list[Given] = await serving.work.prepare(
        lambda: [one.text if one.HasField("text") else list(one.token_ids.ids) for one in request.inputs]
    )
    wanted = PoolingParams(
        task=task,
        normalize=params.normalize,
        dimensions=params.dimensions,
        use_activation=params.use_activation,
    )
    return await pool_texts(asked, given, wanted, serving=serving)


async def _score(
    request: Any, call: CallContext, pairs: list[tuple[str, str]], *, serving: Serving
) -> tuple[list[float], Pooled]:
    asked = _asked(request, call, "documents", serving=serving)
    given = pooling_params_from_proto(request.pooling)
    params = PoolingParams(task="score", use_activation=given.use_activation)
    return await score_pairs(asked, pairs, params, serving=serving)


def _asked(request: Any, call: CallContext, field: str, *, prefix: str = "", serving: Serving) -> PoolingCall:
    model = serving.model_named(request.model)
    most = request.truncate_prompt_tokens if request.HasField("truncate_prompt_tokens") else None
    side = "right" if model.only_pools else None
    return PoolingCall(
        call=call,
        model=model,
        field=field,
        truncation=truncation_of(most, side, max_tokens=0, max_model_len=model.max_model_len),  # type: ignore[arg-type]
        prefix=prefix,
        cache_salt=request.cache_salt or None,
    )
