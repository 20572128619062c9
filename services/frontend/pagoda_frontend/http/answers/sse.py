"""Answers that end when the client disconnects: server-sent events, and single responses that take long."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from functools import partial
from typing import Any, Protocol, TypeVar

from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

from pagoda_common.errors import PagodaError
from pagoda_frontend.http.answers.opening import patience_of
from pagoda_frontend.http.errors import ClientDisconnected, error_json, error_response
from pagoda_frontend.openai.chunks import DONE, ChunkEncoder, Delta, event
from pagoda_frontend.requests.event_ids import with_id
from pagoda_frontend.requests.run import ENTRY_BYTES, Run

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

KEEP_ALIVE = b": keep-alive\n\n"


async def wait_for_disconnect(receive: Receive) -> None:
    """Return when the client is gone. The request's body has been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`, which is cancelled at once when the client disconnects.

    Raises:
        ClientDisconnected: the client disconnected.
    """
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(wait_for_disconnect(request.receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnected
    finally:
        await _end(task, watcher)


class EventStream(Response):
    """Sends an iterator's events as they come, and closes the iterator at once when the client disconnects."""

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        *,
        request_id: str,
        keep_alive_s: float,
        timeout_s: float = 0.0,
    ) -> None:
        """
        Args:
            events: whole events.
            request_id: the answer's X-Request-Id.
            keep_alive_s: silence after which a comment is sent; 0 is never.
            timeout_s: the request's time limit, 0 for none; if it passes before the first event, the status is its own.
        """
        self.body_iterator = events
        self.status_code = 200
        self.background = None
        self._keep_alive_s = keep_alive_s
        self._patience_s = patience_of(timeout_s)
        self._last_sent_s = 0.0
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no", "X-Request-Id": request_id})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer; returns early when the client is gone."""
        pump = asyncio.create_task(self._pump(scope, receive, send))
        watcher = asyncio.create_task(wait_for_disconnect(receive))
        try:
            await asyncio.wait({pump, watcher}, return_when=asyncio.FIRST_COMPLETED)
            if pump.done():
                pump.result()
        finally:
            await _end(pump, watcher)

    async def _pump(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self.body_iterator) as events:
            first = asyncio.ensure_future(anext(events))
            keeper: asyncio.Task[None] | None = None
            try:
                await asyncio.wait({first}, timeout=self._patience_s)
                fault = first.exception() if first.done() else None
                if isinstance(fault, Exception) and not isinstance(fault, StopAsyncIteration):
                    if not isinstance(fault, PagodaError):
                        logger.error("a stream failed", exc_info=fault)
                    await error_response(fault, scope)(scope, receive, send)
                    return
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                if self._keep_alive_s:
                    self._last_sent_s = time.monotonic()
                    keeper = asyncio.create_task(self._keep_alive(send))
                await self._send_events(events, first, send)
            finally:
                await _end(first, *([keeper] if keeper else []))

    async def _send_events(
        self, events: AsyncGenerator[bytes, None], first: "asyncio.Future[bytes]", send: Send
    ) -> None:
        last = b""
        try:
            await send({"type": "http.response.body", "body": await first, "more_body": True})
            async for body in events:
                await send({"type": "http.response.body", "body": body, "more_body": True})
                self._last_sent_s = time.monotonic()
        except StopAsyncIteration:  # there was none: who follows an answer has had all of it
            pass
        except PagodaError as error:
            last = event(error_json(error)) + DONE
        except Exception as error:
            logger.exception("a stream failed")
            last = event(error_json(error)) + DONE
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _keep_alive(self, send: Send) -> None:
        while True:
            silence_s = time.monotonic() - self._last_sent_s
            if silence_s >= self._keep_alive_s:
                await send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})
                self._last_sent_s, silence_s = time.monotonic(), 0.0
            await asyncio.sleep(self._keep_alive_s - silence_s)


class Source(Protocol[Delta]):
    """The source of a stream: a run, or a conversation over one."""

    def deltas(self) -> AsyncGenerator[list[Delta], None]:
        """The new parts as they arrive."""
        ...


async def stream_events(source: Source[Delta], chunks: ChunkEncoder[Delta], run: Run) -> AsyncGenerator[bytes, None]:
    """Deltas as events: deltas that came together are sent together, the opening with the first of them.

    If the run can be resumed, each event has an id, and events that the client already has are not sent again.

    Args:
        run: below `source`.
    """
    ids = run.event_ids
    opening = b"" if run.call.resumption is not None else chunks.opening()  # a client that resumes has had it
    try:
        async with aclosing(source.deltas()) as stream:
            async for deltas in stream:
                parts: list[bytes] = []
                for delta in deltas:
                    if num_entries := chunks.num_log_probabilities(delta):
                        body = await run.on_thread(partial(chunks.delta, delta), num_bytes=ENTRY_BYTES * num_entries)
                    else:
                        body = chunks.delta(delta)
                    if ids is not None:
                        event_id = ids.advance(delta)
                        if body and not delta.is_replayed:
                            parts.append(with_id(body, event_id))
                    elif body:
                        parts.append(body)
                if parts:
                    yield opening + b"".join(parts)
                    opening = b""
        yield opening + chunks.closing()
    finally:
        run.release()


async def _end(*tasks: "asyncio.Future[Any]") -> None:
    """Cancel the tasks that still run, and wait for their end."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
