"""Ids of calls in a conversation's history, as the model's chat template wants them."""

from collections.abc import Sequence
from hashlib import sha256

from pagoda_frontend.openai.protocol import ChatMessage
from pagoda_frontend.tool_parsers.base import ToolParser


def with_readable_ids(messages: Sequence[ChatMessage], parser: type[ToolParser] | None) -> Sequence[ChatMessage]:
    """`messages`, with every id that the template would refuse replaced by a valid one, the same for call and answer.

    A conversation may come from another model, whose ids have another form.
    """
    if parser is None or parser.id_pattern is None:
        return messages
    return [_readable(message, parser) for message in messages]


def _readable(message: ChatMessage, parser: type[ToolParser]) -> ChatMessage:
    changes: dict[str, object] = {}
    if message.tool_call_id is not None:
        changes["tool_call_id"] = _fitting(message.tool_call_id, parser)
    if message.tool_calls:
        changes["tool_calls"] = [
            call if call.id is None else call.model_copy(update={"id": _fitting(call.id, parser)})
            for call in message.tool_calls
        ]
    return message.model_copy(update=changes) if changes else message


def _fitting(call_id: str, parser: type[ToolParser]) -> str:
    assert parser.id_pattern is not None
    if parser.id_pattern.fullmatch(call_id):
        return call_id
    return parser.call_id("", 0, sha256(call_id.encode()).hexdigest())
