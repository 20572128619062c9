"""Hands large response bodies to the server in pieces: each is written when the client has read the ones before."""

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

PIECE_BYTES = 64 * 1024


class SendInPieces:
    """Cuts large messages of an app into pieces.

    A server writes a whole message into the connection's buffer, however large it is. The call would be over, and its
    memory no longer counted, while a client that does not read keeps the buffer full.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the call on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        turn = asyncio.Lock()  # a keep-alive does not come between the pieces of an event

        async def send_in_pieces(message: Message) -> None:
            body = message.get("body", b"")
            async with turn:
                if len(body) <= PIECE_BYTES:
                    await send(message)
                    return
                for start in range(0, len(body), PIECE_BYTES):
                    has_more = start + PIECE_BYTES < len(body) or message.get("more_body", False)
                    await send({**message, "body": body[start : start + PIECE_BYTES], "more_body": has_more})

        await self._app(scope, receive, send_in_pieces)
