"""Long JSON answers that are written while they are sent, so that none is in memory as a whole."""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from fastapi import Response
from starlette.types import Receive, Scope, Send

from pagoda_common.errors import QueueFull
from pagoda_frontend.budget.work_pool import LIGHT_BYTES, WorkPool
from pagoda_frontend.http.answers.sse import wait_for_disconnect
from pagoda_frontend.http.body import json_response
from pagoda_frontend.openai.mapped import json_pieces

WHOLE_BYTES = 1024**2
"""Bytes up to which an answer is written as a whole, with a Content-Length."""
MIN_PIECE_BYTES = 128 * 1024
"""Bytes that are sent at once."""
PAUSE_S = 0.1
"""Seconds before the next try when too many pieces of work wait for a thread."""


async def long_json_response(
    make: Callable[[], dict[str, Any]], headers: Mapping[str, str], *, work: WorkPool, num_bytes: int
) -> Response:
    """A 200 with the result of `make` as JSON, made on a thread.

    Args:
        num_bytes: about the size of the JSON.

    Raises:
        QueueFull: too many pieces of work wait for a thread.
    """
    if num_bytes <= WHOLE_BYTES:
        return await work.run_sized(lambda: json_response(make(), headers), num_bytes=num_bytes)
    return PiecedJson(await work.run(make, num_bytes=num_bytes), headers, work=work)


class PiecedJson(Response):
    """A 200 whose JSON is written piece by piece, as the client reads it. A client that disconnects ends it."""

    media_type = "application/json"

    def __init__(self, value: Any, headers: Mapping[str, str], *, work: WorkPool) -> None:
        self._value = value
        self._work = work
        self.status_code = 200
        self.background = None
        self.init_headers(headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer; returns early when the client is gone."""
        sender = asyncio.create_task(self._send(send))
        watcher = asyncio.create_task(wait_for_disconnect(receive))
        try:
            await asyncio.wait({sender, watcher}, return_when=asyncio.FIRST_COMPLETED)
            if sender.done():
                sender.result()
        finally:
            for task in (sender, watcher):
                task.cancel()
            await asyncio.gather(sender, watcher, return_exceptions=True)

    async def _send(self, send: Send) -> None:
        pieces = _joined(json_pieces(self._value))
        body = await self._work.run(lambda: next(pieces, b""), num_bytes=LIGHT_BYTES + 1)
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        while body:
            await send({"type": "http.response.body", "body": body, "more_body": True})
            body = await self._next(pieces)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _next(self, pieces: Iterator[bytes]) -> bytes:
        """The next piece; the head is already sent, so it cannot be refused any more."""
        while True:
            try:
                return await self._work.run(lambda: next(pieces, b""), num_bytes=LIGHT_BYTES + 1)
            except QueueFull:
                await asyncio.sleep(PAUSE_S)


def _joined(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """The same bytes in larger pieces."""
    held, num_bytes = [], 0
    for piece in pieces:
        held.append(piece)
        num_bytes += len(piece)
        if num_bytes >= MIN_PIECE_BYTES:
            yield b"".join(held)
            held, num_bytes = [], 0
    if held:
        yield b"".join(held)
