"""From the text that a model wrote to messages: one parser for each sequence. No HTTP, no engine."""

from collections.abc import Sequence

from pagoda_common.params.outputs import SequenceDelta
from pagoda_frontend.conversation.dialect import Dialect, MessageParser
from pagoda_frontend.conversation.message import MessageDelta, MessageFinishReason
from pagoda_frontend.conversation.tools import ToolPlan


def plain_delta(delta: SequenceDelta) -> MessageDelta:
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


class MessageReader:
    """Reads the text of a run with a parser for each of its messages."""

    def __init__(
        self,
        *,
        parsers: Sequence[MessageParser],
        is_named: bool,
        shows_reasoning: bool,
        reasoning_end: tuple[int, ...],
    ) -> None:
        """`is_named`: a certain tool must be called; `reasoning_end`: the token that ends reasoning, if it is one."""
        self._parsers = parsers
        self._is_named = is_named
        self._shows_reasoning = shows_reasoning
        self._reasoning_end = reasoning_end
        self.num_reasoning_tokens = 0
        """Over all messages; the marker at the end is one of them."""

    def read(self, delta: SequenceDelta) -> MessageDelta:
        """What `delta` adds to its message."""
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
        )

    def _count(self, token_ids: list[int]) -> None:
        end = self._reasoning_end[0] if self._reasoning_end else None
        self.num_reasoning_tokens += token_ids.index(end) + 1 if end in token_ids else len(token_ids)


def make_reader(
    dialect: Dialect,
    plan: ToolPlan,
    *,
    prompt: str,
    n: int,
    shows_reasoning: bool,
    reasoning_end: tuple[int, ...],
    id_seed: str,
) -> MessageReader | None:
    """A reader of `n` messages that go on after `prompt` (rendered); None when all text is content."""
    made = [dialect.parser(plan, prompt=prompt, id_seed=f"{id_seed}/{index}") for index in range(n)]
    parsers = [parser for parser in made if parser is not None]
    if not parsers:
        return None
    return MessageReader(
        parsers=parsers,
        is_named=plan.choice == "named",
        shows_reasoning=shows_reasoning,
        reasoning_end=reasoning_end,
    )
