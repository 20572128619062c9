"""POST /v1/responses and the calls for stored responses. The conversation is that of chat completions."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import Any

from fastapi import Request, Response

from pagoda_common.errors import InvalidRequest, PagodaError
from pagoda_frontend.budget.caller import current_hold, hold_more
from pagoda_frontend.budget.fields import check_count
from pagoda_frontend.conversation.conversation import Conversation, start_conversation
from pagoda_frontend.http.answers.sse import EventStream, unless_disconnected
from pagoda_frontend.http.body import json_response, owner_of, read_body
from pagoda_frontend.http.calls import call_of, tenant_of
from pagoda_frontend.requests.call_context import unique_id
from pagoda_frontend.requests.errors import fields_named
from pagoda_frontend.requests.event_ids import HEADER, Place, place_of
from pagoda_frontend.requests.resume import Resumption, resumption_at
from pagoda_frontend.responses.draft import Draft, encoded_stream
from pagoda_frontend.responses.input import Message, add_input, chat_body_of
from pagoda_frontend.responses.items import input_items, item_page
from pagoda_frontend.responses.protocol import CHAT_NAMES, ResponseItem, ResponsesBody
from pagoda_frontend.responses.store import StoredResponse, held_bytes_of
from pagoda_frontend.serving.serving import Serving

logger = logging.getLogger(__name__)

RESPONSES_PATH = "/v1/responses"
MAX_METADATA = 16
MAX_METADATA_KEY_CHARS = 64
MAX_METADATA_VALUE_CHARS = 512


class Responses:
    """The endpoints."""

    def __init__(self, *, serving: Serving) -> None:
        self._serving = serving
        self._store = serving.shared.responses

    async def create(self, request: Request) -> Response:
        """Create a response.

        Raises:
            PagodaError: the request is wrong, was refused, or failed.
        """
        place = place_of(request.headers)
        if place is not None:
            return await self._resume(request, place)
        body = await read_body(request, ResponsesBody, serving=self._serving)
        if body.stream or body.background:
            return await self._answer(request, body)
        return await unless_disconnected(request, self._answer(request, body))

    async def retrieve(self, request: Request, response_id: str) -> Response:
        """Get a stored response.

        With ?stream=true: the events of a response that is streamed in the background. With Last-Event-ID, also the
        events of a stream whose frontend is gone.

        Raises:
            NotFound: there is none of that id.
            InvalidRequest: the response has no events, or starting_after is not a number or is too small.
        """
        is_streamed = request.query_params.get("stream", "").lower() in ("true", "1")
        place = place_of(request.headers) if is_streamed else None
        if place is not None:
            if place.key != response_id:
                raise InvalidRequest(f"{HEADER} is not an event of {response_id[:100]!r}", field=HEADER)
            return await self._resume(request, place)
        stored = self._store.get(response_id, self._tenant(request))
        if not is_streamed:
            return _shown(request, stored.response)
        if stored.events is None:
            message = "only a response that was created with background=true and stream=true can be streamed"
            raise InvalidRequest(message, field="stream")
        after = request.query_params.get("starting_after", "-1")
        if not after.removeprefix("-").isdecimal() or len(after) > 18:
            raise InvalidRequest(f"starting_after must be an integer, got {after[:100]!r}", field="starting_after")
        return self._follow(stored, int(after) + 1, field="starting_after")

    async def input_items(self, request: Request, response_id: str) -> Response:
        """List the input items of a stored response in pages, without its instructions.

        Raises:
            NotFound: there is none of that id.
            InvalidRequest: a query parameter is wrong.
        """
        stored = self._store.get(response_id, self._tenant(request))
        return _shown(request, item_page(stored.input_items, request.query_params))

    async def cancel(self, request: Request, response_id: str) -> Response:
        """Cancel a background response. A response that has ended is returned unchanged.

        Raises:
            NotFound: there is none of that id.
            InvalidRequest: the response was not created in the background.
        """
        stored = self._store.get(response_id, self._tenant(request))
        if stored.task is None:
            raise InvalidRequest("Cannot cancel a synchronous response: it was not created with background=true.")
        stored.task.cancel()
        await asyncio.wait({stored.task})
        if stored.response["status"] in ("queued", "in_progress"):
            stored.response["status"] = "cancelled"
        return _shown(request, stored.response)

    async def delete(self, request: Request, response_id: str) -> Response:
        """Delete a stored response, and cancel it if it is running.

        Raises:
            NotFound: there is none of that id.
        """
        stored = self._store.get(response_id, self._tenant(request))
        if stored.task is not None:
            stored.task.cancel()
        self._store.remove(response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    async def _resume(self, request: Request, place: Place) -> Response:
        """The events after `place`, of an answer made here in the background or of one whose frontend is gone."""
        stored = self._store.find(place.key, self._tenant(request))
        if stored is not None and stored.events is not None:
            return self._follow(stored, place.num_events, field=HEADER)
        tenant = self._tenant(request)
        resumption = await resumption_at(place, engine=self._serving.engine, path=RESPONSES_PATH, tenant=tenant)
        return await self._answer(request, resumption.body_as(ResponsesBody), resumption)

    def _follow(self, stored: StoredResponse, start: int, *, field: str) -> EventStream:
        if 0 < start < stored.first_event:
            message = f"events before number {stored.first_event} were sent by a frontend that is lost, got {start}"
            raise InvalidRequest(f"{field}: {message}", field=field)
        return self._event_stream(stored.follow(max(start, stored.first_event)), stored.response["id"])

    async def _answer(self, request: Request, body: ResponsesBody, resumption: Resumption | None = None) -> Response:
        _check(body, can_store=self._serving.config.max_stored_responses > 0)
        tenant = self._tenant(request)
        conversation, draft, kept = await self._draft(request, body, tenant, resumption)
        if body.background:
            stored = self._start_in_background(draft, kept, with_events=bool(body.stream))
            if body.stream:
                return self._event_stream(stored.follow(draft.num_events), stored.response["id"])
            return json_response(draft.response)
        if body.stream:
            events = self._stored_at_end(draft, body, kept)
            return self._event_stream(events, draft.response["id"], timeout_s=conversation.run.call.timeout_s)
        async with aclosing(draft.events()) as stream:
            async for _ in stream:
                pass
        self._keep(body, kept)
        return json_response(draft.response)

    async def _draft(
        self, request: Request, body: ResponsesBody, tenant: str, resumption: Resumption | None
    ) -> tuple[Conversation, Draft, StoredResponse]:
        """A new answer in its three forms: the conversation, the draft with its events, and the stored answer."""
        work = self._serving.work
        if resumption is None:
            response_id, num_events = unique_id("resp_"), 0
            messages = await work.prepare(lambda: self._messages(body, tenant))
            items = await work.prepare(
                lambda: input_items(body.input, stored_items=lambda: self._store.items(tenant), id_seed=response_id)
            )
        else:
            response_id, num_events = resumption.response_id, resumption.place.num_events
            messages, items = resumption.note["messages"], resumption.note["input_items"]
        chat = await work.prepare(lambda: chat_body_of(body, messages))
        with fields_named(CHAT_NAMES):
            call = call_of(request.headers, chat, tenant=tenant, request_id=response_id, resumption=resumption)
            if body.stream:
                note = partial(call.noting, body, path=RESPONSES_PATH, messages=messages, input_items=items)
                call = await work.prepare(note)
            conversation = await start_conversation(chat, call, serving=self._serving)
        draft = Draft(body=body, conversation=conversation, num_events=num_events)
        return conversation, draft, StoredResponse(tenant, draft.response, messages, input_items=items)

    def _tenant(self, request: Request) -> str:
        """The owner of the answers that a call may see: its key, or its X-Tenant-Id on a server without keys."""
        return tenant_of(request, serving=self._serving)

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
        check_count("input", messages)
        return messages

    def _event_stream(
        self, events: AsyncGenerator[bytes, None], response_id: str, timeout_s: float = 0.0
    ) -> EventStream:
        keep_alive_s = self._serving.config.sse_keep_alive_interval_s
        return EventStream(events, request_id=response_id, keep_alive_s=keep_alive_s, timeout_s=timeout_s)

    async def _stored_at_end(
        self, draft: Draft, body: ResponsesBody, kept: StoredResponse
    ) -> AsyncGenerator[bytes, None]:
        async with aclosing(encoded_stream(draft)) as stream:
            async for events in stream:
                if draft.response["status"] != "in_progress":
                    self._keep(body, kept)  # before the client learns of it and continues
                if events:
                    yield events

    def _keep(self, body: ResponsesBody, kept: StoredResponse) -> None:
        if body.store is not False:
            _complete(kept)
            self._store.add(kept)

    def _start_in_background(self, draft: Draft, stored: StoredResponse, *, with_events: bool) -> StoredResponse:
        stored.num_bytes = held_bytes_of(stored.messages, stored.input_items, stored.response)
        stored.events = [] if with_events else None
        stored.first_event = draft.num_events

        call_hold = current_hold.get()
        hold = None if call_hold is None else call_hold.hand_over()

        async def make() -> None:
            current_hold.set(hold)
            try:
                async with aclosing(draft.events()) as stream:
                    async for events in stream:
                        if with_events:
                            hold_more(sum(map(len, events)))
                        stored.add_events(events)
            except Exception as error:
                if not isinstance(error, PagodaError):
                    logger.exception("a response failed")
                stored.add_events(draft.fail(error))
            else:
                _complete(stored)
            finally:
                draft.release()
                if hold is not None:
                    hold.end()
                self._store.trim()

        stored.task = asyncio.create_task(make(), name=draft.response["id"])
        self._store.add(stored)
        return stored


def _shown(request: Request, value: dict[str, Any]) -> Response:
    """The stored response as JSON, whose memory is counted until the client has it; raises QueueFull."""
    answer = json_response(value)
    hold = current_hold.get()
    if hold is not None:
        hold.owner = owner_of(request.scope)
        hold_more(len(answer.body))
    return answer


def _complete(stored: StoredResponse) -> None:
    """Add the answer to the stored conversation."""
    answer = [ResponseItem.model_validate(item) for item in stored.response["output"]]
    add_input(stored.messages, answer, dict)
    stored.num_bytes = held_bytes_of(stored.messages, stored.input_items, stored.response)
    stored.num_bytes += sum(map(len, stored.events or ()))


def _check(body: ResponsesBody, *, can_store: bool) -> None:
    if body.background and (body.store is False or not can_store):
        raise InvalidRequest(
            "background can only be used when `store` is true, on a server that stores responses", field="background"
        )
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
