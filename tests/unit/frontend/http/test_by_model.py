"""One handler for several models: which one gets a call, what it finds of the body, and what it costs one model."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
from fastapi import Request, Response

from pagoda_common.config.frontend_config import FrontendConfig
from pagoda_common.errors import InvalidRequest, NotFound
from pagoda_frontend.http.body import RAW_BODY, read_bytes
from pagoda_frontend.http.by_model import ByModel
from pagoda_frontend.serving.models import Models
from pagoda_frontend.serving.serving import Serving
from pagoda_frontend.serving.shared import Shared

CONFIG = FrontendConfig(models=("a=127.0.0.1:1", "b=127.0.0.1:2"))


class Engine:
    """Has no adapters, and knows streams by their keys."""

    def __init__(self) -> None:
        self.loras: dict[str, Any] = {}
        self.held: set[str] = set()

    async def resolve_lora(self, name: str) -> None:
        return None

    async def adopt(self, key: str) -> list[str]:
        if key not in self.held:
            raise NotFound("unknown")
        return [key]


@pytest.fixture
async def models() -> Models:
    shared = Shared.of(CONFIG)
    servings = [
        Serving(config=one, engine=cast("Any", Engine()), metrics=cast("Any", None), shared=shared)
        for one in CONFIG.of_models
    ]
    for serving in servings:
        serving._model = cast("Any", SimpleNamespace())
    return Models(servings)


def request(body: bytes = b"", *, query: bytes = b"", **headers: str) -> Request:
    """A call whose body is there; it cannot be read twice."""
    unread = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        return unread.pop()

    named = {"content-type": "application/json", **{name.replace("_", "-"): text for name, text in headers.items()}}
    raw = [(name.encode(), text.encode()) for name, text in named.items() if text]
    scope = {"type": "http", "method": "POST", "path": "/", "query_string": query, "headers": raw, "client": None}
    return Request(scope, receive)


class Handlers:
    """One for each model; they note who is called, and what is read."""

    def __init__(self, models: Models) -> None:
        self.called: list[str] = []
        self.read: list[bytes] = []
        self.all = [self._handler(one) for one in models.servings]

    def _handler(self, serving: Serving) -> Any:
        async def handle(request: Request, **given: Any) -> Response:
            """What is answered."""
            self.called.append(serving.config.served_model_name[0])
            if RAW_BODY in request.scope:
                self.read.append(await read_bytes(request, serving=serving))
                assert RAW_BODY not in request.scope, "a stream's body is freed when it is parsed"
            return Response(**given)

        return handle


async def test_the_body_names_the_model_and_is_read_once(models: Models) -> None:
    handlers = Handlers(models)
    handle = ByModel(models).body(handlers.all)
    for text in (b'{"model": "b"}', b'\xef\xbb\xbf{"model": "a"}', b"[1]", b"{", b'{"model": 7}'):
        await handle(request(text))
        assert handlers.read.pop() == text
    assert handlers.called == ["b", "a", "a", "a", "a"]
    assert handle.__doc__ == "What is answered."
    for text in (b"{}", b'{"model": null}', b'{"model": ""}'):
        with pytest.raises(InvalidRequest, match="model must be one of a, b"):
            await handle(request(text))
    with pytest.raises(InvalidRequest, match="Content-Type must be application/json"):
        await handle(request(b'{"model": "a"}', content_type="text/plain"))


async def test_a_place_in_a_stream_leads_to_the_model_that_has_it(models: Models) -> None:
    handlers = Handlers(models)
    handle = ByModel(models).body_or_stream(handlers.all)
    cast("Any", models.servings[1].engine).held.add("key")
    place = {"last_event_id": "key:3"}
    await handle(request(b"", content_type="", **place))
    await handle(request(b"", **place))
    await handle(request(b"{}", **place))
    await handle(request(b'{"model": "b"}', **place))
    await handle(request(b'{"model": "what else"}', **place))
    assert handlers.called == ["b"] * 5
    await handle(request(b'{"model": "a"}', **place))
    await handle(request(b"", last_event_id="other:3"))
    assert handlers.called[5:] == ["a", "a"], "who says that there is none"
    with pytest.raises(InvalidRequest, match="is not an event id"):
        await handle(request(b"", last_event_id="?"))
    await ByModel(models).body(handlers.all)(request(b'{"model": "b"}', last_event_id="?"))
    assert handlers.called.pop() == "b", "a call that cannot be resumed does not look at it"


async def test_the_query_names_the_model(models: Models) -> None:
    handlers = Handlers(models)
    handle = ByModel(models).query(handlers.all)
    await handle(request(query=b"model=b"), status_code=204)
    assert handlers.called == ["b"]
    with pytest.raises(InvalidRequest):
        await handle(request())
    with pytest.raises(NotFound):
        await handle(request(query=b"model=c"))


async def test_one_model_has_its_own_handlers(models: Models) -> None:
    one = Models(models.servings[:1])
    handlers = Handlers(one)
    for join in (ByModel(one).body, ByModel(one).query, ByModel(one).stream, ByModel(one).body_or_stream):
        assert join(handlers.all) is handlers.all[0]
