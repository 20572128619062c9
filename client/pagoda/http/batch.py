"""OpenAI's batch format: one request a line in, one result a line out, in order. Knows no files and no processes."""

import asyncio
import collections
import json
import secrets
from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from pagoda.http.http_client import AsyncHttpClient, error_message
from pagoda_common.errors import NotReady

URLS = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"),
    *("/v1/score", "/score", "/v1/rerank", "/rerank", "/v2/rerank", "/v2/embed", "/classify", "/pooling"),
)
UNREACHABLE = "connection_error"
"""Code of a line whose server does not answer; the line itself is right."""
NUM_TRIES = 6
"""For a line that meets no server or a full queue."""
FIRST_RETRY_S = 0.5


@dataclass(frozen=True, slots=True)
class BatchLine:
    """One request of a batch."""

    custom_id: str
    url: str
    body: dict[str, Any]


class LineError(Exception):
    """A line is no request that a batch can hold."""

    def __init__(self, code: str, message: str, *, custom_id: Any = None, is_request: bool = False) -> None:
        """`is_request`: the line has the shape of one, and asks for what is not there."""
        super().__init__(message)
        self.is_request = is_request
        self.code = code
        self.message = message
        self.custom_id = custom_id if isinstance(custom_id, str) else None


@dataclass(slots=True)
class BatchCounts:
    """How a batch went."""

    num_completed: int = 0
    num_failed: int = 0
    num_invalid: int = 0
    """How many of the failed lines are not requests."""
    custom_ids: set[str] = field(default_factory=set)
    """Seen so far: they must differ."""


def parse_line(text: bytes) -> BatchLine:
    """One line of the input, UTF-8.

    Raises:
        LineError: it is not a request, or one that this engine cannot answer.
    """
    try:
        line = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise LineError("invalid_json_line", f"the line is no JSON: {error}") from None
    if not isinstance(line, dict):
        raise LineError("invalid_json_line", f"the line must be a JSON object, got a {type(line).__name__}")
    custom_id, method, url, body = (line.get(name) for name in ("custom_id", "method", "url", "body"))
    if not isinstance(custom_id, str):
        raise LineError("invalid_request", f"custom_id must be a string, got {custom_id!r}")
    if method not in (None, "POST"):
        message = f"method must be POST, got {method!r}"
        raise LineError("invalid_method", message, custom_id=custom_id, is_request=isinstance(method, str))
    if url not in URLS:
        message = f"url must be one of {', '.join(URLS)}, got {url!r}"
        raise LineError("invalid_url", message, custom_id=custom_id, is_request=isinstance(url, str))
    if not isinstance(body, dict):
        raise LineError("invalid_request", f"body must be an object, got {body!r}", custom_id=custom_id)
    if body.get("stream"):
        message = "stream is true: a batch has no streams"
        raise LineError("invalid_request", message, custom_id=custom_id, is_request=True)
    return BatchLine(custom_id, url, body)


async def run_batch(
    lines: Iterable[bytes], client: AsyncHttpClient, *, max_concurrency: int, counts: BatchCounts
) -> AsyncGenerator[dict[str, Any], None]:
    """The results of `lines` in their order; blank lines have none.

    Args:
        max_concurrency: requests under way at a time.
        counts: kept up to date.
    """
    slots = asyncio.Semaphore(max_concurrency)
    pending: collections.deque[asyncio.Task[dict[str, Any]]] = collections.deque()

    async def work(text: bytes) -> dict[str, Any]:
        try:
            return await _answer(text, client, counts)
        finally:
            slots.release()

    try:
        for text in lines:
            if not text.strip():
                continue
            await slots.acquire()
            pending.append(asyncio.create_task(work(text)))
            while pending[0].done():
                yield pending.popleft().result()
                if not pending:
                    break
        while pending:
            yield await pending.popleft()
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)


async def _answer(text: bytes, client: AsyncHttpClient, counts: BatchCounts) -> dict[str, Any]:
    try:
        line = parse_line(text)
        if line.custom_id in counts.custom_ids:
            message = f"custom_id {line.custom_id!r} is in the batch already"
            raise LineError("duplicate_custom_id", message, custom_id=line.custom_id, is_request=True)
        counts.custom_ids.add(line.custom_id)
        status, body = await _post(line, client)
    except LineError as error:
        counts.num_failed += 1
        counts.num_invalid += not error.is_request
        return _result(error.custom_id, None, {"code": error.code, "message": error.message})
    response = {"status_code": status, "request_id": _id("req"), "body": body}
    if status == HTTPStatus.OK:
        counts.num_completed += 1
        return _result(line.custom_id, response, None)
    counts.num_failed += 1
    return _result(line.custom_id, response, {"code": str(status), "message": error_message(json.dumps(body))})


async def _post(line: BatchLine, client: AsyncHttpClient) -> tuple[int, Any]:
    """Send it, again after a pause when the server is away or full."""
    for num_left in reversed(range(NUM_TRIES)):
        try:
            status, body = await client.post(line.url, line.body)
            if status != HTTPStatus.SERVICE_UNAVAILABLE or not num_left:
                return status, body
        except NotReady as error:
            if not num_left:
                raise LineError(UNREACHABLE, error.message, custom_id=line.custom_id, is_request=True) from None
        await asyncio.sleep(FIRST_RETRY_S * 2 ** (NUM_TRIES - 1 - num_left))
    raise AssertionError("unreachable")


def _result(custom_id: str | None, response: dict[str, Any] | None, error: dict[str, str] | None) -> dict[str, Any]:
    return {"id": _id("batch_req"), "custom_id": custom_id, "response": response, "error": error}


def _id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(12)}"
