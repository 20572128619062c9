"""POST /v1/chat/completions."""

import time
from typing import Any

from fastapi import Request, Response

from pagoda_frontend.body import read_body
from pagoda_frontend.calls import chunk_options, json_response, prompt_logprobs_of
from pagoda_frontend.chunks import ChatChunks
from pagoda_frontend.conversation import Conversation, start_conversation
from pagoda_frontend.message import CollectedMessage
from pagoda_frontend.prompts import template_message
from pagoda_frontend.protocol import ChatBody
from pagoda_frontend.serving import Serving, unique_id
from pagoda_frontend.sse import EventStream, stream_events, unless_disconnected


class ChatCompletions:
    """The endpoint."""

    def __init__(self, *, serving: Serving) -> None:
        self._serving = serving

    async def create(self, request: Request) -> Response:
        """Answer one request.

        Raises:
            PagodaError: the request is wrong, was refused, or failed.
        """
        body = await read_body(request, ChatBody, max_bytes=self._serving.config.max_request_body_bytes)
        if body.stream:
            return await self._answer(request, body)
        return await unless_disconnected(request, self._answer(request, body))

    async def _answer(self, request: Request, body: ChatBody) -> Response:
        conversation = await start_conversation(
            body,
            serving=self._serving,
            headers=request.headers,
            request_id=unique_id("chatcmpl-", request.headers.get("x-request-id") or body.request_id),
        )
        run, model = conversation.run, conversation.model
        envelope = {
            "id": run.request_id,
            "object": "chat.completion.chunk" if body.stream else "chat.completion",
            "created": int(time.time()),
            "model": body.model or model.names[0],
            "system_fingerprint": model.fingerprint,
        }
        echo = ""
        if body.echo:
            echo = template_message(body.messages[-1], len(body.messages) - 1)["content"] or ""
        headers = {"X-Request-Id": run.request_id}
        if body.stream:
            chunks = ChatChunks(
                echo=echo,
                envelope=envelope,
                options=chunk_options(body, conversation.logprobs),
                prompts=[conversation.prompt],
                n=run.n,
                usage=conversation.usage,
            )
            keep_alive_s = self._serving.config.sse_keep_alive_interval_s
            return EventStream(
                stream_events(conversation, chunks), keep_alive_s=keep_alive_s, timeout_s=run.timeout_s, headers=headers
            )
        messages = await conversation.collect()
        shown = [_choice(message, body, conversation, echo) for message in messages]
        answer: dict[str, Any] = {**envelope, "choices": shown, "usage": conversation.usage()}
        answer["prompt_logprobs"] = prompt_logprobs_of(run, model)
        if body.return_token_ids:
            answer["prompt_token_ids"] = conversation.prompt
        return json_response(answer, headers)


def _choice(message: CollectedMessage, body: ChatBody, conversation: Conversation, echo: str) -> dict[str, Any]:
    logprobs = conversation.logprobs
    content = message.content
    shown: dict[str, Any] = {
        "role": "assistant",
        "content": echo + (content or "") if echo or content is not None else None,
        "refusal": None,
        "reasoning": message.reasoning,
    }
    if message.tool_calls:
        shown["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    choice: dict[str, Any] = {
        "index": message.index,
        "message": shown,
        "logprobs": logprobs.for_chat(message.logprobs) if logprobs is not None else None,
        "finish_reason": message.finish_reason,
        "stop_reason": message.stop_reason,
    }
    if body.return_token_ids:
        choice["token_ids"] = message.token_ids
    return choice
