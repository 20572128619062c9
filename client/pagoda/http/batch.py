"""OpenAI's batch format: one request a line in, one result a line out, in order. Knows no files and no processes."""

import asyncio
import collections
import hashlib
import json
import reprlib
import secrets
from collections.abc import AsyncGenerator, Iterable, Iterator
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, BinaryIO

from pagoda.http.http_client import AsyncHttpClient, error_message
from pagoda_common.errors import NotReady

URLS = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"),
    *("/v1/score", "/score", "/v1/rerank", "/rerank", "/v2/rerank", "/v2/embed", "/classify", "/pooling"),
)
UNREACHABLE = "connection_error"
"""Code of a line whose server does not answer; the line itself is right."""
MAX_LINE_BYTES = 32 * 1024**2
"""Of one request: twice what a server reads of a body by default."""
MAX_PENDING_BYTES = 128 * 1024**2
"""Lines of requests under way, together; one more may be read."""
MAX_WAITING_EACH = 16
"""Results that wait for one before them, for each request that may be under way."""
SKIPPED_BYTES = 1024**2
"""Read at once of a line that is too long."""
MAX_ID_CHARS = 1024
"""Of a custom_id."""
KEPT_ID_CHARS = 48
"""Of one that is kept as it is, to find those that repeat."""
SHOWN_CHARS = 200
"""Of a wrong value, in messages."""
NUM_TRIES = 6
"""For a line that meets no server or a full queue."""
FIRST_RETRY_S = 0.5


@dataclass(frozen=True, slots=True)
class BatchLine:
    """One request of a batch."""

    custom_id: str
    url: str
    body: dict[str, Any]


def _short(value: Any) -> str:
    text = reprlib.repr(value) if isinstance(value, list | dict) else repr(value)
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}…"


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
    custom_ids: set[str | bytes] = field(default_factory=set)
    """Seen so far, long ones as digests: they must differ."""


def parse_line(text: bytes) -> BatchLine:
    """One line of the input, UTF-8.

    Raises:
        LineError: it is not a request, or one that this engine cannot answer.
    """
    if len(text) > MAX_LINE_BYTES:
        raise LineError("line_too_long", f"the line has more than {MAX_LINE_BYTES} bytes, which is the maximum")
    try:
        line = json.loads(text)
    except UnicodeDecodeError as error:
        raise LineError("invalid_json_line", f"the line is not UTF-8 at byte {error.start}: {error.reason}") from None
    except RecursionError:
        raise LineError("invalid_json_line", "the line is not JSON: it is nested too deeply") from None
    except ValueError as error:
        raise LineError("invalid_json_line", f"the line is not JSON: {error}") from None
    if not isinstance(line, dict):
        raise LineError("invalid_json_line", f"the line must be a JSON object, got a {type(line).__name__}")
    custom_id, method, url, body = (line.get(name) for name in ("custom_id", "method", "url", "body"))
    if not isinstance(custom_id, str):
        raise LineError("invalid_request", f"custom_id must be a string, got {_short(custom_id)}")
    if len(custom_id) > MAX_ID_CHARS:
        message = f"custom_id has {len(custom_id)} characters, at most {MAX_ID_CHARS} are allowed"
        raise LineError("invalid_request", message, custom_id=custom_id[:MAX_ID_CHARS])
    if method not in (None, "POST"):
        message = f"method must be POST, got {_short(method)}"
        raise LineError("invalid_method", message, custom_id=custom_id, is_request=isinstance(method, str))
    if url not in URLS:
        message = f"url must be one of {', '.join(URLS)}, got {_short(url)}"
        raise LineError("invalid_url", message, custom_id=custom_id, is_request=isinstance(url, str))
    if not isinstance(body, dict):
        raise LineError("invalid_request", f"body must be an object, got {_short(body)}", custom_id=custom_id)
    if body.get("stream"):
        message = "stream is true: a batch has no streams"
        raise LineError("invalid_request", message, custom_id=custom_id, is_request=True)
    return BatchLine(custom_id, url, body)


async def run_batch(
    lines: Iterable[bytes], client: AsyncHttpClient, *, max_concurrency: int, counts: BatchCounts
) -> AsyncGenerator[dict[str, Any], None]:
    """The results of `lines` in their order; blank lines have none.

    Args:
        lines: as `lines_of` reads them.
        max_concurrency: requests under way at a time; fewer with large lines, or with results that wait for one.
        counts: kept up to date.
    """
    slots = asyncio.Semaphore(max_concurrency)
    pending: collections.deque[asyncio.Task[dict[str, Any]]] = collections.deque()
    num_bytes = 0

    async def work(number: int, text: bytes) -> dict[str, Any]:
        nonlocal num_bytes
        try:
            return await _answer(number, text, client, counts)
        finally:
            num_bytes -= len(text)
            slots.release()

    try:
        for number, text in enumerate(lines, 1):
            if not text.strip():
                continue
            await slots.acquire()
            num_bytes += len(text)
            pending.append(asyncio.create_task(work(number, text)))
            while pending and (
                pending[0].done() or num_bytes > MAX_PENDING_BYTES or len(pending) > MAX_WAITING_EACH * max_concurrency
            ):
                yield await pending.popleft()
        while pending:
            yield await pending.popleft()
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)


def lines_of(file: BinaryIO) -> Iterator[bytes]:
    """The lines of a file. Of one that is too long, only as much is kept as shows that it is."""
    while text := file.readline(MAX_LINE_BYTES + 1):
        yield text
        is_cut = len(text) > MAX_LINE_BYTES and not text.endswith(b"\n")
        while is_cut:
            text = file.readline(SKIPPED_BYTES)
            is_cut = bool(text) and not text.endswith(b"\n")


async def _answer(number: int, text: bytes, client: AsyncHttpClient, counts: BatchCounts) -> dict[str, Any]:
    try:
        line = parse_line(text)
        key = line.custom_id if len(line.custom_id) <= KEPT_ID_CHARS else _digest(line.custom_id)
        if key in counts.custom_ids:
            message = f"custom_id {line.custom_id!r} is in the batch already"
            raise LineError("duplicate_custom_id", message, custom_id=line.custom_id, is_request=True)
        counts.custom_ids.add(key)
        status, body = await _post(line, client)
    except LineError as error:
        counts.num_failed += 1
        counts.num_invalid += not error.is_request
        message = error.message if error.is_request else f"line {number}: {error.message}"
        return _result(error.custom_id, None, {"code": error.code, "message": message})
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


def _digest(custom_id: str) -> bytes:
    return hashlib.blake2b(custom_id.encode(errors="surrogatepass"), digest_size=16).digest()


def _id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(12)}"
