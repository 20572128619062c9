"""Counts the calls that a drain waits for, and answers those that do not end in time."""

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagoda_common.errors import NotReady
from pagoda_frontend.budget.caller import current_hold
from pagoda_frontend.http.errors import error_response
from pagoda_frontend.serving.serving import RETRY_AFTER_S, Serving


class CountCalls:
    """Counts each POST from its head to the last byte of its answer, and the memory that it holds.

    A call that is cancelled by the server's close before its answer began gets a 503, which a client or load balancer
    retries at another frontend.
    """

    def __init__(self, app: ASGIApp, *, serving: Serving) -> None:
        self._app = app
        self._serving = serving

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the call on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        hold = self._serving.held_memory.begin()
        current_hold.set(hold)
        try:
            await (self._counted if scope["method"] == "POST" else self._app)(scope, receive, send)
        finally:
            hold.end()

    async def _counted(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        async def send_and_note(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        self._serving.begin_call()
        try:
            await self._app(scope, receive, send_and_note)
        except asyncio.CancelledError:
            if has_begun or not self._serving.is_draining:
                raise
            error = NotReady(self._serving.not_ready_reason, retry_after_s=RETRY_AFTER_S)
            await error_response(error, scope)(scope, receive, send)
        finally:
            self._serving.end_call()
