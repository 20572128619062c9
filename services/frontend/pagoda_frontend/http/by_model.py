"""Routes HTTP calls to models where one frontend serves several: joins the handlers of each model into one."""

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
"""Query parameter that names the model where the body does not, or where the body's `model` means other weights."""
SERVING = "pagoda.serving"
"""Key in the scope: the model that a call is for."""


class ByModel:
    """Joins one handler per model into one handler."""

    def __init__(self, models: Models) -> None:
        self._models = models

    def body(self, handlers: Sequence[Handler]) -> Handler:
        """By the field `model` of the body."""
        return self._one(handlers, self._of_body)

    def body_or_stream(self, handlers: Sequence[Handler]) -> Handler:
        """The same; by the stream that the call resumes if the body names no model."""
        return self._one(handlers, self._of_body_or_stream)

    def query(self, handlers: Sequence[Handler]) -> Handler:
        """By the parameter `model` of the query."""
        return self._one(handlers, self._of_query)

    def stream(self, handlers: Sequence[Handler]) -> Handler:
        """By the stream that the call resumes; any model for calls that all share."""
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
        """The body, kept for the handler so that it need not read it; None if it is not an object."""
        first = self._models.first
        raw = request.scope[RAW_BODY] = await read_bytes(request, serving=first)
        return await first.work.run_sized(lambda: _object_in(raw), num_bytes=len(raw))

    async def _of_stream(self, request: Request) -> Serving:
        place, first = place_of(request.headers), self._models.first
        if place is None or first.shared.responses.find(place.key, tenant_of(request, serving=first)) is not None:
            return first
        return await self._models.holding(place.key)


def named_in_query(request: Request, models: Models) -> Serving | None:
    """The model that the query names; None if it names none. Asks no scheduler.

    Raises:
        NotFound: there is none of that name.
    """
    name = request.query_params.get(QUERY)
    return models.named_here(name) if name and models.are_several else None


def load_of(models: Models, engines: Sequence[EngineClient]) -> Callable[[Any], types_pb2.EngineLoad]:
    """The load to report for a call, by its scope: of its model, or of all models together."""

    def load(scope: Any) -> types_pb2.EngineLoad:
        serving = scope.get(SERVING)
        if serving is not None:
            return engines[models.servings.index(serving)].load
        return total_load([engine.load for engine in engines])

    return load


def _object_in(raw: bytes) -> dict[str, Any] | None:
    """The JSON object in `raw`; None if there is none, which the handler refuses."""
    try:
        value = orjson.loads(raw.removeprefix(codecs.BOM_UTF8))
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None
