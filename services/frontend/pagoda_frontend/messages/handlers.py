"""POST /v1/messages and /v1/messages/count_tokens. Their conversation is that of chat completions."""

from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from functools import partial
from typing import Any

from fastapi import Request, Response

from pagoda_common.errors import PagodaError, RequestFailed
from pagoda_common.text import exact_json
from pagoda_frontend.conversation.conversation import Conversation, start_conversation
from pagoda_frontend.conversation.template import template_kwargs
from pagoda_frontend.conversation.tools import plan_tools
from pagoda_frontend.http.answers.opening import announced, patience_of
from pagoda_frontend.http.answers.sse import EventStream, unless_disconnected
from pagoda_frontend.http.body import json_response, read_body
from pagoda_frontend.http.calls import call_of, read_call, tenant_of
from pagoda_frontend.http.errors import anthropic_error, error_object
from pagoda_frontend.messages.input import chat_body_of, has_budget
from pagoda_frontend.messages.output import BlockBuilder, Event
from pagoda_frontend.messages.protocol import CHAT_NAMES, CountTokensBody, MessagesBody
from pagoda_frontend.requests.call_context import unique_id
from pagoda_frontend.requests.errors import fields_named
from pagoda_frontend.requests.event_ids import with_id
from pagoda_frontend.requests.resume import Resumption
from pagoda_frontend.serving.serving import Serving

MESSAGES_PATH = "/v1/messages"


class Messages:
    """The endpoints."""

    def __init__(self, *, serving: Serving) -> None:
        self._serving = serving

    async def create(self, request: Request) -> Response:
        """Create a message (Anthropic's Messages API).

        Raises:
            PagodaError: the request is wrong, was refused, or failed.
        """
        body, resumption = await read_call(request, MessagesBody, serving=self._serving, path=MESSAGES_PATH)
        if body.stream:
            return await self._answer(request, body, resumption)
        return await unless_disconnected(request, self._answer(request, body, resumption))

    async def count_tokens(self, request: Request) -> Response:
        """Count the tokens of a request's prompt. The count may exceed the model's context.

        Raises:
            InvalidRequest: a field is wrong.
        """
        body = await read_body(request, CountTokensBody, serving=self._serving)
        model = self._serving.model_named(body.model)
        work, can_choose = self._serving.work, self._serving.dialect.can_choose
        chat = await work.prepare(lambda: chat_body_of(body))
        with fields_named(CHAT_NAMES):
            tools = (await work.prepare(lambda: plan_tools(chat, can_choose=can_choose))).tools
            prompt = await model.prompts.from_messages(
                chat.messages,
                add_generation_prompt=chat.add_generation_prompt is not False,
                continue_final_message=bool(chat.continue_final_message),
                chat_template_kwargs=template_kwargs(chat),
                tools=tools,
                is_counted=True,
            )
        return json_response({"input_tokens": len(prompt)})

    async def _answer(self, request: Request, body: MessagesBody, resumption: Resumption | None) -> Response:
        serving = self._serving
        chat = await serving.work.prepare(lambda: chat_body_of(body))
        message_id = unique_id("msg_", request.headers.get("x-request-id"))
        with fields_named(CHAT_NAMES):
            tenant = tenant_of(request, serving=serving)
            call = call_of(request.headers, chat, tenant=tenant, request_id=message_id, resumption=resumption)
            if body.stream:
                call = await serving.work.prepare(partial(call.noting, body, path=MESSAGES_PATH))
            conversation = await start_conversation(chat, call, serving=serving, is_budget_wish=not has_budget(body))
        message: dict[str, Any] = {
            "id": call.request_id,
            "type": "message",
            "role": "assistant",
            "model": body.model or conversation.run.model.names[0],
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(conversation),
        }
        if body.stream:
            return EventStream(
                _encoded_stream(conversation, message),
                request_id=call.request_id,
                keep_alive_s=serving.config.sse_keep_alive_interval_s,
                timeout_s=call.timeout_s,
            )
        async with aclosing(_events(conversation, message)) as stream:
            async for _ in stream:
                pass
        return json_response(message, {"X-Request-Id": call.request_id})


async def _events(conversation: Conversation, message: dict[str, Any]) -> AsyncGenerator[list[Event], None]:
    """The events of one answer in order, without those that the client already has; at the end `message` is whole."""
    run = conversation.run
    builder = BlockBuilder(id_seed=run.call.engine_id)
    has_begun = run.call.resumption is not None
    finish_reason = None
    patience_s = patience_of(run.call.timeout_s)
    async with aclosing(announced(conversation.deltas(), patience_s=patience_s)) as stream:
        async for deltas in stream:
            events: list[Event] = []
            if not has_begun:
                events.append(
                    {
                        "type": "message_start",
                        "message": {**message, "usage": {**_usage(conversation), "output_tokens": 0}},
                    }
                )
            has_begun = True
            if deltas is None:
                yield events
                continue
            for delta in deltas:
                told = list(builder.add(delta))
                events += told if not delta.is_replayed else []
                run.note_place(delta)
            yield events
            finish_reason = deltas[-1].finish_reason
    if finish_reason == "abort":
        raise RequestFailed("the request was aborted")
    closing = list(builder.close())
    message |= {"content": builder.blocks, **builder.stop(), "usage": _usage(conversation)}
    closing.append({"type": "message_delta", "delta": builder.stop(), "usage": message["usage"]})
    yield [*closing, {"type": "message_stop"}]


async def _encoded_stream(conversation: Conversation, message: dict[str, Any]) -> AsyncGenerator[bytes, None]:
    """The events as a body. An error before the first event is raised; a later one becomes an event."""
    has_begun = False
    run = conversation.run
    async with aclosing(_events(conversation, message)) as stream:
        try:
            async for events in stream:
                if events:
                    body = _encoded(events)
                    yield body if run.event_ids is None else with_id(body, run.event_ids.line())
                    has_begun = True
        except PagodaError as error:
            if not has_begun:
                raise
            yield _encoded([anthropic_error(error_object(error))])
        finally:
            run.release()


def _encoded(events: Iterable[Event]) -> bytes:
    return b"".join(
        b"event: " + event["type"].encode() + b"\ndata: " + exact_json.dumps(event) + b"\n\n" for event in events
    )


def _usage(conversation: Conversation) -> dict[str, Any]:
    run = conversation.run
    return {
        "input_tokens": run.num_prompt_tokens - run.num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": run.num_cached_tokens,
        "output_tokens": run.num_output_tokens,
    }
