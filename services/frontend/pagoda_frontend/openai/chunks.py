"""Encodes deltas as SSE events. Constant fields of a request are encoded once; a plain token costs one small dumps."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import orjson

from pagoda_common.params.outputs import SequenceDelta, TokenLogprobs
from pagoda_frontend.conversation.message import MessageDelta, ToolCallDelta
from pagoda_frontend.openai.echo import Echo
from pagoda_frontend.openai.logprobs import LogprobWriter
from pagoda_frontend.openai.mapped import json_pieces
from pagoda_frontend.openai.protocol import GenerationBody

DONE = b"data: [DONE]\n\n"

Delta = TypeVar("Delta", SequenceDelta, MessageDelta)


def event(payload: bytes) -> bytes:
    """One server-sent event."""
    return b"data: " + payload + b"\n\n"


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkOptions:
    """What the chunks of one stream contain besides text."""

    include_usage: bool = False
    continuous_usage: bool = False
    return_token_ids: bool = False
    logprobs: LogprobWriter | None = None

    @property
    def is_plain(self) -> bool:
        """Whether a chunk in the middle of a sequence has only text."""
        return not self.continuous_usage and not self.return_token_ids and self.logprobs is None


def chunk_options(body: GenerationBody, logprobs: LogprobWriter | None, *, has_usage: bool) -> ChunkOptions:
    """What the chunks of a stream for `body` contain; with `has_usage`, each has the usage so far, requested or not."""
    asked = body.stream_options
    include_usage = has_usage or bool(asked and asked.include_usage)
    return ChunkOptions(
        include_usage=include_usage,
        continuous_usage=has_usage or (include_usage and bool(asked and asked.continuous_usage_stats)),
        return_token_ids=bool(body.return_token_ids),
        logprobs=logprobs,
    )


class ChunkEncoder(ABC, Generic[Delta]):
    """Encodes one stream. Subclasses write choices; this class decides when to send chunks, and writes the envelope."""

    def __init__(
        self,
        *,
        envelope: dict[str, Any],
        options: ChunkOptions,
        prompts: list[list[int]],
        n: int,
        usage: Callable[[], dict[str, Any]],
    ) -> None:
        """`envelope`: id, object, created, model, …; `usage`: the usage object as of now."""
        self._options = options
        self._is_plain = options.is_plain
        self._prompts = prompts
        self._n = n
        self._usage = usage
        self._head = b"data: " + orjson.dumps(envelope)[:-1] + b',"choices":['
        # With include_usage, chunks before the last one have a null usage (OpenAI); otherwise none.
        self._tail = b'],"usage":null}\n\n' if options.include_usage else b"]}\n\n"

    def opening(self) -> bytes:
        """Events before any token."""
        return b""

    def delta(self, delta: Delta) -> bytes:
        """The event for `delta`; b"" when there is nothing to send yet."""
        if self._is_plain and delta.finish_reason is None:
            return self._plain(delta)
        if delta.is_empty and not (delta.token_ids or delta.finish_reason):
            return b""
        return self._event(self._choice(delta))

    def num_log_probabilities(self, delta: Delta) -> int:
        """Number of a prompt's log probabilities in the event for `delta`."""
        return 0

    def _event(self, choice: dict[str, Any], *, is_long: bool = False) -> bytes:
        """The event of one choice, with the usage so far if requested; a long event is written in pieces."""
        shown = b"".join(json_pieces(choice)) if is_long else orjson.dumps(choice, default=list)
        if self._options.continuous_usage:
            return self._head + shown + b'],"usage":' + orjson.dumps(self._usage()) + b"}\n\n"
        return self._head + shown + self._tail

    def closing(self) -> bytes:
        """Events after the last token."""
        if not self._options.include_usage:
            return DONE
        return self._head + b'],"usage":' + orjson.dumps(self._usage()) + b"}\n\n" + DONE

    @abstractmethod
    def _plain(self, delta: Delta) -> bytes:
        """The event for text alone; b"" when there is none."""

    @abstractmethod
    def _choice(self, delta: Delta) -> dict[str, Any]:
        """One entry of `choices`."""

    def _token_ids(self, delta: Delta) -> dict[str, Any]:
        """Fields that return_token_ids adds to a choice."""
        return {"token_ids": delta.token_ids} if self._options.return_token_ids else {}


class CompletionChunks(ChunkEncoder[SequenceDelta]):
    """Chunks of /v1/completions."""

    def __init__(
        self,
        *,
        echo: list[Echo] | None,
        prompt_logprobs: Sequence[Sequence[TokenLogprobs | None] | None] = (),
        **kwargs: Any,
    ) -> None:
        """`echo`: the prompts, when each sequence begins with its prompt; `prompt_logprobs`: of each prompt, sent with
        its first token."""
        super().__init__(**kwargs)
        self._echo = echo
        self._prompt_logprobs = prompt_logprobs
        self._echoed: set[int] = set()
        self._started: set[int] = set()
        self._plain_tail = b',"logprobs":null,"finish_reason":null,"stop_reason":null}' + self._tail

    def delta(self, delta: SequenceDelta) -> bytes:
        """As the encoder's; a sequence's first event is preceded by its echoed prompt."""
        if self._echo is None or delta.index in self._echoed:
            return super().delta(delta)
        self._echoed.add(delta.index)
        place = delta.index // self._n
        choice = {"index": delta.index, "text": "", "logprobs": None, "finish_reason": None, "stop_reason": None}
        self._echo[place].put_before(choice, self._prompt_logprobs[place] if self._prompt_logprobs else None)
        return self._event(choice, is_long=True) + super().delta(delta)

    def num_log_probabilities(self, delta: SequenceDelta) -> int:
        """As the encoder's: the echoed prompt has them."""
        if self._echo is None or not self._prompt_logprobs or delta.index in self._echoed:
            return 0
        return sum(len(one.token_ids) for one in self._prompt_logprobs[delta.index // self._n] or () if one is not None)

    def _plain(self, delta: SequenceDelta) -> bytes:
        if not delta.text:
            return b""
        return self._head + b'{"index":%d,"text":' % delta.index + orjson.dumps(delta.text) + self._plain_tail

    def _choice(self, delta: SequenceDelta) -> dict[str, Any]:
        logprobs = self._options.logprobs
        shown = None
        if logprobs is not None and delta.logprobs:
            start = 0 if self._echo is None else len(self._echo[delta.index // self._n].text)
            shown = logprobs.for_completion(delta.logprobs, [start + place for place in delta.token_text_offsets])
        choice = {
            "index": delta.index,
            "text": delta.text,
            "logprobs": shown,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
            **self._token_ids(delta),
        }
        if self._options.return_token_ids and delta.index not in self._started:
            self._started.add(delta.index)
            choice["prompt_token_ids"] = self._prompts[delta.index // self._n]
        return choice


class ChatChunks(ChunkEncoder[MessageDelta]):
    """Chunks of /v1/chat/completions; the first of each sequence has the role, and the prompt's ids if requested."""

    def __init__(self, *, echo: str, **kwargs: Any) -> None:
        """`echo`: text that the answer begins with, "" for none."""
        super().__init__(**kwargs)
        self._echo = echo
        self._plain_tail = b',"logprobs":null,"finish_reason":null}' + self._tail

    def opening(self) -> bytes:
        """The role of each sequence."""
        end = b"}\n\n"
        if self._options.return_token_ids:
            end = b',"prompt_token_ids":' + orjson.dumps(self._prompts[0]) + end
        events = []
        for index in range(self._n):
            choice = {
                "index": index,
                "delta": {"role": "assistant", "content": self._echo},
                "logprobs": None,
                "finish_reason": None,
            }
            events.append(self._event(choice).removesuffix(b"}\n\n") + end)
        return b"".join(events)

    def _plain(self, delta: MessageDelta) -> bytes:
        if delta.reasoning or delta.tool_calls:
            fields = orjson.dumps(_shown(delta))
        elif delta.content:
            fields = b'{"content":' + orjson.dumps(delta.content) + b"}"
        else:
            return b""
        return self._head + b'{"index":%d,"delta":' % delta.index + fields + self._plain_tail

    def _choice(self, delta: MessageDelta) -> dict[str, Any]:
        logprobs = self._options.logprobs
        return {
            "index": delta.index,
            "delta": _shown(delta),
            "logprobs": logprobs.for_chat(delta.logprobs) if logprobs is not None and delta.logprobs else None,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
            **self._token_ids(delta),
        }


def _shown(delta: MessageDelta) -> dict[str, Any]:
    """The fields of a delta that are not empty."""
    fields: dict[str, Any] = {}
    if delta.reasoning:
        fields["reasoning"] = delta.reasoning
    if delta.content:
        fields["content"] = delta.content
    if delta.tool_calls:
        fields["tool_calls"] = _calls(delta.tool_calls)
    return fields


def _calls(deltas: Sequence[ToolCallDelta]) -> list[dict[str, Any]]:
    """One entry per call: clients read only the first, so a call's name and its following arguments are joined."""
    shown: dict[int, dict[str, Any]] = {}
    for delta in deltas:
        if delta.index in shown:
            shown[delta.index]["function"]["arguments"] += delta.arguments
        elif delta.name is None:
            shown[delta.index] = {"index": delta.index, "function": {"arguments": delta.arguments}}
        else:
            function = {"name": delta.name, "arguments": delta.arguments}
            shown[delta.index] = {"index": delta.index, "id": delta.id, "type": "function", "function": function}
    return list(shown.values())
