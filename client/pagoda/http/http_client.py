"""Many requests at once to an OpenAI server, for batches and benchmarks."""

import json
import ssl
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any, Self

import aiohttp

from pagoda_common.errors import NotReady, PagodaError


class AsyncHttpClient:
    """One server, as many connections as are needed. Used as a context manager; belongs to one event loop."""

    def __init__(self, *, base_url: str, api_key: str | None = None, headers: dict[str, str] | None = None) -> None:
        """`base_url` is the server's, without /v1 and without a slash at the end."""
        self.base_url = base_url
        self._headers = {"Content-Type": "application/json", **(headers or {})}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=ssl.create_default_context()),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=60),
            read_bufsize=2**18,
            headers=self._headers,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def get(self, path: str) -> Any:
        """The JSON at `path`.

        Raises:
            NotReady: no one answers, or the server is not ready.
            PagodaError: the answer is an error, or no JSON.
        """
        async with self._request("GET", path, None) as response:
            text = await response.text()
            if response.status != HTTPStatus.OK:
                kind = NotReady if response.status == HTTPStatus.SERVICE_UNAVAILABLE else PagodaError
                raise kind(f"HTTP {response.status}: {error_message(text)}")
            return _parse(text)

    async def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        """Status and JSON of the answer; a body that is not JSON comes as OpenAI's error object.

        Raises:
            NotReady: no one answers, or the connection broke.
        """
        async with self._request("POST", path, body) as response:
            text = await response.text()
            try:
                return response.status, json.loads(text)
            except ValueError:
                error = {"message": error_message(text), "type": "Error", "param": None, "code": response.status}
                return response.status, {"error": error}

    async def stream(self, path: str, body: dict[str, Any]) -> AsyncGenerator[Any, None]:
        """The JSON of each server-sent event, up to [DONE]. Closing it ends the request.

        Raises:
            NotReady: no one answers, or the connection broke.
            PagodaError: the server refused, failed, or ended the stream too early.
        """
        async with self._request("POST", path, body) as response:
            if response.status != HTTPStatus.OK:
                raise PagodaError(f"HTTP {response.status}: {error_message(await response.text())}")
            async for line in _lines(response):
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                event = _parse(data)
                if isinstance(event, dict) and event.get("error"):
                    raise PagodaError(error_message(data))
                yield event
        raise PagodaError("the server ended the stream too early")

    @asynccontextmanager
    async def _request(
        self, method: str, path: str, body: dict[str, Any] | None
    ) -> AsyncGenerator[aiohttp.ClientResponse, None]:
        assert self._session is not None, "used outside of its context"
        data = None if body is None else json.dumps(body).encode()
        try:
            async with self._session.request(method, self.base_url + path, data=data) as response:
                yield response
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise NotReady(f"no answer from {self.base_url}: {str(error) or type(error).__name__}") from None
        except ValueError as error:  # aiohttp's for a URL it cannot use
            raise PagodaError(f"{self.base_url}{path}: {error}") from None


async def _lines(response: aiohttp.ClientResponse) -> AsyncGenerator[bytes, None]:
    """The lines of a response, of any length: log probabilities of a whole vocabulary exceed aiohttp's own limit."""
    rest = b""
    async for chunk in response.content.iter_any():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line
    if rest:
        yield rest


def error_message(text: str | bytes) -> str:
    """The message of an error response, in OpenAI's shape or any other."""
    try:
        error = json.loads(text)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return (text.decode(errors="replace") if isinstance(text, bytes) else text)[:1000] or "no reason given"


def _parse(text: str | bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        raise PagodaError(f"the server did not send JSON: {text[:200]!r}") from None
