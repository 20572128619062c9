"""Writes a growing message as content blocks and events of the Messages API. No engine, no HTTP."""

from collections.abc import Iterator
from typing import Any

import orjson

from pagoda_common.text import exact_json
from pagoda_frontend.conversation.drawn_ids import drawn_id
from pagoda_frontend.conversation.message import MessageDelta

Event = dict[str, Any]


class BlockBuilder:
    """Makes the content of one answer. The events and the final `blocks` hold the same content."""

    def __init__(self, *, id_seed: str) -> None:
        """`id_seed`: seed of ids that the parser has left out."""
        self._id_seed = id_seed
        self.blocks: list[dict[str, Any]] = []
        """Whole blocks, and the one that grows."""
        self._is_open = False
        self._parts: list[str] = []
        self._finish_reason = ""
        self._stop_reason: int | str | None = None

    def add(self, delta: MessageDelta) -> Iterator[Event]:
        """The events for a delta."""
        if delta.reasoning:
            yield from self._text("thinking", delta.reasoning)
        if delta.content:
            yield from self._text("text", delta.content)
        for call in delta.tool_calls:
            if call.id is not None:
                name = call.name or ""
                yield from self._open({"type": "tool_use", "id": self._tool_use_id(call.id), "name": name, "input": {}})
            if call.arguments:
                yield self._delta("input_json_delta", partial_json=call.arguments)
                self._parts.append(call.arguments)
        if delta.finish_reason is not None:
            self._finish_reason, self._stop_reason = delta.finish_reason, delta.stop_reason

    def close(self) -> Iterator[Event]:
        """The event that ends the growing block, if there is one."""
        if not self._is_open:
            return
        block, text = self.blocks[-1], "".join(self._parts)
        if block["type"] == "tool_use":
            block["input"] = _arguments(text)
        else:
            block[block["type"]] = text
        self._is_open = False
        yield {"type": "content_block_stop", "index": len(self.blocks) - 1}

    def stop(self) -> dict[str, Any]:
        """stop_reason and stop_sequence, once the last delta has been added."""
        if self._finish_reason == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if any(block["type"] == "tool_use" for block in self.blocks):
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if isinstance(self._stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": self._stop_reason}
        return {"stop_reason": "end_turn", "stop_sequence": None}

    def _text(self, kind: str, text: str) -> Iterator[Event]:
        if not self._is_open or self.blocks[-1]["type"] != kind:
            block = {"type": kind, kind: ""}
            yield from self._open(block | ({"signature": ""} if kind == "thinking" else {"citations": None}))
        yield self._delta(f"{kind}_delta", **{kind: text})
        self._parts.append(text)

    def _open(self, block: dict[str, Any]) -> Iterator[Event]:
        yield from self.close()
        self.blocks.append(block)
        self._is_open = True
        self._parts = []
        yield {"type": "content_block_start", "index": len(self.blocks) - 1, "content_block": dict(block)}

    def _tool_use_id(self, call_id: str) -> str:
        return call_id or "toolu_" + drawn_id(self._id_seed, f"block {len(self.blocks)}")[:24]

    def _delta(self, kind: str, **fields: str) -> Event:
        return {"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": {"type": kind, **fields}}


def _arguments(text: str) -> dict[str, Any]:
    """The JSON object in `text`; {} where the answer was cut off within it."""
    try:
        value = exact_json.loads(text)
    except orjson.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}
