"""POST /pooling, /classify, /score, /rerank and Cohere's /v2/embed."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import orjson
from fastapi import Request, Response

from pagoda_common.engine.similarity import SIMILARITIES, late_interaction
from pagoda_common.errors import InvalidRequest
from pagoda_common.params.outputs import Embedding
from pagoda_common.params.pooling_params import POOLED, PoolingParams, PoolingTask
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
from pagoda_frontend.pooling.texts import Given, PoolingPrompt, pooling_prompts, truncation_for
from pagoda_frontend.requests.call_context import unique_id
from pagoda_frontend.requests.embeddings import check_task, embedding_of
from pagoda_frontend.requests.params import check_cache_salt
from pagoda_frontend.requests.run import Run
from pagoda_frontend.requests.served_model import ServedModel
from pagoda_frontend.requests.serving import Serving

COHERE_META = {"api_version": {"version": "2"}}


@dataclass(frozen=True, slots=True)
class _Pooled:
    """What the engine has made."""

    run: Run
    model: ServedModel
    name: str
    """As the client called the model."""
    values: list[Embedding]
    prompts: list[PoolingPrompt]


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
        done = await self._run(request, body, given, params, field="input", prefix="pool-")
        per_token = task in ("token_embed", "token_classify")
        data = [
            {
                "index": index,
                "object": "pooling",
                "data": written(_by_token(values, prompt) if per_token else values, body.encoding_format),
            }
            for index, (values, prompt) in enumerate(zip(done.values, done.prompts, strict=True))
        ]
        return await self._listed(done, data)

    async def _classify(self, request: Request, body: ClassifyBody) -> Response:
        model = self._serving.model_named(body.model)
        check_task(model, "classify")
        given = await self._given(body, model)
        done = await self._run(request, body, given, _params(body, "classify"), field="input", prefix="classify-")
        data = [
            {
                "index": index,
                "label": model.labels[int(np.argmax(values))] if model.labels else str(int(np.argmax(values))),
                "probs": written(values, None),
                "num_classes": len(values),
            }
            for index, values in enumerate(done.values)
        ]
        return await self._listed(done, data)

    async def _score(self, request: Request, body: ScoreBody) -> Response:
        for field, value in (("text_1", body.text_1), ("text_2", body.text_2)):
            if value is None or value == []:
                raise InvalidRequest(f"{field} is missing: it must have at least one text", field=field)
        assert body.text_1 is not None
        assert body.text_2 is not None
        first = [body.text_1] if isinstance(body.text_1, str) else body.text_1
        second = [body.text_2] if isinstance(body.text_2, str) else body.text_2
        if len(first) not in (1, len(second)):
            text = f"text_1 has {len(first)} texts, must have 1 or as many as text_2, {len(second)}"
            raise InvalidRequest(text, field="text_1")
        pairs = list(zip(first * len(second) if len(first) == 1 else first, second, strict=True))
        scores, done = await self._scores(request, body, pairs, field="text_2", prefix="score-")
        data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
        return await self._listed(done, data)

    async def _rerank(self, request: Request, body: RerankBody) -> Response:
        texts = [one if isinstance(one, str) else one.text for one in body.documents]
        if body.top_n is not None and body.top_n < 0:
            raise InvalidRequest(f"top_n must be at least 0, got {body.top_n}", field="top_n")
        if body.truncate_prompt_tokens is None:
            body.truncate_prompt_tokens = body.max_tokens_per_doc
        pairs = [(body.query, text) for text in texts]
        scores, done = await self._scores(request, body, pairs, field="documents", prefix="rerank-")
        order = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n or None]
        shows = body.return_documents is not False
        results = [
            {
                "index": index,
                **({"document": {"text": texts[index]}} if shows else {}),
                "relevance_score": scores[index],
            }
            for index in order
        ]
        tokens = done.run.num_prompt_tokens
        answer = {
            "id": done.run.call.request_id,
            "model": done.name,
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
        done = await self._run(request, body, given, params, field="texts", prefix="embd-")
        answer = {
            "id": done.run.call.request_id,
            "embeddings": cohere_forms(done.values, body.embedding_types or ["float"]),
            "texts": texts,
            "meta": COHERE_META | {"billed_units": {"input_tokens": done.run.num_prompt_tokens}},
        }
        return await self._answer(answer, done)

    async def _scores(
        self, request: Request, body: PoolingBody, pairs: list[tuple[str, str]], *, field: str, prefix: str
    ) -> tuple[list[float], _Pooled]:
        """A score for each pair: of a model that scores, or by the vectors of its two texts."""
        model = self._serving.model_named(body.model)
        tasks = model.pooling_tasks
        if "score" in tasks:
            done = await self._run(request, body, pairs, _params(body, "score"), field=field, prefix=prefix)
            return [float(values[0]) for values in done.values], done
        by_tokens = tasks[:1] == ("token_embed",)
        task: PoolingTask = "token_embed" if by_tokens else "embed"
        check_task(model, task)
        texts = list(dict.fromkeys(text for pair in pairs for text in pair))
        done = await self._run(request, body, texts, PoolingParams(task=task), field=field, prefix=prefix)
        found = {
            text: _by_token(values, prompt) if by_tokens else values
            for text, values, prompt in zip(texts, done.values, done.prompts, strict=True)
        }
        alike = late_interaction if by_tokens else SIMILARITIES[model.prompt_files.similarity]
        return await self._serving.work.run(
            lambda: [alike(found[one], found[other]) for one, other in pairs],
            num_bytes=sum(values.nbytes for values in found.values()),
        ), done

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

    async def _run(
        self,
        request: Request,
        body: PoolingBody,
        given: Sequence[Given],
        params: PoolingParams,
        *,
        field: str,
        prefix: str,
    ) -> _Pooled:
        serving = self._serving
        model = serving.model_named(body.model)
        request_id = unique_id(prefix, request.headers.get("x-request-id") or body.request_id)
        call = call_of(request.headers, body, tenant=tenant_of(request, serving=serving), request_id=request_id)
        check_cache_salt(body.cache_salt)
        prompts = await pooling_prompts(
            given,
            serving=serving,
            model=model,
            field=field,
            add_special_tokens=body.add_special_tokens is not False,
            truncation=truncation_for(body, model),
        )
        run = Run(
            call,
            serving=serving,
            model=model,
            prompts=[prompt.token_ids for prompt in prompts],
            sampling_params=[POOLED] * len(prompts),
            cache_salt=body.cache_salt or "",
            pooling=[_paired(params, prompt.second_text_start) for prompt in prompts],
        )
        sequences = await run.collect()
        return _Pooled(run, model, body.model or model.names[0], [embedding_of(one) for one in sequences], prompts)

    async def _listed(self, done: _Pooled, data: list[dict[str, Any]]) -> Response:
        answer = {
            "id": done.run.call.request_id,
            "object": "list",
            "created": done.run.call.created,
            "model": done.name,
            "data": data,
            "usage": done.run.usage(),
        }
        return await self._answer(answer, done)

    async def _answer(self, answer: dict[str, Any], done: _Pooled) -> Response:
        size = sum(values.nbytes for values in done.values)
        text = await self._serving.work.run_sized(
            lambda: orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY), num_bytes=size
        )
        return Response(text, media_type="application/json", headers={"X-Request-Id": done.run.call.request_id})


def _params(body: PoolingBody, task: PoolingTask, *, dimensions: int | None = None) -> PoolingParams:
    return PoolingParams(task=task, normalize=body.normalize, use_activation=body.use_activation, dimensions=dimensions)


def _paired(params: PoolingParams, second_text_start: int) -> PoolingParams:
    if not second_text_start:
        return params
    return PoolingParams(task=params.task, use_activation=params.use_activation, second_text_start=second_text_start)


def _by_token(values: Embedding, prompt: PoolingPrompt) -> Embedding:
    """[num_tokens, size]: some poolings leave out special tokens."""
    for num_rows in (len(prompt.token_ids), len(prompt.token_ids) - 1):
        if num_rows and len(values) % num_rows == 0:
            return values.reshape(num_rows, -1)
    return values.reshape(-1, 1)


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
