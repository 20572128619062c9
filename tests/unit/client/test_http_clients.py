"""Both HTTP clients read what a server answers, whole or broken, without one: their connections give what tests say."""

import http.client
import io
import json
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from email.message import Message
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from pagoda.http.http_client import AsyncHttpClient
from pagoda.http.openai_http import OpenAIServer
from pagoda_common.errors import NotReady, PagodaError


class Session:
    """Answers every request in the same way, and remembers them."""

    def __init__(self, content: bytes, *, status: int = 200, size: int = 7, error: Exception | None = None) -> None:
        self._content, self._status, self._size, self._error = content, status, size, error
        self.requests: list[tuple[str, str, bytes | None]] = []

    @asynccontextmanager
    async def request(self, method: str, url: str, *, data: bytes | None) -> AsyncIterator[SimpleNamespace]:
        self.requests.append((method, url, data))
        if self._error is not None:
            raise self._error

        async def text() -> str:
            return self._content.decode()

        async def iter_any() -> AsyncIterator[bytes]:
            for start in range(0, len(self._content), self._size):
                yield self._content[start : start + self._size]

        yield SimpleNamespace(status=self._status, text=text, content=SimpleNamespace(iter_any=iter_any))


def client(content: bytes = b"", **options: Any) -> AsyncHttpClient:
    made = AsyncHttpClient(base_url="http://host:1")
    made._session = Session(content, **options)  # type: ignore[assignment]  # all of a session that is used
    return made


async def events(of: AsyncHttpClient) -> list[Any]:
    return [event async for event in of.stream("/v1/x", {"a": 1})]


@pytest.mark.parametrize("size", [1, 7, 1000])
async def test_events_come_up_to_the_end_of_a_stream(size: int) -> None:
    content = b': comment\n\ndata: {"n": 1}\r\nevent: other\ndata:{"n": 2}\n\ndata: [DONE]\n\ndata: {"n": 3}\n\n'
    one = client(content, size=size)
    assert await events(one) == [{"n": 1}, {"n": 2}]
    assert one._session.requests == [("POST", "http://host:1/v1/x", b'{"a": 1}')]  # type: ignore[union-attr]  # a Session


@pytest.mark.parametrize(
    ("content", "status", "problem"),
    [
        (b'data: {"n": 1}\n\n', 200, "the server ended the stream too early"),
        (b"", 200, "the server ended the stream too early"),
        (b"data: {\n\n", 200, "the server did not send JSON: b'{'"),
        (b"data: {", 200, "the server did not send JSON: b'{'"),
        (b'data: {"error": {"message": "too long"}}\n\n', 200, "^too long$"),
        (b'{"error": {"message": "too long"}}', 400, "^HTTP 400: too long$"),
        (b"", 500, "^HTTP 500: no reason given$"),
    ],
)
async def test_a_stream_that_is_broken_says_so(content: bytes, status: int, problem: str) -> None:
    with pytest.raises(PagodaError, match=problem):
        await events(client(content, status=status))


async def test_an_answer_is_json() -> None:
    one = client(b'{"n": 1}')
    assert await one.get("/v1/x") == {"n": 1}
    assert one._session.requests == [("GET", "http://host:1/v1/x", None)]  # type: ignore[union-attr]  # a Session
    assert await one.post("/v1/x", {}) == (200, {"n": 1})
    with pytest.raises(PagodaError, match=r"the server did not send JSON: '\{'"):
        await client(b"{").get("/")
    expected = {"message": "gone", "type": "Error", "param": None, "code": 502}
    assert await client(b"gone", status=502).post("/", {}) == (502, {"error": expected})


@pytest.mark.parametrize(("status", "kind"), [(503, NotReady), (500, PagodaError), (404, PagodaError)])
async def test_a_server_that_is_not_ready_is_told_from_one_that_fails(status: int, kind: type[Exception]) -> None:
    with pytest.raises(PagodaError, match=f"HTTP {status}: wait") as caught:
        await client(b'{"error": "wait"}', status=status).get("/")
    assert type(caught.value) is kind


@pytest.mark.parametrize(
    ("error", "kind", "problem"),
    [
        (TimeoutError(), NotReady, "no answer from http://host:1: TimeoutError"),
        (aiohttp.ClientError("cut"), NotReady, "no answer from http://host:1: cut"),
        (OSError("cut"), NotReady, "no answer from http://host:1: cut"),
        (ValueError("a port"), PagodaError, "http://host:1/: a port"),
    ],
    ids=repr,
)
async def test_a_server_that_does_not_answer_is_named(error: Exception, kind: type[Exception], problem: str) -> None:
    with pytest.raises(PagodaError, match=problem) as caught:
        await client(error=error).get("/")
    assert type(caught.value) is kind


# The client of the standard library.


class Opened:
    """Answers in place of `urlopen`, and remembers what it was asked."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer
        self.requests: list[urllib.request.Request] = []

    def __call__(self, request: urllib.request.Request, *, timeout: float) -> Any:
        assert timeout > 60
        self.requests.append(request)
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


class Broken(io.BytesIO):
    """Ends with an error."""

    def __next__(self) -> bytes:
        line = self.readline()
        if not line:
            raise http.client.IncompleteRead(b"")
        return line


def server(answer: Any, monkeypatch: pytest.MonkeyPatch, api_key: str | None = None) -> tuple[OpenAIServer, Opened]:
    opened = Opened(answer)
    monkeypatch.setattr(urllib.request, "urlopen", opened)
    return OpenAIServer(base_url="http://host:1/v1", api_key=api_key), opened


def body(request: urllib.request.Request) -> Any:
    assert isinstance(request.data, bytes)
    return json.loads(request.data)


def stream_of(*choices: dict[str, Any], end: bytes = b"data: [DONE]\n") -> bytes:
    return b": comment\n" + b"".join(b"data: %s\n\n" % json.dumps({"choices": [c]}).encode() for c in choices) + end


def test_pieces_of_an_answer_and_of_its_thoughts(monkeypatch: pytest.MonkeyPatch) -> None:
    deltas = [{"role": "assistant"}, {"reasoning": "so"}, {"content": "a"}, {"content": None}, {"content": "b"}]
    content = stream_of(*({"delta": delta} for delta in deltas))
    one, opened = server(io.BytesIO(content), monkeypatch, api_key="key")
    thoughts: list[str] = []
    pieces = one.stream_chat(messages=[], model="m", on_reasoning=thoughts.append, temperature=0)
    assert (list(pieces), thoughts) == (["", "", "a", "", "b"], ["so"])
    (request,) = opened.requests
    assert request.full_url == "http://host:1/v1/chat/completions"
    assert request.headers == {"Authorization": "Bearer key", "Content-type": "application/json"}
    assert body(request) == {"model": "m", "messages": [], "stream": True, "temperature": 0}


def test_pieces_of_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    one, opened = server(io.BytesIO(stream_of({"text": "a"}, {"text": ""})), monkeypatch)
    assert list(one.stream_completion(prompt="p", model="m", n=1)) == ["a", ""]
    assert "Authorization" not in opened.requests[0].headers
    assert body(opened.requests[0]) == {"model": "m", "prompt": "p", "stream": True, "n": 1}


def test_the_first_model_of_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    one, opened = server(io.BytesIO(b'{"data": [{"id": "a"}, {"id": "b"}]}'), monkeypatch)
    assert one.first_model() == "a"
    assert (opened.requests[0].full_url, opened.requests[0].data) == ("http://host:1/v1/models", None)


def refused(content: bytes) -> urllib.error.HTTPError:
    return urllib.error.HTTPError("http://host:1", 400, "Bad Request", Message(), io.BytesIO(content))


@pytest.mark.parametrize(
    ("answer", "kind", "problem"),
    [
        (io.BytesIO(stream_of({"text": "a"}, end=b"")), PagodaError, "the server ended the stream too early"),
        (Broken(stream_of({"text": "a"}, end=b"")), PagodaError, "the connection broke: IncompleteRead"),
        (io.BytesIO(b'data: {"error": {"message": "too long"}}\n'), PagodaError, "^too long$"),
        (refused(b'{"error": {"message": "too long"}}'), PagodaError, "^HTTP 400: too long$"),
        (refused(b'{"error": "too long"}'), PagodaError, "^HTTP 400: too long$"),
        (refused(b"[]\xff"), PagodaError, "^HTTP 400: \\[\\]\ufffd$"),
        (urllib.error.URLError("no route"), NotReady, "^no answer from http://host:1/v1: no route$"),
        (http.client.BadStatusLine("x"), NotReady, "^no answer from http://host:1/v1: x$"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_a_server_does_not_answer_is_said(
    answer: Any, kind: type[Exception], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, _ = server(answer, monkeypatch)
    with pytest.raises(PagodaError, match=problem) as caught:
        list(one.stream_completion(prompt="p", model="m"))
    assert type(caught.value) is kind
