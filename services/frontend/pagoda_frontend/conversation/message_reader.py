"""Turns the text of a run into messages, with one parser for each sequence. Knows no HTTP, no engine."""

from collections.abc import Sequence

from pagoda_common.params.outputs import SequenceDelta
from pagoda_frontend.conversation.message import MessageDelta, MessageFinishReason
from pagoda_frontend.reasoning_parsers.base import ReasoningParser
from pagoda_frontend.tool_parsers.base import Piece, ToolParser


class MessageParser:
    """Splits the text of one message into reasoning, content and calls."""

    def __init__(self, *, reasoning: ReasoningParser | None, calls: ToolParser | None, is_parallel: bool) -> None:
        """`is_parallel`: calls after the first one are kept."""
        self._reasoning = reasoning
        self._calls = calls
        self._is_parallel = is_parallel
        self.has_called = False
        """Whether there was a call."""

    @property
    def is_constrained(self) -> bool:
        """Whether the text must consist of calls only."""
        return self._calls is not None and self._calls.is_constrained

    @property
    def is_reasoning_told(self) -> bool:
        """Whether the message has reasoning, though it may be empty."""
        return self._reasoning is not None and self._reasoning.is_told_empty

    @property
    def is_reasoning(self) -> bool:
        """Whether the next text is reasoning, as far as is known."""
        return self._reasoning is not None and self._reasoning.is_inside

    def append(self, text: str, *, is_last: bool) -> Piece:
        """The part that `text` adds to the message; with `is_last`, also the text held back."""
        reasoning, answer = self._reasoning.append(text) if self._reasoning is not None else ("", text)
        if is_last and self._reasoning is not None:
            last = self._reasoning.finish()
            reasoning, answer = reasoning + last[0], answer + last[1]
        if self._calls is None:
            return Piece(reasoning, answer)
        piece = self._calls.append(answer) if answer else Piece()
        if is_last:
            _extend(piece, self._calls.finish())
        piece.reasoning += reasoning
        if piece.tool_calls:
            self.has_called = True
            if not self._is_parallel:
                piece.tool_calls = [call for call in piece.tool_calls if call.index == 0]
        return piece


def _extend(piece: Piece, last: Piece) -> None:
    piece.reasoning += last.reasoning
    piece.content += last.content
    piece.tool_calls += last.tool_calls


class MessageReader:
    """Reads the text of a run with a parser for each of its messages."""

    def __init__(
        self,
        *,
        parsers: Sequence[MessageParser],
        is_named: bool,
        shows_reasoning: bool,
        counts_reasoning: bool,
        reasoning_end: tuple[int, ...],
        needs_special_tokens: bool,
    ) -> None:
        """
        Args:
            parsers: one for each message; none when all text is content.
            is_named: a certain tool must be called.
            counts_reasoning: reasoning can be told from the answer, so its tokens are counted.
            reasoning_end: the token that ends reasoning; empty if there is no such token, or if reasoning is over.
            needs_special_tokens: the text must include special tokens.
        """
        self._parsers = parsers
        self._is_named = is_named
        self._shows_reasoning = shows_reasoning
        self.counts_reasoning = counts_reasoning
        self.reasoning_end = reasoning_end
        self.needs_special_tokens = needs_special_tokens
        self.num_reasoning_tokens = 0
        """Reasoning tokens over all messages, the end marker included."""

    def read(self, delta: SequenceDelta) -> MessageDelta:
        """The part that `delta` adds to its message."""
        if not self._parsers:
            return _plain(delta)
        parser = self._parsers[delta.index]
        if parser.is_reasoning:
            self._count(delta.token_ids)
        piece = parser.append(delta.text, is_last=delta.finish_reason is not None)
        finish_reason: MessageFinishReason | None = delta.finish_reason
        if finish_reason == "length" and parser.is_constrained and not parser.has_called:
            piece.content = ""  # the beginning of a call, cut off before its name
        if finish_reason == "stop" and parser.has_called and not self._is_named:
            finish_reason = "tool_calls"
        return MessageDelta(
            delta.index,
            piece.reasoning if self._shows_reasoning else "",
            piece.content,
            piece.tool_calls,
            delta,
            finish_reason,
            delta.stop_reason,
            delta.token_ids,
            delta.logprobs,
            is_called_by_name=self._is_named,
            is_reasoning_told=finish_reason is not None and self._shows_reasoning and parser.is_reasoning_told,
        )

    def _count(self, token_ids: list[int]) -> None:
        end = self.reasoning_end[0] if self.reasoning_end else None
        self.num_reasoning_tokens += token_ids.index(end) + 1 if end in token_ids else len(token_ids)


def _plain(delta: SequenceDelta) -> MessageDelta:
    """`delta` where all text is content."""
    return MessageDelta(
        delta.index,
        "",
        delta.text,
        [],
        delta,
        delta.finish_reason,
        delta.stop_reason,
        delta.token_ids,
        delta.logprobs,
    )
