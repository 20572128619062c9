"""What a client of one SSE stream has got, put together as clients do, and compared with what it should have got."""

from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]

LOGPROB_TOLERANCE = 1e-4
"""A recomputed KV cache rounds differently; tokens must be equal all the same."""
SHOWN_CHARS = 300


@dataclass(slots=True)
class Position:
    """The log probabilities of one token."""

    token: str
    logprob: float | None
    top: list[float]
    """Of the most likely tokens, in falling order."""
    text_offset: int | None = None
    """Where the token begins in the text; completions alone say it."""


@dataclass(slots=True)
class Choice:
    """One sequence of an answer."""

    text: str = ""
    reasoning: str = ""
    tool_calls: list[Json] = field(default_factory=list)
    """Name and arguments of each."""
    token_ids: list[int] = field(default_factory=list)
    prompt_token_ids: list[int] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: list[Position] = field(default_factory=list)


@dataclass(slots=True)
class Transcript:
    """A whole stream."""

    choices: dict[int, Choice] = field(default_factory=dict)
    usage: Json | None = None
    is_done: bool = False
    """[DONE] has come."""
    faults: list[str] = field(default_factory=list)
    """What no client should see, whatever the stream says."""
    times: list[float] = field(default_factory=list)
    """When it was begun, and when each chunk came: seconds of the monotonic clock."""
    _envelope: tuple[Any, ...] | None = None

    def take(self, chunk: Json) -> int:
        """Add one chunk; returns its number of output tokens."""
        if self.is_done:
            self.faults.append("a chunk after [DONE]")
        if "error" in chunk:
            self.faults.append(f"an error: {chunk['error']}")
            return 0
        envelope = tuple(chunk[name] for name in ("id", "object", "created", "model"))
        if self._envelope not in (None, envelope):
            self.faults.append(f"a chunk of {envelope} in the stream of {self._envelope}")
        self._envelope = envelope
        if chunk.get("usage") is not None:
            if self.usage is not None:
                self.faults.append("a second usage")
            self.usage = chunk["usage"]
        return sum(self._take_choice(part) for part in chunk["choices"])

    def take_embeddings(self, number: int, answer: Json) -> None:
        """Add the answer of one call for embeddings, whose values stand where log probabilities do."""
        values = [value for one in answer["data"] for value in one["embedding"]]
        positions = [Position(token="", logprob=value, top=[]) for value in values]
        self.choices[number] = Choice(finish_reason="stop", logprobs=positions)
        self.usage = {"completion_tokens": 0, "prompt_tokens": answer["usage"]["prompt_tokens"]}

    def _take_choice(self, part: Json) -> int:
        is_first = part["index"] not in self.choices
        choice = self.choices.setdefault(part["index"], Choice())
        if choice.finish_reason is not None:
            self.faults.append(f"choice {part['index']}: a chunk after its finish_reason")
        delta = part.get("delta", {})
        if "delta" in part and is_first != ("role" in delta):
            self.faults.append(f"choice {part['index']}: a role in another chunk than the first")
        choice.text += part.get("text") or delta.get("content") or ""
        choice.reasoning += delta.get("reasoning") or ""
        for piece in delta.get("tool_calls") or []:
            self._take_tool_call(choice, piece)
        if "prompt_token_ids" in part:
            if choice.prompt_token_ids is not None:
                self.faults.append(f"choice {part['index']}: the prompt for a second time")
            choice.prompt_token_ids = part["prompt_token_ids"]
        self._take_logprobs(choice, part.get("logprobs"))
        token_ids = part.get("token_ids") or []
        choice.token_ids += token_ids
        choice.finish_reason = part.get("finish_reason")
        choice.stop_reason = part.get("stop_reason")
        return len(token_ids)

    def _take_tool_call(self, choice: Choice, piece: Json) -> None:
        function = piece.get("function") or {}
        if piece["index"] == len(choice.tool_calls) and piece.get("id") and function.get("name"):
            choice.tool_calls.append({"name": function["name"], "arguments": function.get("arguments") or ""})
        elif piece["index"] == len(choice.tool_calls) - 1 and not piece.get("id") and not function.get("name"):
            choice.tool_calls[-1]["arguments"] += function.get("arguments") or ""
        else:
            self.faults.append(f"a piece of a tool call that does not fit {len(choice.tool_calls)} calls: {piece}")

    def _take_logprobs(self, choice: Choice, logprobs: Json | None) -> None:
        if not logprobs:
            return
        for entry in logprobs.get("content") or []:  # chat
            top = [other["logprob"] for other in entry["top_logprobs"]]
            choice.logprobs.append(Position(entry["token"], entry["logprob"], sorted(top, reverse=True)))
        columns = [logprobs.get(name) or [] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")]
        for token, logprob, others, offset in zip(*columns, strict=True):  # completions
            top = sorted((others or {}).values(), reverse=True)
            choice.logprobs.append(Position(token, logprob, top, offset))

    @property
    def num_tokens(self) -> int:
        """Output tokens that came, of all choices."""
        return sum(len(choice.token_ids) for choice in self.choices.values())

    def own_faults(self) -> list[str]:
        """What is wrong with this stream taken by itself."""
        faults = list(self.faults)
        if not self.is_done:
            faults.append("no [DONE]")
        faults += [f"choice {index} has no end" for index, choice in self.choices.items() if not choice.finish_reason]
        num_tokens = self.num_tokens
        if self.usage is None or self.usage["completion_tokens"] != num_tokens:
            faults.append(f"usage is {self.usage}, but {num_tokens} output tokens came")
        return faults


def differences(expected: Transcript, got: Transcript) -> list[str]:
    """Where `got` says something else than `expected`; times and ids do not count."""
    if sorted(expected.choices) != sorted(got.choices):
        return [f"choices: expected {sorted(expected.choices)}, got {sorted(got.choices)}"]
    found = []
    for index, choice in expected.choices.items():
        other = got.choices[index]
        for name in Choice.__slots__:
            values = getattr(choice, name), getattr(other, name)
            difference = _logprob_difference(*values) if name == "logprobs" else _difference(*values)
            if difference:
                found.append(f"choice {index}, {name}: {difference}")
    if difference := _difference(expected.usage, got.usage):
        found.append(f"usage: {difference}")
    return found


def _difference(expected: Any, got: Any) -> str:
    if expected == got:
        return ""
    if not isinstance(expected, str | list) or not isinstance(got, str | list):
        return f"expected {expected!r}, got {got!r}"
    pairs = zip(expected, got, strict=False)
    start = next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(expected), len(got)))
    shown = slice(max(0, start - 20), start + SHOWN_CHARS)
    return f"from {start} on (of {len(expected)}), expected …{expected[shown]!r}, got …{got[shown]!r}"


def _logprob_difference(expected: list[Position], got: list[Position]) -> str:
    if len(expected) != len(got):
        return f"expected {len(expected)}, got {len(got)}"
    for at, (one, other) in enumerate(zip(expected, got, strict=True)):
        is_near = len(one.top) == len(other.top) and all(
            a == b or (a is not None and b is not None and abs(a - b) <= LOGPROB_TOLERANCE)
            for a, b in zip([one.logprob, *one.top], [other.logprob, *other.top], strict=True)
        )
        if not is_near or (one.token, one.text_offset) != (other.token, other.text_offset):
            return f"at {at}, expected {one}, got {other}"
    return ""
