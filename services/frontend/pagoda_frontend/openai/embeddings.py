"""POST /v1/embeddings."""

from fastapi import Request, Response

from pagoda_common.params.pooling_params import PoolingParams
from pagoda_frontend.http.answers.sse import unless_disconnected
from pagoda_frontend.http.body import read_body
from pagoda_frontend.http.calls import call_of, tenant_of
from pagoda_frontend.openai.protocol import EmbeddingBody
from pagoda_frontend.pooling.handlers import values_answer
from pagoda_frontend.pooling.inputs import inputs_of
from pagoda_frontend.pooling.served import check_served
from pagoda_frontend.pooling.texts import truncation_for
from pagoda_frontend.pooling.work import PoolingCall, pool_texts
from pagoda_frontend.requests.call_context import unique_id
from pagoda_frontend.requests.embeddings import check_task
from pagoda_frontend.serving.serving import Serving


class Embeddings:
    """The endpoint."""

    def __init__(self, *, serving: Serving) -> None:
        self._serving = serving

    async def create(self, request: Request) -> Response:
        """Embed texts or token ids.

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
        check_served(model, "embed")
        check_task(model, "embed", dimensions=body.dimensions)
        given = await inputs_of(body, model, serving=self._serving)
        asked = PoolingCall(
            call=call,
            model=model,
            field="input",
            add_special_tokens=body.add_special_tokens is not False,
            truncation=truncation_for(body, model),
            prefix=model.prompt_files.prompt_of(body.prompt_name),
            cache_salt=body.cache_salt,
        )
        done = await pool_texts(asked, given, _pooling_of(body), serving=serving)
        return await values_answer(body, done, done.values, name="embedding", kind="embedding", serving=serving)


def _pooling_of(body: EmbeddingBody) -> PoolingParams:
    given = body.use_activation if body.use_activation is not None else body.normalize
    return PoolingParams(task="embed", normalize=given, dimensions=body.dimensions)
