"""POST /invocations, the one path that SageMaker calls: generation or pooling, depending on the body."""

from fastapi import Request, Response
from starlette.types import Message

from pagoda_common.errors import InvalidRequest
from pagoda_frontend.http.body import parse_body, read_bytes
from pagoda_frontend.openai.chat import ChatCompletions
from pagoda_frontend.openai.completions import Completions
from pagoda_frontend.openai.embeddings import Embeddings
from pagoda_frontend.openai.protocol import RequestBody
from pagoda_frontend.pooling.handlers import PoolingCalls
from pagoda_frontend.serving.serving import Serving


class Invocations:
    """The endpoint."""

    def __init__(
        self,
        *,
        chat: ChatCompletions,
        completions: Completions,
        embeddings: Embeddings,
        pooling: PoolingCalls,
        serving: Serving,
    ) -> None:
        self._chat = chat
        self._completions = completions
        self._embeddings = embeddings
        self._pooling = pooling
        self._serving = serving

    async def create(self, request: Request) -> Response:
        """Answer as /v1/chat/completions if the body has messages, as /v1/completions if it has a prompt (SageMaker).

        A pooling model answers as /v1/embeddings, /classify or /pooling, by its first task, and as /rerank or /score if
        the body has a query.

        Raises:
            PagodaError: the request is wrong, was refused, or failed.
        """
        raw = await read_bytes(request, serving=self._serving)
        given = parse_body(raw, RequestBody).model_extra or {}
        unread: list[Message] = [{"type": "http.request", "body": raw, "more_body": False}]

        async def receive() -> Message:
            return unread.pop() if unread else await request.receive()

        again = Request(request.scope, receive)
        if any(name in given for name in ("query", "queries", "text_1", "data_1")):
            is_rank = isinstance(given.get("query"), str) and "documents" in given
            return await (self._pooling.rerank if is_rank else self._pooling.score)(again)
        model = self._serving.model_named(given.get("model") if isinstance(given.get("model"), str) else None)
        if "input" in given or ("messages" in given and model.only_pools):
            first = next(iter(model.pooling_tasks), "embed")
            pooled = {"embed": self._embeddings.create, "classify": self._pooling.classify}
            return await pooled.get(first, self._pooling.pool)(again)
        if "messages" in given:
            return await self._chat.create(again)
        if "prompt" in given:
            return await self._completions.create(again)
        raise InvalidRequest("one of messages, prompt, input and query must be given")
