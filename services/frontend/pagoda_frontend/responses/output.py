"""Writes a growing message as items and typed events of the Responses API. No engine, no HTTP."""

from collections.abc import Iterator
from typing import Any

from pagoda_frontend.budget.caller import hold_more
from pagoda_frontend.conversation.drawn_ids import drawn_id
from pagoda_frontend.conversation.message import MessageDelta
from pagoda_frontend.openai.logprobs import LogprobWriter

OBJECT_BYTES = 512
"""Bytes of memory of one log probability with its token's text and bytes."""
Event = dict[str, Any]
"""An event without its sequence_number, which the stream adds."""


class OutputBuilder:
    """Makes the output of one response. The events and the final `items` hold the same content."""

    def __init__(self, *, logprobs: LogprobWriter | None, id_seed: str) -> None:
        """`id_seed`: seed of the ids of items."""
        self.items: list[dict[str, Any]] = []
        """Whole items, and the growing one."""
        self._logprobs = logprobs
        self._id_seed = id_seed
        self._pending_logprobs: list[dict[str, Any]] = []
        self._kind = ""
        """Kind of the growing item; "" if there is none."""
        self._parts: list[str] = []

    def add(self, delta: MessageDelta) -> Iterator[Event]:
        """The events for a delta."""
        if delta.reasoning:
            yield from self._text("reasoning", delta.reasoning)
        elif self._logprobs is not None and delta.logprobs and not delta.tool_calls:
            num_entries = sum(1 + len(one.token_ids) for one in delta.logprobs)
            hold_more(OBJECT_BYTES * num_entries)
            self._pending_logprobs += self._logprobs.for_chat(delta.logprobs)["content"]
        if delta.content:
            yield from self._text("message", delta.content)
        for call in delta.tool_calls:
            if call.id is not None:
                yield from self.close()
                yield from self._open("function_call", call_id=call.id, name=call.name or "", arguments="")
            if call.arguments:
                self._parts.append(call.arguments)
                yield self._event("function_call_arguments.delta", delta=call.arguments)

    def close(self, status: str = "completed") -> Iterator[Event]:
        """The events that end the growing item, if there is one."""
        if not self._kind:
            return
        item = self.items[-1]
        item["status"] = status
        text = "".join(self._parts)
        if self._kind == "function_call":
            item["arguments"] = text
            yield self._event("function_call_arguments.done", arguments=text, name=item["name"])
        else:
            part = item["content"][0]
            part["text"] = text
            if self._kind == "message":
                part["logprobs"] += self._take_logprobs()
                yield self._event("output_text.done", content_index=0, text=text, logprobs=part["logprobs"])
            else:
                yield self._event("reasoning_text.done", content_index=0, text=text)
            yield self._event("content_part.done", content_index=0, part=part)
        self._kind = ""
        yield {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": item}

    def finished_items(self) -> list[dict[str, Any]]:
        """Items that are whole."""
        return self.items[:-1] if self._kind else self.items

    def _text(self, kind: str, text: str) -> Iterator[Event]:
        if self._kind != kind:
            yield from self.close()
            if kind == "message":
                yield from self._open(kind, role="assistant", content=[])
                part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            else:
                yield from self._open(kind, summary=[], content=[])
                part = {"type": "reasoning_text", "text": ""}
            self.items[-1]["content"] = [part]
            yield self._event("content_part.added", content_index=0, part=dict(part))
        self._parts.append(text)
        if kind == "message":
            logprobs = self._take_logprobs()
            self.items[-1]["content"][0]["logprobs"] += logprobs
            yield self._event("output_text.delta", content_index=0, delta=text, logprobs=logprobs)
        else:
            yield self._event("reasoning_text.delta", content_index=0, delta=text)

    def _open(self, kind: str, **fields: Any) -> Iterator[Event]:
        prefix = {"message": "msg_", "function_call": "fc_", "reasoning": "rs_"}[kind]
        item_id = prefix + drawn_id(self._id_seed, f"item {len(self.items)}")[:32]
        item = {"id": item_id, "type": kind, "status": "in_progress", **fields}
        self.items.append(item)
        self._kind = kind
        self._parts = []
        yield {"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": dict(item)}

    def _event(self, kind: str, **fields: Any) -> Event:
        place = {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
        return {"type": f"response.{kind}", **place, **fields}

    def _take_logprobs(self) -> list[dict[str, Any]]:
        taken, self._pending_logprobs = self._pending_logprobs, []
        return taken
