"""POST /v1/chat/completions."""

import asyncio
from collections.abc import Sequence
from typing import Any

from fastapi import Request, Response

from pagoda_common.errors import InvalidRequest
from pagoda_frontend.conversation.conversation import Conversation, start_conversation
from pagoda_frontend.conversation.message import CollectedMessage
from pagoda_frontend.http.answers.pieced_json import long_json_response
from pagoda_frontend.http.answers.sse import EventStream, stream_events, unless_disconnected
from pagoda_frontend.http.body import read_body
from pagoda_frontend.http.calls import call_of, read_call, tenant_of
from pagoda_frontend.openai.chunks import ChatChunks, chunk_options
from pagoda_frontend.openai.logprobs import prompt_logprobs_by_id
from pagoda_frontend.openai.protocol import ChatBatchBody, ChatBody, ConversationBody
from pagoda_frontend.requests.call_context import CallContext, unique_id
from pagoda_frontend.requests.prompts import template_message
from pagoda_frontend.requests.resume import Resumption
from pagoda_frontend.serving.served_model import ServedModel
from pagoda_frontend.serving.serving import Serving

CHAT_PATH = "/v1/chat/completions"
MAX_STOP_STRINGS = 4
"""OpenAI's bound for this endpoint; other endpoints have the engine's."""
MAX_CONVERSATIONS = 1024
"""Maximum number of conversations in one batch."""


def _check_stop(body: ConversationBody) -> None:
    if isinstance(body.stop, list) and len(body.stop) > MAX_STOP_STRINGS:
        message = f"stop must have at most {MAX_STOP_STRINGS} strings, got {len(body.stop)}"
        raise InvalidRequest(message, field="stop")


class ChatCompletions:
    """The endpoint."""

    def __init__(self, *, serving: Serving) -> None:
        self._serving = serving

    async def create(self, request: Request) -> Response:
        """Answer a conversation.

        Raises:
            PagodaError: the request is wrong, was refused, or failed.
        """
        body, resumption = await read_call(request, ChatBody, serving=self._serving, path=CHAT_PATH)
        _check_stop(body)
        call = self._call(request, body, resumption)
        if body.stream:
            noted = await self._serving.work.prepare(lambda: call.noting(body, path=CHAT_PATH))
            return await self._stream(body, noted)
        return await unless_disconnected(request, self._answer(body, call))

    async def create_batch(self, request: Request) -> Response:
        """Answer several conversations. Choice i of conversation c has index c * n + i.

        Raises:
            PagodaError: a request is wrong, was refused, or failed; the others are aborted.
        """
        body = await read_body(request, ChatBatchBody, serving=self._serving)
        _check_stop(body)
        return await unless_disconnected(request, self._answer_batch(request, body))

    async def _answer_batch(self, request: Request, body: ChatBatchBody) -> Response:
        bodies = batch_bodies(body)
        call = self._call(request, bodies[0])
        conversations = [
            await start_conversation(one, call.part(place), serving=self._serving) for place, one in enumerate(bodies)
        ]
        tasks = [asyncio.create_task(conversation.collect()) for conversation in conversations]
        try:
            collected = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        def answer() -> dict[str, Any]:
            choices = []
            for one, conversation, messages in zip(bodies, conversations, collected, strict=True):
                choices += [_choice(message, one, conversation, _echo_of(one)) for message in messages]
            for index, choice in enumerate(choices):
                choice["index"] = index
            return {
                **_envelope(body, call, conversations[0].run.model),
                "choices": choices,
                "usage": _sum([conversation.usage() for conversation in conversations]),
            }

        headers = {"X-Request-Id": call.request_id}
        num_bytes = sum(conversation.run.answer_bytes for conversation in conversations)
        return await long_json_response(answer, headers, work=self._serving.work, num_bytes=num_bytes)

    async def _stream(self, body: ChatBody, call: CallContext) -> Response:
        conversation = await start_conversation(body, call, serving=self._serving)
        run = conversation.run
        chunks = ChatChunks(
            echo=_echo_of(body),
            envelope=_envelope(body, call, run.model),
            options=chunk_options(
                body, conversation.logprobs, has_usage=self._serving.config.enable_force_include_usage
            ),
            prompts=[conversation.prompt],
            n=run.n,
            usage=conversation.usage,
        )
        return EventStream(
            stream_events(conversation, chunks, run),
            request_id=call.request_id,
            keep_alive_s=self._serving.config.sse_keep_alive_interval_s,
            timeout_s=call.timeout_s,
        )

    async def _answer(self, body: ChatBody, call: CallContext) -> Response:
        conversation = await start_conversation(body, call, serving=self._serving)
        run, echo = conversation.run, _echo_of(body)
        messages = await conversation.collect()

        def answer() -> dict[str, Any]:
            whole: dict[str, Any] = {
                **_envelope(body, call, run.model),
                "choices": [_choice(message, body, conversation, echo) for message in messages],
                "usage": conversation.usage(),
                "service_tier": None,
                "kv_transfer_params": None,
                "prompt_logprobs": prompt_logprobs_by_id(run.prompt_logprobs[0], run.model.tokenizer),
            }
            whole["prompt_token_ids"] = conversation.prompt if body.return_token_ids else None
            return whole

        headers = {"X-Request-Id": call.request_id}
        return await long_json_response(answer, headers, work=self._serving.work, num_bytes=run.answer_bytes)

    def _call(self, request: Request, body: ChatBody, resumption: Resumption | None = None) -> CallContext:
        request_id = unique_id("chatcmpl-", request.headers.get("x-request-id") or body.request_id)
        tenant = tenant_of(request, serving=self._serving)
        return call_of(request.headers, body, tenant=tenant, request_id=request_id, resumption=resumption)


def batch_bodies(body: ChatBatchBody) -> list[ChatBody]:
    """A body for each conversation.

    Raises:
        InvalidRequest: there are none or too many, or a stream is requested.
    """
    if body.stream:
        raise InvalidRequest("a batch cannot be streamed", field="stream")
    if not 1 <= len(body.messages) <= MAX_CONVERSATIONS:
        raise InvalidRequest(
            f"messages must have between 1 and {MAX_CONVERSATIONS} conversations, got {len(body.messages)}",
            field="messages",
        )
    shared = {name: value for name, value in body if name != "messages" and value is not None}
    return [ChatBody.model_construct(**shared, messages=messages) for messages in body.messages]


def _envelope(body: ConversationBody, call: CallContext, model: ServedModel) -> dict[str, Any]:
    return {
        "id": call.request_id,
        "object": "chat.completion.chunk" if body.stream else "chat.completion",
        "created": call.created,
        "model": body.model or model.names[0],
        "system_fingerprint": model.fingerprint,
    }


def _echo_of(body: ChatBody) -> str:
    """Text at the beginning of the answer: the last message, if the answer continues and echoes it."""
    is_answered = body.add_generation_prompt is not False and body.messages[-1].role != "assistant"
    if not body.echo or is_answered:
        return ""
    return template_message(body.messages[-1], len(body.messages) - 1)["content"] or ""


def _sum(usages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The sum of usages, details included."""
    total: dict[str, Any] = {}
    for usage in usages:
        for name, value in usage.items():
            total[name] = _sum([total.get(name, {}), value]) if isinstance(value, dict) else total.get(name, 0) + value
    return total


def _choice(message: CollectedMessage, body: ChatBody, conversation: Conversation, echo: str) -> dict[str, Any]:
    logprobs = conversation.logprobs
    content = message.content
    shown: dict[str, Any] = {
        "role": "assistant",
        "content": echo + (content or "") if echo or content is not None else None,
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
        "tool_calls": [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ],
        "reasoning": message.reasoning,
    }
    choice: dict[str, Any] = {
        "index": message.index,
        "message": shown,
        "logprobs": logprobs.for_chat(message.logprobs) if logprobs is not None else None,
        "finish_reason": message.finish_reason,
        "stop_reason": message.stop_reason,
    }
    choice["token_ids"] = message.token_ids if body.return_token_ids else None
    return choice
