"""A few calls of the OpenAI API over HTTP with the standard library, for the terminal commands."""

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any

from pagoda_common.errors import NotReady, PagodaError

TIMEOUT_S = 600.0
"""Longest silence of a server, in seconds; a stream sends comment lines long before."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenAIServer:
    """A server, such as Pagoda's frontend."""

    base_url: str
    """With /v1, without a slash at the end."""
    api_key: str | None = None
    """Bearer token."""

    def first_model(self) -> str:
        """Id of the first model served."""
        with self._open("/models", None) as response:
            return str(json.load(response)["data"][0]["id"])

    def stream_chat(
        self,
        *,
        messages: list[dict[str, str]],
        model: str,
        on_reasoning: Callable[[str], None] = lambda text: None,
        **parameters: Any,
    ) -> Generator[str, None, None]:
        """Pieces of the answer to a conversation, as they come; `on_reasoning` gets those of the thoughts before it.

        Raises:
            PagodaError: the server refused, failed, or cannot be reached.
        """
        body = {"model": model, "messages": messages, "stream": True, **parameters}
        for choice in self._stream("/chat/completions", body):
            if reasoning := choice["delta"].get("reasoning"):
                on_reasoning(reasoning)
            yield choice["delta"].get("content") or ""

    def stream_completion(self, *, prompt: str, model: str, **parameters: Any) -> Generator[str, None, None]:
        """Pieces of the text that follows `prompt`, as they come.

        Raises:
            PagodaError: the server refused, failed, or cannot be reached.
        """
        body = {"model": model, "prompt": prompt, "stream": True, **parameters}
        for choice in self._stream("/completions", body):
            yield choice["text"]

    def _stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        with self._open(path, body) as response:
            for line in _lines(response):
                if not line.startswith(b"data:"):
                    continue
                data = line.removeprefix(b"data:").strip()
                if data == b"[DONE]":
                    return
                event = json.loads(data)
                if "error" in event:
                    raise PagodaError(event["error"]["message"])
                yield from event["choices"]
        raise PagodaError("the server ended the stream too early")

    def _open(self, path: str, body: dict[str, Any] | None) -> http.client.HTTPResponse:
        request = urllib.request.Request(self.base_url + path)
        if self.api_key is not None:
            request.add_header("Authorization", f"Bearer {self.api_key}")
        if body is not None:
            request.data = json.dumps(body).encode()
            request.add_header("Content-Type", "application/json")
        try:
            response: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=TIMEOUT_S)
        except urllib.error.HTTPError as error:
            raise PagodaError(f"HTTP {error.code}: {_message(error.read())}") from None
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise NotReady(f"no answer from {self.base_url}: {reason}") from None
        return response


def _lines(response: http.client.HTTPResponse) -> Iterator[bytes]:
    try:
        yield from response
    except (OSError, http.client.HTTPException) as error:
        raise PagodaError(f"the connection broke: {error!r}") from None


def _message(body: bytes) -> str:
    """The message of an error response, in OpenAI's shape or any other."""
    try:
        error = json.loads(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace")
