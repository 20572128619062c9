"""POST /invocations, the one path that SageMaker calls: a conversation or a completion, whichever the body is."""

from fastapi import Request, Response
from starlette.types import Message

from pagoda_common.errors import InvalidRequest
from pagoda_frontend.http.body import parse_body, read_bytes
from pagoda_frontend.openai.chat import ChatCompletions
from pagoda_frontend.openai.completions import Completions
from pagoda_frontend.openai.protocol import RequestBody
from pagoda_frontend.requests.serving import Serving


class Invocations:
    """The endpoint."""

    def __init__(self, *, chat: ChatCompletions, completions: Completions, serving: Serving) -> None:
        self._chat = chat
        self._completions = completions
        self._serving = serving

    async def create(self, request: Request) -> Response:
        """Answer one request: as /v1/chat/completions if there are messages, as /v1/completions if there is a prompt.

        Raises:
            PagodaError: the request is wrong, was refused, or failed.
        """
        raw = await read_bytes(request, serving=self._serving)
        given = parse_body(raw, RequestBody).model_extra or {}
        unread: list[Message] = [{"type": "http.request", "body": raw, "more_body": False}]

        async def receive() -> Message:
            return unread.pop() if unread else await request.receive()

        again = Request(request.scope, receive)
        if "messages" in given:
            return await self._chat.create(again)
        if "prompt" in given:
            return await self._completions.create(again)
        raise InvalidRequest("one of messages and prompt must be given")
