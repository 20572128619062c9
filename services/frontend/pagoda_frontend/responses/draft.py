"""Draft: builds one answer of /v1/responses: the growing response object, and its events."""

import time
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from typing import Any

from pagoda_common.errors import PagodaError, RequestFailed
from pagoda_common.text import exact_json
from pagoda_frontend.conversation.conversation import Conversation
from pagoda_frontend.http.answers.opening import announced, patience_of
from pagoda_frontend.http.errors import error_object
from pagoda_frontend.responses.output import Event, OutputBuilder
from pagoda_frontend.responses.protocol import ResponsesBody, ResponseToolChoice


class Draft:
    """Builds one response. Its events are consumed once, even if no client reads them."""

    def __init__(
        self,
        *,
        body: ResponsesBody,
        conversation: Conversation,
        num_events: int = 0,
    ) -> None:
        """`num_events`: number of events that were already sent, for a resumed answer."""
        self._conversation = conversation
        self._builder = OutputBuilder(logprobs=conversation.logprobs, id_seed=conversation.run.call.engine_id)
        self._num_events = num_events
        self._output_token_ids: list[int] | None = [] if body.enable_response_messages else None
        """Writes the output's log probabilities, if they are requested."""
        self.response = _response_of(body, conversation)
        """The response object, as of now."""

    @property
    def num_events(self) -> int:
        """Number of events so far, including those of a lost frontend."""
        return self._num_events

    async def events(self) -> AsyncGenerator[list[bytes], None]:
        """Encoded events in order; at the end the response is whole. No event is sent while the request may still be
        refused or time out, so that it can get its own status.

        Raises:
            PagodaError: the request was refused or failed.
        """
        response, builder, run = self.response, self._builder, self._conversation.run
        if self._num_events:
            response["status"] = "in_progress"
        finish_reason = None
        patience_s = patience_of(run.call.timeout_s)
        async with aclosing(announced(self._conversation.deltas(), patience_s=patience_s)) as stream:
            async for deltas in stream:
                opening = self._opening() if self._num_events == 0 else []
                if deltas is None:
                    yield self._addressed(opening)
                    continue
                events = opening
                for delta in deltas:
                    told = list(builder.add(delta))
                    events += told if not delta.is_replayed else []
                    run.note_place(delta)
                    if self._output_token_ids is not None:
                        self._output_token_ids += delta.token_ids
                finish_reason = deltas[-1].finish_reason
                response["output"] = builder.finished_items()
                yield self._addressed(events)
        if finish_reason == "abort":
            raise RequestFailed("the request was aborted")
        is_whole = finish_reason != "length"
        closing = list(builder.close("completed" if is_whole else "incomplete"))
        response["output"] = builder.items
        response["usage"] = self._usage()
        response |= self._raw_messages()
        if is_whole:
            response |= {"status": "completed", "completed_at": int(time.time())}
        else:
            response |= {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
        closing.append({"type": f"response.{response['status']}", "response": response})
        yield self._encoded(closing)

    def fail(self, error: Exception) -> list[bytes]:
        """End the response with `error`; the event of that."""
        shown = error_object(error)
        code = "server_error" if shown["code"] >= 500 else "invalid_prompt"
        self.response |= {"status": "failed", "error": {"code": code, "message": shown["message"]}}
        return self._encoded([{"type": "response.failed", "response": self.response}])

    def _addressed(self, events: list[Event]) -> list[bytes]:
        """As `_encoded`, with the client's place as the id of the last event."""
        encoded, ids = self._encoded(events), self._conversation.run.event_ids
        if encoded and ids is not None:
            encoded[-1] = ids.line(self._num_events) + encoded[-1]
        return encoded

    def release(self) -> None:
        """The client has everything, or is gone: the stream will not be resumed."""
        self._conversation.run.release()

    def _opening(self) -> list[Event]:
        self.response["status"] = "in_progress"
        snapshot = dict(self.response)
        return [{"type": f"response.{name}", "response": snapshot} for name in ("created", "in_progress")]

    def _encoded(self, events: Iterable[Event]) -> list[bytes]:
        encoded = []
        for event in events:
            payload = exact_json.dumps({**event, "sequence_number": self._num_events})
            encoded.append(b"event: " + event["type"].encode() + b"\ndata: " + payload + b"\n\n")
            self._num_events += 1
        return encoded

    def _raw_messages(self) -> dict[str, Any]:
        """input_messages and output_messages: texts with special tokens, and token ids, if they are requested."""
        if self._output_token_ids is None:
            return {}
        decode = self._conversation.run.model.tokenizer.decode
        return {
            name: [
                {
                    "type": "raw_message_tokens",
                    "message": decode(token_ids, skip_special_tokens=False),
                    "tokens": list(token_ids),
                }
            ]
            for name, token_ids in (
                ("input_messages", self._conversation.prompt),
                ("output_messages", self._output_token_ids),
            )
        }

    def _usage(self) -> dict[str, Any]:
        run = self._conversation.run
        details = self._conversation.usage().get("completion_tokens_details", {})
        return {
            "input_tokens": run.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": run.num_cached_tokens, "cache_write_tokens": 0},
            "output_tokens": run.num_output_tokens,
            "output_tokens_details": {"reasoning_tokens": details.get("reasoning_tokens", 0)},
            "total_tokens": run.num_prompt_tokens + run.num_output_tokens,
        }


async def encoded_stream(draft: Draft) -> AsyncGenerator[bytes, None]:
    """The events of `draft` as a body. An error before the first event is raised; a later one becomes an event."""
    has_begun = False
    async with aclosing(draft.events()) as stream:
        try:
            async for events in stream:
                yield b"".join(events)
                has_begun = True
        except PagodaError as error:
            if not has_begun:
                raise
            yield b"".join(draft.fail(error))
        finally:
            draft.release()


def _response_of(body: ResponsesBody, conversation: Conversation) -> dict[str, Any]:
    call = conversation.run.call
    defaults = conversation.run.model.defaults.values
    asked = body.tool_choice
    choice = asked.model_dump(exclude_none=True) if isinstance(asked, ResponseToolChoice) else asked
    text: dict[str, Any] = {"format": {"type": "text"}}
    if body.text is not None:
        text |= body.text.model_dump(exclude_none=True, by_alias=True)
    return {
        "id": call.request_id,
        "object": "response",
        "created_at": call.created,
        "completed_at": None,
        "status": "queued" if body.background else "in_progress",
        "background": bool(body.background),
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "model": body.model or conversation.run.model.names[0],
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {
            "effort": body.reasoning.effort if body.reasoning else None,
            "summary": body.reasoning.summary if body.reasoning else None,
        },
        "safety_identifier": body.safety_identifier,
        "service_tier": body.service_tier or "auto",
        "store": body.store is not False,
        "temperature": _first(body.temperature, defaults.get("temperature"), 1.0),
        "text": text,
        "tool_choice": choice or "auto",
        "tools": [
            {
                "type": tool.type,
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.parameters,
                "strict": tool.strict,
            }
            for tool in body.tools or ()
        ],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": _first(body.top_p, defaults.get("top_p"), 1.0),
        "truncation": body.truncation or "disabled",
        "usage": None,
        "user": body.user,
    }


def _first(*values: float | None) -> float | None:
    return next((value for value in values if value is not None), None)
