"""The form in which a chat writer hands over its work: turns with the answer that is known to be right."""

from dataclasses import dataclass, field
from typing import Any

Message = dict[str, str]


@dataclass(frozen=True)
class Turn:
    """One question and its answer."""

    ask: str
    answer: str
    kind: str
    """What is practised: lookup, sum, spelling, record, schema, call, fact, echo, story, talk."""
    expect: Any = None
    """What a right answer must hold (see evaluate.py); None where many answers are right."""


@dataclass(frozen=True)
class Scene:
    """Turns that belong together, because the later ones may lean on the earlier."""

    turns: list[Turn] = field(default_factory=list)
    system: str = ""
    """A system message that the turns need; empty where any will do."""


def messages_of(scenes: list[Scene], system: str = "") -> list[Message]:
    """The chat that plays the scenes one after the other."""
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    for scene in scenes:
        for turn in scene.turns:
            messages.append({"role": "tool" if turn.kind == "result" else "user", "content": turn.ask})
            messages.append({"role": "assistant", "content": turn.answer})
    return messages
