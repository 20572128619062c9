"""POST /v1/chat/completions."""

import time
from typing import Any

from fastapi import Request, Response

from pagoda_common.errors import InvalidRequest
from pagoda_frontend.body import read_body
from pagoda_frontend.calls import (
    chunk_options,
    json_response,
    logprob_writer,
    make_run,
    sampling_params_of,
    usage_of,
)
from pagoda_frontend.choices import choices_of
from pagoda_frontend.chunks import ChatChunks
from pagoda_frontend.logprobs import LogprobWriter
from pagoda_frontend.prompts import template_message
from pagoda_frontend.protocol import ChatBody
from pagoda_frontend.run import CollectedSequence
from pagoda_frontend.serving import Serving, unique_id
from pagoda_frontend.sse import EventStream, stream_events, unless_disconnected
from pagoda_frontend.terms import terms_of


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
        serving = self._serving
        model = serving.model_named(body.model)
        _check_response_format(body.response_format)
        num_top = _num_top_logprobs(body, max_logprobs=serving.config.max_logprobs)
        terms = terms_of(request.headers, body, has_api_keys=bool(serving.config.api_key))
        choices = choices_of(body, best_of=None, with_logprobs=num_top is not None)
        max_tokens = body.max_completion_tokens
        try:
            params = sampling_params_of(
                body,
                serving=serving,
                model=model,
                choices=choices,
                logprobs=num_top,
                max_tokens=max_tokens if max_tokens is not None else body.max_tokens,
            )
        except InvalidRequest as error:
            raise _renamed(error, body) from error
        prompt = await model.prompts.from_messages(
            body.messages,
            add_generation_prompt=body.add_generation_prompt is not False,
            continue_final_message=bool(body.continue_final_message),
            chat_template_kwargs=body.chat_template_kwargs,
            add_special_tokens=bool(body.add_special_tokens),
        )
        run = make_run(
            body,
            serving=serving,
            model=model,
            request_id=unique_id("chatcmpl-", request.headers.get("x-request-id") or body.request_id),
            prompts=[prompt],
            params=params,
            choices=choices,
            terms=terms,
            field="messages",
        )
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
        logprobs = logprob_writer(body, model, num_top)
        headers = {"X-Request-Id": run.request_id}
        if body.stream:
            chunks = ChatChunks(
                echo=echo,
                envelope=envelope,
                options=chunk_options(body, logprobs),
                prompts=[prompt],
                n=run.n,
                usage=lambda: usage_of(run, serving),
            )
            keep_alive_s = serving.config.sse_keep_alive_interval_s
            return EventStream(
                stream_events(run, chunks), keep_alive_s=keep_alive_s, timeout_s=run.timeout_s, headers=headers
            )
        sequences = await run.collect()
        shown = [_choice(sequence, body, logprobs, echo) for sequence in sequences]
        answer: dict[str, Any] = {**envelope, "choices": shown, "usage": usage_of(run, serving)}
        if body.return_token_ids:
            answer["prompt_token_ids"] = prompt
        return json_response(answer, headers)


def _check_response_format(response_format: dict[str, Any] | None) -> None:
    kind = "text" if response_format is None else response_format.get("type")
    if kind in ("json_object", "json_schema", "structural_tag"):
        raise InvalidRequest(f"response_format of type {kind} is not supported yet", field="response_format")
    if kind != "text":
        raise InvalidRequest(f"response_format.type must be text, got {kind!r}", field="response_format")


def _num_top_logprobs(body: ChatBody, *, max_logprobs: int) -> int | None:
    """Top log probabilities per token; None when no log probabilities are asked for."""
    top = body.top_logprobs
    if top is not None:
        if top < -1:
            raise InvalidRequest(f"top_logprobs must be at least 0, got {top}", field="top_logprobs")
        if max_logprobs != -1 and (top > max_logprobs or top == -1):
            raise InvalidRequest(f"top_logprobs must be at most {max_logprobs}, got {top}", field="top_logprobs")
        if top and not body.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs=true", field="top_logprobs")
    return (top or 0) if body.logprobs else None


def _renamed(error: InvalidRequest, body: ChatBody) -> InvalidRequest:
    """`error` with the name under which the client gave the bound."""
    if error.field == "max_tokens" and body.max_completion_tokens is not None:
        message = error.message.replace("max_tokens", "max_completion_tokens")
        return InvalidRequest(message, field="max_completion_tokens")
    return error


def _choice(sequence: CollectedSequence, body: ChatBody, logprobs: LogprobWriter | None, echo: str) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "index": sequence.index,
        "message": {"role": "assistant", "content": echo + sequence.text, "refusal": None},
        "logprobs": logprobs.for_chat(sequence.logprobs) if logprobs is not None else None,
        "finish_reason": sequence.finish_reason,
        "stop_reason": sequence.stop_reason,
    }
    if body.return_token_ids:
        choice["token_ids"] = sequence.token_ids
    return choice
