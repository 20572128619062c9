"""POST /pooling, /classify, /score, /rerank and Cohere's /v2/embed."""

from typing import Any, cast

import numpy as np
import orjson
from fastapi import Request, Response

from pagoda_common.errors import InvalidRequest
from pagoda_common.params.pooling_params import PoolingParams, PoolingTask
from pagoda_frontend.http.body import read_body
from pagoda_frontend.http.calls import call_of, tenant_of
from pagoda_frontend.http.sse import unless_disconnected
from pagoda_frontend.pooling.answers import cohere_forms, written
from pagoda_frontend.pooling.protocol import (
    ClassifyBody,
    CohereEmbedBody,
    InputBody,
    PoolBody,
    PoolingBody,
    RerankBody,
    ScoreBody,
)
from pagoda_frontend.pooling.texts import Given, truncation_for
from pagoda_frontend.pooling.work import PER_TOKEN, Pooled, PoolingCall, pairs_of, pool_texts, ranked, score_pairs
from pagoda_frontend.requests.call_context import unique_id
from pagoda_frontend.requests.embeddings import check_task
from pagoda_frontend.requests.served_model import ServedModel
from pagoda_frontend.requests.serving import Serving

COHERE_META = {"api_version": {"version": "2"}}


class PoolingCalls:
    """The endpoints."""

    def __init__(self, *, serving: Serving) -> None:
        self._serving = serving

    async def pool(self, request: Request) -> Response:
        """POST /pooling."""
        body = await read_body(request, PoolBody, serving=self._serving)
        return await unless_disconnected(request, self._pool(request, body))

    async def classify(self, request: Request) -> Response:
        """POST /classify."""
        body = await read_body(request, ClassifyBody, serving=self._serving)
        return await unless_disconnected(request, self._classify(request, body))

    async def score(self, request: Request) -> Response:
        """POST /score."""
        body = await read_body(request, ScoreBody, serving=self._serving)
        return await unless_disconnected(request, self._score(request, body))

    async def rerank(self, request: Request) -> Response:
        """POST /rerank."""
        body = await read_body(request, RerankBody, serving=self._serving)
        return await unless_disconnected(request, self._rerank(request, body))

    async def cohere_embed(self, request: Request) -> Response:
        """POST /v2/embed."""
        body = await read_body(request, CohereEmbedBody, serving=self._serving)
        return await unless_disconnected(request, self._cohere_embed(request, body))

    async def _pool(self, request: Request, body: PoolBody) -> Response:
        model = self._serving.model_named(body.model)
        default: PoolingTask = next(iter(model.pooling_tasks), "embed")
        task = default if body.task is None else body.task
        check_task(model, task, dimensions=body.dimensions)
        given = await self._given(body, model)
        params = _params(body, task, dimensions=body.dimensions)
        done = await pool_texts(self._asked(request, body, "input", "pool-"), given, params, serving=self._serving)
        data = [
            {
                "index": place,
                "object": "pooling",
                "data": written(done.by_token(place) if task in PER_TOKEN else values, body.encoding_format),
            }
            for place, values in enumerate(done.values)
        ]
        return await self._listed(body, done, data)

    async def _classify(self, request: Request, body: ClassifyBody) -> Response:
        model = self._serving.model_named(body.model)
        check_task(model, "classify")
        given = await self._given(body, model)
        asked = self._asked(request, body, "input", "classify-")
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
        texts = [one if isinstance(one, str) else one.text for one in body.documents]
        if body.top_n is not None and body.top_n < 0:
            raise InvalidRequest(f"top_n must be at least 0, got {body.top_n}", field="top_n")
        if body.truncate_prompt_tokens is None:
            body.truncate_prompt_tokens = body.max_tokens_per_doc
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
        check_task(model, "embed", dimensions=body.output_dimension)
        texts = _cohere_texts(body)
        if body.truncate_prompt_tokens is None and (body.truncate != "NONE" or body.max_tokens):
            body.truncate_prompt_tokens = min(body.max_tokens or model.max_model_len, model.max_model_len)
            body.truncation_side = "left" if body.truncate == "START" else "right"
        prefix = model.prompt_files.prompt_of(body.input_type, is_strict=False)
        given: list[Given] = [prefix + text for text in texts]
        params = _params(body, "embed", dimensions=body.output_dimension)
        done = await pool_texts(self._asked(request, body, "texts", "embd-"), given, params, serving=self._serving)
        answer = {
            "id": done.run.call.request_id,
            "embeddings": cohere_forms(done.values, body.embedding_types or ["float"]),
            "texts": texts,
            "meta": COHERE_META | {"billed_units": {"input_tokens": done.run.num_prompt_tokens}},
        }
        return await self._answer(answer, done)

    async def _given(self, body: InputBody, model: ServedModel) -> list[Given]:
        if body.messages is not None:
            if body.input is not None:
                raise InvalidRequest("there may be either input or messages, got both", field="messages")
            ids = await model.prompts.from_messages(
                body.messages,
                add_generation_prompt=bool(body.add_generation_prompt),
                chat_template=body.chat_template,
                chat_template_kwargs=body.chat_template_kwargs,
                add_special_tokens=bool(body.add_special_tokens),
                is_counted=True,
            )
            return [ids]
        if body.input is None:
            raise InvalidRequest("input is missing: it must be a text, token ids or a list of these", field="input")
        prefix = model.prompt_files.prompt_of(body.prompt_name)
        if isinstance(body.input, str):
            return [prefix + body.input]
        if body.input and isinstance(body.input[0], int):
            return [body.input]
        texts = cast("list[str | list[int]]", body.input)
        return [prefix + one if isinstance(one, str) else one for one in texts]

    def _asked(self, request: Request, body: PoolingBody, field: str, prefix: str) -> PoolingCall:
        serving = self._serving
        model = serving.model_named(body.model)
        request_id = unique_id(prefix, request.headers.get("x-request-id") or body.request_id)
        return PoolingCall(
            call=call_of(request.headers, body, tenant=tenant_of(request, serving=serving), request_id=request_id),
            model=model,
            field=field,
            add_special_tokens=body.add_special_tokens is not False,
            truncation=truncation_for(body, model),
            cache_salt=body.cache_salt,
        )

    async def _listed(self, body: PoolingBody, done: Pooled, data: list[dict[str, Any]]) -> Response:
        answer = {
            "id": done.run.call.request_id,
            "object": "list",
            "created": done.run.call.created,
            "model": body.model or done.run.model.names[0],
            "data": data,
            "usage": done.run.usage(),
        }
        return await self._answer(answer, done)

    async def _answer(self, answer: dict[str, Any], done: Pooled) -> Response:
        size = sum(values.nbytes for values in done.values)
        text = await self._serving.work.run_sized(
            lambda: orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY), num_bytes=size
        )
        return Response(text, media_type="application/json", headers={"X-Request-Id": done.run.call.request_id})


def _params(body: PoolingBody, task: PoolingTask, *, dimensions: int | None = None) -> PoolingParams:
    return PoolingParams(task=task, normalize=body.normalize, use_activation=body.use_activation, dimensions=dimensions)


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
            raise InvalidRequest(f"inputs.{number}.content has a part that is no text", field="inputs")
        texts.append("\n".join(str(part) for part in parts))
    return texts
