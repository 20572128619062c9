"""POST /v1/embeddings."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson
from fastapi import Request, Response

from pagoda_common.errors import InvalidRequest
from pagoda_common.params.outputs import Embedding
from pagoda_common.params.pooling_params import POOLED, PoolingParams
from pagoda_frontend.http.body import read_body
from pagoda_frontend.http.calls import call_of, tenant_of
from pagoda_frontend.http.sse import unless_disconnected
from pagoda_frontend.openai.protocol import EmbeddingBody
from pagoda_frontend.pooling.answers import written
from pagoda_frontend.pooling.texts import pooling_prompts, truncation_for
from pagoda_frontend.requests.call_context import unique_id
from pagoda_frontend.requests.embeddings import MAX_INPUTS, check_task, embedding_of, embedding_prompts
from pagoda_frontend.requests.params import check_cache_salt, check_unsupported
from pagoda_frontend.requests.run import Run
from pagoda_frontend.requests.served_model import ServedModel
from pagoda_frontend.requests.serving import Serving

UNSUPPORTED: dict[str, tuple[Any, ...]] = {"embed_dtype": ("float32",), "endianness": ("native", "little")}
"""Fields of vLLM's, and the values that say what is done anyway."""

UNIT_TOLERANCE = 1e-3
"""Of the length of a normalised vector."""


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
        pieces = await self._prompts(body, model)
        prompts = [prompt for of_one in pieces for prompt in of_one]
        if len(prompts) > MAX_INPUTS:
            told = f"input makes {len(prompts)} pieces of the model's length, there may be at most {MAX_INPUTS}"
            raise InvalidRequest(told, field="input")
        run = Run(
            call,
            serving=serving,
            model=model,
            prompts=prompts,
            sampling_params=[POOLED] * len(prompts),
            cache_salt=body.cache_salt or "",
            pooling=_pooling_of(body),
        )
        made = iter([embedding_of(sequence) for sequence in await run.collect()])
        values = [mean_of([next(made) for _ in of_one], [len(one) for one in of_one]) for of_one in pieces]
        answer = {
            "id": call.request_id,
            "object": "list",
            "created": call.created,
            "model": body.model or model.names[0],
            "data": [
                {"index": index, "object": "embedding", "embedding": written(one, body.encoding_format)}
                | ({"num_pieces": len(pieces[index])} if len(pieces[index]) > 1 else {})
                for index, one in enumerate(values)
            ],
            "usage": run.usage(),
        }
        size = sum(one.nbytes for one in values)
        text = await serving.work.run_sized(
            lambda: orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY), num_bytes=size
        )
        return Response(text, media_type="application/json", headers={"X-Request-Id": call.request_id})

    async def _prompts(self, body: EmbeddingBody, model: ServedModel) -> list[list[list[int]]]:
        """Of each input its pieces: mostly one."""
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
                splits_long=self._serving.config.enable_long_inputs,
            )
            return [[prompt.token_ids, *prompt.rest] for prompt in prompts]
        whole = await embedding_prompts(
            given, model=model, field="input", add_special_tokens=add_special_tokens, truncation=truncation
        )
        return [[one] for one in whole]


def _pooling_of(body: EmbeddingBody) -> PoolingParams:
    given = body.use_activation if body.use_activation is not None else body.normalize
    return PoolingParams(task="embed", normalize=given, dimensions=body.dimensions)


def mean_of(vectors: Sequence[Embedding], lengths: Sequence[int]) -> Embedding:
    """The mean of vectors, weighted by the tokens after them; of vectors of length 1 it has that length again."""
    if len(vectors) == 1:
        return vectors[0]
    mean = np.average(np.stack(vectors).astype(np.float64), axis=0, weights=lengths)
    if all(abs(float(np.linalg.norm(one)) - 1) < UNIT_TOLERANCE for one in vectors):
        mean /= np.linalg.norm(mean) or 1.0
    return mean.astype(np.float32)
