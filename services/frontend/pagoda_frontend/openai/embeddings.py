"""POST /v1/embeddings."""

import base64
from typing import Any

import numpy as np
import orjson
from fastapi import Request, Response

from pagoda_common.params.outputs import Embedding
from pagoda_common.params.pooling_params import POOLED, PoolingParams
from pagoda_frontend.http.body import read_body
from pagoda_frontend.http.calls import call_of, tenant_of
from pagoda_frontend.http.sse import unless_disconnected
from pagoda_frontend.openai.protocol import EmbeddingBody
from pagoda_frontend.pooling.texts import pooling_prompts, truncation_for
from pagoda_frontend.requests.call_context import unique_id
from pagoda_frontend.requests.embeddings import check_task, embedding_of, embedding_prompts
from pagoda_frontend.requests.params import check_cache_salt, check_unsupported
from pagoda_frontend.requests.run import CollectedSequence, Run
from pagoda_frontend.requests.served_model import ServedModel
from pagoda_frontend.requests.serving import Serving

UNSUPPORTED: dict[str, tuple[Any, ...]] = {"embed_dtype": ("float32",), "endianness": ("native", "little")}
"""Fields of vLLM's, and the values that say what is done anyway."""


class Embeddings:
    """The endpoint."""

    def __init__(self, *, serving: Serving) -> None:
        self._serving = serving

    async def create(self, request: Request) -> Response:
        """Answer one request.

        Raises:
            PagodaError: the request is wrong, was refused, or failed.
        """
        body = await read_body(request, EmbeddingBody, serving=self._serving)
        return await unless_disconnected(request, self._answer(request, body))

    async def _answer(self, request: Request, body: EmbeddingBody) -> Response:
        serving = self._serving
        model = serving.model_named(body.model)
        request_id = unique_id("embd-", request.headers.get("x-request-id") or body.request_id)
        call = call_of(request.headers, body, tenant=tenant_of(request, serving=serving), request_id=request_id)
        check_unsupported(body, UNSUPPORTED)
        check_cache_salt(body.cache_salt)
        check_task(model, "embed", dimensions=body.dimensions)
        prompts = await self._prompts(body, model)
        run = Run(
            call,
            serving=serving,
            model=model,
            prompts=prompts,
            sampling_params=[POOLED] * len(prompts),
            cache_salt=body.cache_salt or "",
            pooling=_pooling_of(body),
        )
        sequences = await run.collect()
        answer = {
            "id": call.request_id,
            "object": "list",
            "created": call.created,
            "model": body.model or model.names[0],
            "data": [_shown(sequence, body) for sequence in sequences],
            "usage": run.usage(),
        }
        size = sum(embedding_of(sequence).nbytes for sequence in sequences)
        text = await serving.work.run_sized(
            lambda: orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY), num_bytes=size
        )
        return Response(text, media_type="application/json", headers={"X-Request-Id": call.request_id})

    async def _prompts(self, body: EmbeddingBody, model: ServedModel) -> list[list[int]]:
        given: list[Any] = body.input if isinstance(body.input, list) else [body.input]
        if isinstance(body.input, list) and given and isinstance(given[0], int):
            given = [given]
        prefix = model.prompt_files.prompt_of(body.prompt_name)
        if prefix:
            given = [prefix + one if isinstance(one, str) else one for one in given]
        truncation = truncation_for(body, model)
        add_special_tokens = body.add_special_tokens is not False
        if model.only_pools:
            prompts = await pooling_prompts(
                given,
                serving=self._serving,
                model=model,
                field="input",
                add_special_tokens=add_special_tokens,
                truncation=truncation,
            )
            return [prompt.token_ids for prompt in prompts]
        return await embedding_prompts(
            given, model=model, field="input", add_special_tokens=add_special_tokens, truncation=truncation
        )


def _pooling_of(body: EmbeddingBody) -> PoolingParams:
    given = body.use_activation if body.use_activation is not None else body.normalize
    return PoolingParams(task="embed", normalize=given, dimensions=body.dimensions)


def _shown(sequence: CollectedSequence, body: EmbeddingBody) -> dict[str, Any]:
    values: Embedding | str = embedding_of(sequence)
    if body.encoding_format == "base64":
        values = base64.b64encode(np.ascontiguousarray(values, dtype="<f4").tobytes()).decode("ascii")
    return {"index": sequence.index, "object": "embedding", "embedding": values}
