"""POST /pooling, /classify, /score, /rerank and Cohere's /v2/embed."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson
from fastapi import Request, Response

from pagoda_common.errors import InvalidRequest
from pagoda_common.params.outputs import Embedding
from pagoda_common.params.pooling_params import PoolingParams, PoolingTask, task_refusal
from pagoda_common.text.pooling_prompts import Given, pairs_of
from pagoda_frontend.budget.caller import hold_more
from pagoda_frontend.http.answers.sse import unless_disconnected
from pagoda_frontend.http.body import read_body
from pagoda_frontend.http.calls import call_of, tenant_of
from pagoda_frontend.pooling.answers import bytes_answer, cohere_forms, written
from pagoda_frontend.pooling.inputs import inputs_of
from pagoda_frontend.pooling.protocol import (
    ClassifyBody,
    CohereEmbedBody,
    PoolBody,
    PoolingBody,
    RerankBody,
    ScoreBody,
)
from pagoda_frontend.pooling.served import check_served
from pagoda_frontend.pooling.texts import truncation_for
from pagoda_frontend.pooling.work import Pooled, PoolingCall, pool_texts, ranked, score_pairs
from pagoda_frontend.requests.call_context import unique_id
from pagoda_frontend.requests.embeddings import check_task
from pagoda_frontend.serving.served_model import ServedModel
from pagoda_frontend.serving.serving import Serving

COHERE_TYPES = ("search_document", "search_query", "classification", "clustering", "image")
JSON_FACTOR = 5
"""Bytes of JSON for each byte of the values: up to 20 digits for four bytes."""
BYTES_FACTOR = 2
"""The same for answers of bytes: in parts, and as a whole."""
SCORING: tuple[PoolingTask, ...] = ("score", "embed", "token_embed")
"""Tasks that scores are made from; vectors are compared."""
COHERE_META = {"api_version": {"version": "2"}}


class PoolingCalls:
    """The endpoints."""

    def __init__(self, *, serving: Serving) -> None:
        self._serving = serving

    async def pool(self, request: Request) -> Response:
        """Pool texts or token ids by any task of the model."""
        body = await read_body(request, PoolBody, serving=self._serving)
        return await unless_disconnected(request, self._pool(request, body))

    async def classify(self, request: Request) -> Response:
        """Classify texts: the probabilities of the labels."""
        body = await read_body(request, ClassifyBody, serving=self._serving)
        return await unless_disconnected(request, self._classify(request, body))

    async def score(self, request: Request) -> Response:
        """Score pairs of texts."""
        body = await read_body(request, ScoreBody, serving=self._serving)
        return await unless_disconnected(request, self._score(request, body))

    async def rerank(self, request: Request) -> Response:
        """Sort documents by their relevance to a query (Jina's and Cohere's rerank API)."""
        body = await read_body(request, RerankBody, serving=self._serving)
        return await unless_disconnected(request, self._rerank(request, body))

    async def cohere_embed(self, request: Request) -> Response:
        """Embed texts (Cohere's API)."""
        body = await read_body(request, CohereEmbedBody, serving=self._serving)
        return await unless_disconnected(request, self._cohere_embed(request, body))

    async def _pool(self, request: Request, body: PoolBody) -> Response:
        model = self._serving.model_named(body.model)
        default: PoolingTask = next(iter(model.pooling_tasks), "embed")
        if body.task == "plugin":
            raise task_refusal(body.task, model.pooling_tasks, model.unserved_pooling_tasks)
        task = default if body.task is None else body.task
        check_task(model, task, dimensions=body.dimensions)
        given = await inputs_of(body, model, serving=self._serving)
        params = _params(body, task, dimensions=body.dimensions)
        asked = self._asked(request, body, "input", "pool-", prefix=model.prompt_files.prompt_of(body.prompt_name))
        done = await pool_texts(asked, given, params, serving=self._serving)
        made = [done.of_task(task, place) for place in range(len(done.values))]
        return await values_answer(body, done, made, name="data", kind="pooling", serving=self._serving)

    async def _classify(self, request: Request, body: ClassifyBody) -> Response:
        model = self._serving.model_named(body.model)
        check_served(model, "classify")
        given = await inputs_of(body, model, serving=self._serving)
        asked = self._asked(request, body, "input", "classify-", prefix=model.prompt_files.prompt_of(body.prompt_name))
        done = await pool_texts(asked, given, _params(body, "classify"), serving=self._serving)
        data = [
            {
                "index": place,
                "label": model.label(int(np.argmax(values))),
                "probs": written(values, None),
                "num_classes": len(values),
            }
            for place, values in enumerate(done.values)
        ]
        return await self._listed(body, done, data)

    async def _score(self, request: Request, body: ScoreBody) -> Response:
        check_served(self._serving.model_named(body.model), *SCORING)
        for field, value in (("text_1", body.text_1), ("text_2", body.text_2)):
            if value is None:
                raise InvalidRequest(f"{field} is missing: it must have at least one text", field=field)
        first, second = _list(body.text_1), _list(body.text_2)
        pairs = pairs_of(first, second, field="text_1", other="text_2")
        asked = self._asked(request, body, "text_2", "score-")
        scores, done = await score_pairs(asked, pairs, _params(body, "score"), serving=self._serving)
        data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
        return await self._listed(body, done, data)

    async def _rerank(self, request: Request, body: RerankBody) -> Response:
        check_served(self._serving.model_named(body.model), *SCORING)
        texts = [one if isinstance(one, str) else one.text for one in body.documents]
        if body.top_n is not None and body.top_n < 0:
            raise InvalidRequest(f"top_n must be at least 0, got {body.top_n}", field="top_n")
        pairs = pairs_of([body.query], texts, field="query", other="documents")
        asked = self._asked(request, body, "documents", "rerank-")
        scores, done = await score_pairs(asked, pairs, _params(body, "score"), serving=self._serving)
        shows = body.return_documents is not False
        results = [
            {
                "index": index,
                **({"document": {"text": texts[index]}} if shows else {}),
                "relevance_score": scores[index],
            }
            for index in ranked(scores, body.top_n)
        ]
        tokens = done.run.num_prompt_tokens
        answer = {
            "id": done.run.call.request_id,
            "model": body.model or done.run.model.names[0],
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
            "results": results,
            "meta": COHERE_META | {"billed_units": {"search_units": 1}},
        }
        return await self._answer(answer, done)

    async def _cohere_embed(self, request: Request, body: CohereEmbedBody) -> Response:
        model = self._serving.model_named(body.model)
        check_served(model, "embed")
        check_task(model, "embed", dimensions=body.output_dimension)
        texts = _cohere_texts(body)
        if body.truncate_prompt_tokens is None and (body.truncate != "NONE" or body.max_tokens):
            body.truncate_prompt_tokens = min(body.max_tokens or model.max_model_len, model.max_model_len)
            body.truncation_side = "left" if body.truncate == "START" else "right"
        given: list[Given] = list(texts)
        params = _params(body, "embed", dimensions=body.output_dimension)
        asked = self._asked(request, body, "texts", "embd-", prefix=_cohere_prompt(body.input_type, model))
        done = await pool_texts(asked, given, params, serving=self._serving)
        answer = {
            "id": done.run.call.request_id,
            "embeddings": cohere_forms(done.values, body.embedding_types or ["float"]),
            "texts": texts,
            "meta": COHERE_META | {"billed_units": {"input_tokens": done.run.num_prompt_tokens, "image_tokens": 0}},
        }
        return await self._answer(answer, done)

    def _asked(
        self,
        request: Request,
        body: PoolingBody,
        field: str,
        kind: str,
        *,
        prefix: str = "",
    ) -> PoolingCall:
        serving = self._serving
        model = serving.model_named(body.model)
        request_id = unique_id(kind, request.headers.get("x-request-id") or body.request_id)
        return PoolingCall(
            call=call_of(request.headers, body, tenant=tenant_of(request, serving=serving), request_id=request_id),
            model=model,
            field=field,
            add_special_tokens=body.add_special_tokens is not False,
            truncation=truncation_for(body, model),
            prefix=prefix,
            max_query_tokens=_limit(body, "max_tokens_per_query"),
            max_document_tokens=_limit(body, "max_tokens_per_doc"),
            cache_salt=body.cache_salt,
        )

    async def _listed(self, body: PoolingBody, done: Pooled, data: list[dict[str, Any]]) -> Response:
        return await self._answer(_listed(body, done, data), done)

    async def _answer(self, answer: dict[str, Any], done: Pooled) -> Response:
        return await json_answer(answer, done, serving=self._serving)


async def values_answer(
    body: Any, done: Pooled, made: Sequence[Embedding], *, name: str, kind: str, serving: Serving
) -> Response:
    """The answer of /v1/embeddings and /pooling, in the body's encoding_format.

    Args:
        made: the result of each input.
        name: of the field with the values.
        kind: the `object` of each entry.
    """
    size = sum(values.nbytes for values in done.values)
    if body.encoding_format in ("bytes", "bytes_only"):
        hold_more(BYTES_FACTOR * size)
        answer = await serving.work.run_sized(
            lambda: bytes_answer(
                made,
                _head(body, done),
                dtype=body.embed_dtype,
                endianness=body.endianness,
                has_metadata=body.encoding_format == "bytes",
            ),
            num_bytes=size,
        )
        answer.headers["X-Request-Id"] = done.run.call.request_id
        return answer
    data = [
        {
            "index": index,
            "object": kind,
            name: written(values, body.encoding_format, body.embed_dtype, body.endianness),
        }
        | ({"num_pieces": done.num_pieces(index)} if done.num_pieces(index) > 1 else {})
        for index, values in enumerate(made)
    ]
    return await json_answer(_listed(body, done, data), done, serving=serving)


async def json_answer(answer: dict[str, Any], done: Pooled, *, serving: Serving) -> Response:
    """JSON, written on a thread where it is long."""
    size = sum(values.nbytes for values in done.values)
    hold_more(JSON_FACTOR * size)
    text = await serving.work.run_sized(lambda: orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY), num_bytes=size)
    return Response(text, media_type="application/json", headers={"X-Request-Id": done.run.call.request_id})


def _head(body: Any, done: Pooled) -> dict[str, Any]:
    call = done.run.call
    return {
        "id": call.request_id,
        "created": call.created,
        "model": body.model or done.run.model.names[0],
        "usage": done.run.usage(),
    }


def _listed(body: Any, done: Pooled, data: list[dict[str, Any]]) -> dict[str, Any]:
    head = _head(body, done)
    usage = head.pop("usage")
    return {"id": head.pop("id"), "object": "list", **head, "data": data, "usage": usage}


def _cohere_prompt(input_type: str | None, model: ServedModel) -> str:
    """The prompt for a text of this type; Cohere's own types, which its clients must send, may have no prompt."""
    prompts = model.prompt_files
    if input_type is not None and input_type not in (*COHERE_TYPES, *prompts.prompts):
        known = ", ".join(dict.fromkeys([*prompts.prompts, *COHERE_TYPES]))
        told = f"Unsupported input_type {input_type[:100]!r}. Supported values: {known[:500]}"
        raise InvalidRequest(told, field="input_type")
    return prompts.prompt_of(input_type, is_strict=False)


def _params(body: PoolingBody, task: PoolingTask, *, dimensions: int | None = None) -> PoolingParams:
    return PoolingParams(task=task, normalize=body.normalize, use_activation=body.use_activation, dimensions=dimensions)


def _limit(body: PoolingBody, field: str) -> int:
    """Maximum number of tokens that are kept of one text of each pair, in bodies with pairs; 0: all."""
    most = getattr(body, field, None) or 0
    if most < 0:
        raise InvalidRequest(f"{field} must be a non-negative integer, got {most}", field=field)
    return int(most)


def _list(given: str | list[str] | None) -> list[str]:
    return [given] if isinstance(given, str) else given or []


def _cohere_texts(body: CohereEmbedBody) -> list[str]:
    if (body.texts is None) == (body.inputs is None):
        raise InvalidRequest("there must be either texts or inputs", field="texts")
    if body.texts is not None:
        return list(body.texts)
    texts = []
    for number, one in enumerate(body.inputs or ()):
        parts = [part.get("text") for part in one.content]
        if any(not isinstance(part, str) for part in parts):
            raise InvalidRequest(f"inputs.{number}.content has a part that is not text", field="inputs")
        texts.append("\n".join(str(part) for part in parts))
    return texts
