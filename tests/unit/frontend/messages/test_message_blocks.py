"""The Messages API's blocks: what is told as events, and what the answer holds at its end, are the same."""

from typing import Any

import pytest

from pagoda_frontend.conversation.message import MessageDelta, ToolCallDelta
from pagoda_frontend.messages.output import BlockBuilder


def delta(
    content: str = "",
    *,
    reasoning: str = "",
    calls: tuple[ToolCallDelta, ...] = (),
    finish_reason: Any = None,
    stop_reason: int | str | None = None,
) -> MessageDelta:
    return MessageDelta(
        index=0,
        reasoning=reasoning,
        content=content,
        tool_calls=list(calls),
        source=None,
        finish_reason=finish_reason,
        stop_reason=stop_reason,
        token_ids=[],
        logprobs=None,
    )


def build(*deltas: MessageDelta) -> tuple[list[dict[str, Any]], BlockBuilder]:
    """All events, and the builder at the end."""
    builder = BlockBuilder(id_seed="seed")
    events = [event for one in deltas for event in builder.add(one)]
    return [*events, *builder.close()], builder


def call(index: int, arguments: str = "", *, id: str | None = None, name: str | None = None) -> ToolCallDelta:
    return ToolCallDelta(index, id, name, arguments)


def test_text_grows_in_one_block_and_another_kind_begins_the_next() -> None:
    events, builder = build(delta(reasoning="I "), delta(reasoning="see"), delta("Yes"), delta("!"), delta(""))
    assert [(event["type"], event["index"]) for event in events] == [
        ("content_block_start", 0),
        ("content_block_delta", 0),
        ("content_block_delta", 0),
        ("content_block_stop", 0),
        ("content_block_start", 1),
        ("content_block_delta", 1),
        ("content_block_delta", 1),
        ("content_block_stop", 1),
    ]
    assert events[1]["delta"] == {"type": "thinking_delta", "thinking": "I "}
    assert events[5]["delta"] == {"type": "text_delta", "text": "Yes"}
    assert builder.blocks == [
        {"type": "thinking", "thinking": "I see", "signature": ""},
        {"type": "text", "text": "Yes!", "citations": None},
    ]
    assert events[0]["content_block"] == {"type": "thinking", "thinking": "", "signature": ""}
    assert list(builder.close()) == []


def test_each_call_is_a_block_with_its_arguments_as_they_come() -> None:
    events, builder = build(
        delta("Well"),
        delta(calls=(call(0, id="toolu_1", name="find"),)),
        delta(calls=(call(0, '{"a":'), call(0, " 1}"))),
        delta(calls=(call(1, id="", name="look"), call(1, "[1]"))),
        delta(finish_reason="tool_calls"),
    )
    assert [event["type"].removeprefix("content_block_") for event in events] == [
        *("start", "delta", "stop"),
        *("start", "delta", "delta", "stop"),
        *("start", "delta", "stop"),
    ]
    text, first, second = builder.blocks
    assert text["text"] == "Well"
    assert first == {"type": "tool_use", "id": "toolu_1", "name": "find", "input": {"a": 1}}
    assert (second["name"], second["input"]) == ("look", {}), "no object"
    assert second["id"].startswith("toolu_")
    assert len(second["id"]) == 30
    assert events[4]["delta"] == {"type": "input_json_delta", "partial_json": '{"a":'}
    assert builder.stop() == {"stop_reason": "tool_use", "stop_sequence": None}


def test_arguments_that_were_cut_off_are_an_empty_object() -> None:
    _, builder = build(delta(calls=(call(0, '{"a": ', id="x", name="f"),), finish_reason="length"))
    assert builder.blocks[0]["input"] == {}
    assert builder.stop() == {"stop_reason": "max_tokens", "stop_sequence": None}, "before the call"


@pytest.mark.parametrize(
    ("finish_reason", "stop_reason", "shown"),
    [
        ("length", None, ("max_tokens", None)),
        ("stop", None, ("end_turn", None)),
        ("stop", 7, ("end_turn", None)),
        ("stop", "END", ("stop_sequence", "END")),
        ("length", "END", ("max_tokens", None)),
    ],
)
def test_why_an_answer_ended(finish_reason: str, stop_reason: int | str | None, shown: tuple[str, str | None]) -> None:
    _, builder = build(delta("a"), delta(finish_reason=finish_reason, stop_reason=stop_reason))
    stop = builder.stop()
    assert (stop["stop_reason"], stop["stop_sequence"]) == shown


def test_drawn_ids_are_the_same_again_and_differ_by_place() -> None:
    two = (call(0, id="", name="f"), call(1, id="", name="f"))
    ids = [[block["id"] for block in build(delta(calls=two))[1].blocks] for _ in range(2)]
    assert ids[0] == ids[1]
    assert ids[0][0] != ids[0][1]
