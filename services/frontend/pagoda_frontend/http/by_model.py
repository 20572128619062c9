"""Which model a call over HTTP is for, where one frontend serves several: one handler a model becomes one for all."""

import codecs
from collections.abc import Awaitable, Callable, Sequence
from functools import wraps
from typing import Any, TypeAlias

import orjson
from fastapi import Request, Response

from pagoda.v1 import types_pb2
from pagoda_common.engine.client import EngineClient
from pagoda_common.metrics.engine_metrics import total_load
from pagoda_frontend.http.body import RAW_BODY, has_json, read_bytes
from pagoda_frontend.http.calls import tenant_of
from pagoda_frontend.requests.event_ids import place_of
from pagoda_frontend.serving.models import Models
from pagoda_frontend.serving.serving import Serving

Handler: TypeAlias = Callable[..., Awaitable[Response]]
"""Takes a request, and what its path names."""
QUERY = "model"
"""Parameter of calls whose body names no model, or means other weights."""
SERVING = "pagoda.serving"
"""Key in the scope: the model that a call is for."""


class ByModel:
    """Makes one handler of as many as there are models."""

    def __init__(self, models: Models) -> None:
        self._models = models

    def body(self, handlers: Sequence[Handler]) -> Handler:
        """By the field `model` of the body."""
        return self._one(handlers, self._of_body)

    def body_or_stream(self, handlers: Sequence[Handler]) -> Handler:
        """The same; or by the stream that the call resumes, if the body does not say it."""
        return self._one(handlers, self._of_body_or_stream)

    def query(self, handlers: Sequence[Handler]) -> Handler:
        """By the parameter `model` of the query."""
        return self._one(handlers, self._of_query)

    def stream(self, handlers: Sequence[Handler]) -> Handler:
        """By the stream that the call resumes; any model for what all have together."""
        return self._one(handlers, self._of_stream)

    def _one(self, handlers: Sequence[Handler], choose: Callable[[Request], Awaitable[Serving]]) -> Handler:
        if len(handlers) == 1:
            return handlers[0]

        @wraps(handlers[0])
        async def handle(request: Request, **given: Any) -> Response:
            serving = await choose(request)
            request.scope[SERVING] = serving
            return await handlers[self._models.servings.index(serving)](request, **given)

        return handle

    async def _of_query(self, request: Request) -> Serving:
        return self._models.named_here(request.query_params.get(QUERY))

    async def _of_body(self, request: Request) -> Serving:
        body = await self._body(request)
        return self._models.first if body is None else await self._models.named(body.get("model"))

    async def _of_body_or_stream(self, request: Request) -> Serving:
        if place_of(request.headers) is None:
            return await self._of_body(request)
        body = await self._body(request) if has_json(request) else None
        return self._models.known((body or {}).get("model")) or await self._of_stream(request)

    async def _body(self, request: Request) -> dict[str, Any] | None:
        """The body, which the handler then has without reading it; None if it is no object."""
        first = self._models.first
        raw = request.scope[RAW_BODY] = await read_bytes(request, serving=first)
        return await first.work.run_sized(lambda: _object_in(raw), num_bytes=len(raw))

    async def _of_stream(self, request: Request) -> Serving:
        place, first = place_of(request.headers), self._models.first
        if place is None or first.shared.responses.find(place.key, tenant_of(request, serving=first)) is not None:
            return first
        return await self._models.holding(place.key)


def named_in_query(request: Request, models: Models) -> Serving | None:
    """The one of several models that the query names; None if it names none. No scheduler is asked.

    Raises:
        NotFound: there is none of that name.
    """
    name = request.query_params.get(QUERY)
    return models.named_here(name) if name and models.are_several else None


def load_of(models: Models, engines: Sequence[EngineClient]) -> Callable[[Any], types_pb2.EngineLoad]:
    """The load to report for a call, by its scope: of the model that it was for, or of all together."""

    def load(scope: Any) -> types_pb2.EngineLoad:
        serving = scope.get(SERVING)
        if serving is not None:
            return engines[models.servings.index(serving)].load
        return total_load([engine.load for engine in engines])

    return load


def _object_in(raw: bytes) -> dict[str, Any] | None:
    """The JSON object in `raw`; None where there is none, which the handler refuses."""
    try:
        value = orjson.loads(raw.removeprefix(codecs.BOM_UTF8))
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None
