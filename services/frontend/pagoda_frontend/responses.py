"""POST /v1/responses and the calls about what it answered. The conversation behind it is that of chat completions."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import orjson
from fastapi import Request, Response

from pagoda_common.errors import InvalidRequest, PagodaError
from pagoda_frontend.body import read_body
from pagoda_frontend.calls import json_response
from pagoda_frontend.conversation import start_conversation
from pagoda_frontend.errors import renamed
from pagoda_frontend.responses_draft import Draft, encoded_stream
from pagoda_frontend.responses_input import Message, add_input, chat_body_of
from pagoda_frontend.responses_protocol import CHAT_NAMES, ResponseItem, ResponsesBody
from pagoda_frontend.responses_store import ResponseStore, StoredResponse
from pagoda_frontend.serving import Serving, unique_id
from pagoda_frontend.sse import EventStream, unless_disconnected
from pagoda_frontend.terms import tenant_of

logger = logging.getLogger(__name__)

MAX_METADATA = 16
MAX_METADATA_KEY_CHARS = 64
MAX_METADATA_VALUE_CHARS = 512


class Responses:
    """The endpoints."""

    def __init__(self, *, serving: Serving) -> None:
        self._serving = serving
        self._store = ResponseStore(max_responses=serving.config.max_stored_responses)

    async def create(self, request: Request) -> Response:
        """Answer one request.

        Raises:
            PagodaError: the request is wrong, was refused, or failed.
        """
        body = await read_body(request, ResponsesBody, max_bytes=self._serving.config.max_request_body_bytes)
        if body.stream or body.background:
            return await self._answer(request, body)
        return await unless_disconnected(request, self._answer(request, body))

    async def retrieve(self, request: Request, response_id: str) -> Response:
        """A stored answer as of now; with ?stream=true the events of one that is streamed in the background.

        Raises:
            UnknownResponse: there is none of that id.
            InvalidRequest: it has no events, or starting_after is not a number.
        """
        stored = self._store.get(response_id, self._tenant(request))
        if request.query_params.get("stream", "").lower() not in ("true", "1"):
            return json_response(stored.response)
        if stored.events is None:
            message = "only a response that was created with background=true and stream=true can be streamed"
            raise InvalidRequest(message, field="stream")
        after = request.query_params.get("starting_after", "-1")
        if not after.removeprefix("-").isdecimal() or len(after) > 18:
            raise InvalidRequest(f"starting_after must be an integer, got {after[:100]!r}", field="starting_after")
        return self._event_stream(stored.follow(max(0, int(after) + 1)), response_id)

    async def cancel(self, request: Request, response_id: str) -> Response:
        """End an answer that is made in the background; one that has ended is given as it is.

        Raises:
            UnknownResponse: there is none of that id.
            InvalidRequest: it is not made in the background.
        """
        stored = self._store.get(response_id, self._tenant(request))
        if stored.task is None:
            raise InvalidRequest("only a response that was created with background=true can be cancelled")
        stored.task.cancel()
        await asyncio.wait({stored.task})
        if stored.response["status"] in ("queued", "in_progress"):
            stored.response["status"] = "cancelled"
        return json_response(stored.response)

    async def delete(self, request: Request, response_id: str) -> Response:
        """Forget a stored answer, and end it if it is still made.

        Raises:
            UnknownResponse: there is none of that id.
        """
        stored = self._store.get(response_id, self._tenant(request))
        if stored.task is not None:
            stored.task.cancel()
        self._store.remove(response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    async def _answer(self, request: Request, body: ResponsesBody) -> Response:
        _check(body, can_store=self._serving.config.max_stored_responses > 0)
        tenant = self._tenant(request)
        messages = self._messages(body, tenant)
        response_id = unique_id("resp_")
        try:
            conversation = await start_conversation(
                chat_body_of(body, messages), serving=self._serving, headers=request.headers, request_id=response_id
            )
        except PagodaError as error:
            raise renamed(error, CHAT_NAMES) from error
        draft = Draft(body=body, conversation=conversation, response_id=response_id)
        if body.background:
            stored = self._start_in_background(draft, tenant, messages, with_events=bool(body.stream))
            if body.stream:
                return self._event_stream(stored.follow(0), response_id)
            return json_response(draft.response)
        if body.stream:
            events = self._stored_at_end(draft, body, tenant, messages)
            return self._event_stream(events, response_id, timeout_s=conversation.run.timeout_s)
        async with aclosing(draft.events()) as stream:
            async for _ in stream:
                pass
        self._keep(draft, body, tenant, messages)
        return json_response(draft.response)

    def _tenant(self, request: Request) -> str:
        """Whose answers a call may see: with keys, those of its key."""
        return tenant_of(request.headers, has_api_keys=True) if self._serving.config.api_key else ""

    def _messages(self, body: ResponsesBody, tenant: str) -> list[Message]:
        messages: list[Message] = []
        if body.previous_response_id is not None:
            try:
                previous = self._store.get(body.previous_response_id, tenant)
            except PagodaError as error:
                error.field = "previous_response_id"
                raise
            if previous.response["status"] not in ("completed", "incomplete"):
                status = previous.response["status"]
                raise InvalidRequest(f"the previous response is {status}", field="previous_response_id")
            messages += map(dict, previous.messages)
        add_input(messages, body.input, lambda: self._store.items(tenant))
        return messages

    def _event_stream(
        self, events: AsyncGenerator[bytes, None], response_id: str, timeout_s: float = 0.0
    ) -> EventStream:
        keep_alive_s = self._serving.config.sse_keep_alive_interval_s
        headers = {"X-Request-Id": response_id}
        return EventStream(events, keep_alive_s=keep_alive_s, timeout_s=timeout_s, headers=headers)

    async def _stored_at_end(
        self, draft: Draft, body: ResponsesBody, tenant: str, messages: list[Message]
    ) -> AsyncGenerator[bytes, None]:
        async with aclosing(encoded_stream(draft)) as stream:
            async for events in stream:
                if draft.response["status"] != "in_progress":
                    self._keep(draft, body, tenant, messages)  # before the client is told, who may go on at once
                yield events

    def _keep(self, draft: Draft, body: ResponsesBody, tenant: str, messages: list[Message]) -> None:
        if body.store is not False:
            stored = StoredResponse(tenant, draft.response, messages)
            _complete(stored)
            self._store.add(stored)

    def _start_in_background(
        self, draft: Draft, tenant: str, messages: list[Message], *, with_events: bool
    ) -> StoredResponse:
        num_bytes = len(orjson.dumps(messages))
        stored = StoredResponse(tenant, draft.response, messages, num_bytes, events=[] if with_events else None)

        async def make() -> None:
            try:
                async with aclosing(draft.events()) as stream:
                    async for events in stream:
                        stored.add_events(events)
            except Exception as error:
                if not isinstance(error, PagodaError):
                    logger.exception("a response failed")
                stored.add_events(draft.fail(error))
            else:
                _complete(stored)

        stored.task = asyncio.create_task(make(), name=draft.response["id"])
        self._store.add(stored)
        return stored


def _complete(stored: StoredResponse) -> None:
    """Let the conversation hold its answer."""
    answer = [ResponseItem.model_validate(item) for item in stored.response["output"]]
    add_input(stored.messages, answer, dict)
    stored.num_bytes = len(orjson.dumps(stored.messages)) + len(orjson.dumps(stored.response))


def _check(body: ResponsesBody, *, can_store: bool) -> None:
    if body.background and (body.store is False or not can_store):
        raise InvalidRequest("background needs store=true and a server that stores responses", field="background")
    metadata: dict[str, Any] = body.metadata or {}
    if len(metadata) > MAX_METADATA:
        raise InvalidRequest(f"metadata may have at most {MAX_METADATA} keys, got {len(metadata)}", field="metadata")
    for key, value in metadata.items():
        if len(key) > MAX_METADATA_KEY_CHARS or len(value) > MAX_METADATA_VALUE_CHARS:
            raise InvalidRequest(
                f"metadata.{key[:MAX_METADATA_KEY_CHARS]}: a key may have {MAX_METADATA_KEY_CHARS} characters and a "
                f"value {MAX_METADATA_VALUE_CHARS}, got {len(key)} and {len(value)}",
                field="metadata",
            )
