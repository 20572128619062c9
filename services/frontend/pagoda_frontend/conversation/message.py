"""An assistant's message, whole and in pieces: reasoning, content, tool calls. No HTTP, no gRPC."""

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from pagoda_common.params.outputs import HypothesisLogprobs, SequenceDelta, TokenLogprobs

MessageFinishReason: TypeAlias = Literal["stop", "length", "abort", "error", "tool_calls"]
"""tool_calls stands for a stop after calls that the model was free to make; after a named tool it is stop (OpenAI)."""


@dataclass(slots=True)
class ToolCallDelta:
    """New text of one tool call. The first one of a call has id and name, and no arguments."""

    index: int
    """Place of the call in its message, from 0."""
    id: str | None
    name: str | None
    arguments: str
    """JSON text that continues the arguments."""


@dataclass(slots=True)
class ToolCall:
    """A whole call."""

    id: str
    name: str
    arguments: str
    """JSON text as the model wrote it; only its beginning if the answer was cut off."""


@dataclass(slots=True)
class MessageDelta:
    """The new part of one message, which every streaming API sends in its own shape."""

    index: int
    """Choice within the conversation, 0 to n - 1."""
    reasoning: str
    content: str
    tool_calls: list[ToolCallDelta]
    source: SequenceDelta
    """The new tokens. Their text may be longer or shorter than the delta's, because parsers hold text back and remove
    some."""
    finish_reason: MessageFinishReason | None
    """Set in a message's last delta."""
    stop_reason: int | str | None
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    is_reasoning_told: bool = False
    """In a message's last delta: reasoning is an empty text where there was none."""
    is_called_by_name: bool = False
    """The client named the tool to call: the content is an empty text, as in vLLM."""

    @property
    def num_output_tokens(self) -> int:
        """Tokens of the sequence so far."""
        return self.source.num_output_tokens

    @property
    def is_replayed(self) -> bool:
        """The client already has this delta: its stream was resumed."""
        return self.source.is_replayed

    @property
    def is_empty(self) -> bool:
        """Whether the delta has nothing for the client."""
        return not (self.content or self.reasoning or self.tool_calls)


@dataclass(slots=True)
class CollectedMessage:
    """A whole message."""

    index: int
    reasoning: str | None = None
    """None when the model wrote none, or when it must not be shown."""
    content: str | None = None
    """None when the message has only tool calls."""
    tool_calls: list[ToolCall] = field(default_factory=list)
    finish_reason: MessageFinishReason | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    hypothesis: HypothesisLogprobs | None = None
    """Log probabilities of a beam search's result."""


class MessageCollector:
    """Builds a whole message from its deltas, so that a single response holds the same as a stream."""

    def __init__(self, index: int) -> None:
        self._message = CollectedMessage(index)
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._arguments: list[list[str]] = []
        self._is_called_by_name = False

    def add(self, delta: MessageDelta) -> None:
        """Add a delta."""
        message = self._message
        if delta.reasoning or delta.is_reasoning_told:
            self._reasoning.append(delta.reasoning)
        if delta.content:
            self._content.append(delta.content)
        for call in delta.tool_calls:
            if call.index == len(message.tool_calls):
                message.tool_calls.append(ToolCall(call.id or "", call.name or "", ""))
                self._arguments.append([])
            self._arguments[call.index].append(call.arguments)
        message.token_ids += delta.token_ids
        message.logprobs += delta.logprobs or ()
        message.finish_reason = delta.finish_reason
        message.stop_reason = delta.stop_reason
        message.hypothesis = delta.source.hypothesis
        self._is_called_by_name = delta.is_called_by_name

    def finish(self) -> CollectedMessage:
        """The message."""
        message = self._message
        message.reasoning = "".join(self._reasoning) if self._reasoning else None
        message.content = "".join(self._content)
        if not message.content and (message.tool_calls or message.reasoning):
            message.content = "" if self._is_called_by_name and message.tool_calls else None
        for call, arguments in zip(message.tool_calls, self._arguments, strict=True):
            call.arguments = "".join(arguments)
        return message
