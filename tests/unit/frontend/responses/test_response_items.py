"""Items of a response as they grow: every event with every field, and what is kept of the input; bounds of metadata."""

import asyncio
from hashlib import sha256
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pagoda_common.errors import InvalidRequest
from pagoda_common.params.outputs import TokenLogprobs
from pagoda_frontend.conversation.message import MessageDelta, ToolCallDelta
from pagoda_frontend.http.answers.opening import announced, patience_of
from pagoda_frontend.openai.logprobs import LogprobWriter
from pagoda_frontend.responses.handlers import _check
from pagoda_frontend.responses.items import input_items
from pagoda_frontend.responses.output import OutputBuilder
from pagoda_frontend.responses.protocol import ResponseItem, ResponsesBody


def delta(
    content: str = "", reasoning: str = "", calls: tuple[ToolCallDelta, ...] = (), logprobs: Any = None
) -> MessageDelta:
    return MessageDelta(
        index=0,
        reasoning=reasoning,
        content=content,
        tool_calls=list(calls),
        source=cast("Any", None),
        finish_reason=None,
        stop_reason=None,
        token_ids=[],
        logprobs=logprobs,
    )


def item_id(prefix: str, place: int) -> str:
    return prefix + sha256(f"seed/item {place}".encode()).hexdigest()[:32]


def test_reasoning_a_message_and_calls_are_items_one_after_the_other() -> None:
    builder = OutputBuilder(logprobs=None, id_seed="seed")
    events: list[dict[str, Any]] = []
    for one in (
        delta(reasoning="I "),
        delta(reasoning="see"),
        delta("Yes"),
        delta("!"),
        delta(calls=(ToolCallDelta(0, "c1", "f", ""),)),
        delta(calls=(ToolCallDelta(0, None, None, '{"a"'), ToolCallDelta(0, None, None, ":1}"))),
        delta(calls=(ToolCallDelta(1, "c2", None, "{}"),)),
    ):
        events += builder.add(one)
    assert len(builder.finished_items()) == 3
    events += builder.close()
    assert list(builder.close()) == []
    thought, said, first, second = (item_id(*one) for one in (("rs_", 0), ("msg_", 1), ("fc_", 2), ("fc_", 3)))

    def at(one: str, place: int) -> dict[str, Any]:
        return {"item_id": one, "output_index": place}

    reasoning = {"id": thought, "type": "reasoning", "status": "in_progress", "summary": [], "content": []}
    message = {"id": said, "type": "message", "status": "in_progress", "role": "assistant", "content": []}
    text = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    calls = [
        {"id": one, "type": "function_call", "status": "in_progress", "call_id": call_id, "name": name, "arguments": ""}
        for one, call_id, name in ((first, "c1", "f"), (second, "c2", ""))
    ]
    items = [
        {**reasoning, "status": "completed", "content": [{"type": "reasoning_text", "text": "I see"}]},
        {**message, "status": "completed", "content": [{**text, "text": "Yes!"}]},
        {**calls[0], "status": "completed", "arguments": '{"a":1}'},
        {**calls[1], "status": "completed", "arguments": "{}"},
    ]
    part: dict[str, Any] = {"content_index": 0}
    assert [{**event, "type": event["type"].removeprefix("response.")} for event in events] == [
        {"type": "output_item.added", "output_index": 0, "item": reasoning},
        {"type": "content_part.added", **at(thought, 0), **part, "part": {"type": "reasoning_text", "text": ""}},
        {"type": "reasoning_text.delta", **at(thought, 0), **part, "delta": "I "},
        {"type": "reasoning_text.delta", **at(thought, 0), **part, "delta": "see"},
        {"type": "reasoning_text.done", **at(thought, 0), **part, "text": "I see"},
        {"type": "content_part.done", **at(thought, 0), **part, "part": {"type": "reasoning_text", "text": "I see"}},
        {"type": "output_item.done", "output_index": 0, "item": items[0]},
        {"type": "output_item.added", "output_index": 1, "item": message},
        {"type": "content_part.added", **at(said, 1), **part, "part": text},
        {"type": "output_text.delta", **at(said, 1), **part, "delta": "Yes", "logprobs": []},
        {"type": "output_text.delta", **at(said, 1), **part, "delta": "!", "logprobs": []},
        {"type": "output_text.done", **at(said, 1), **part, "text": "Yes!", "logprobs": []},
        {"type": "content_part.done", **at(said, 1), **part, "part": {**text, "text": "Yes!"}},
        {"type": "output_item.done", "output_index": 1, "item": items[1]},
        {"type": "output_item.added", "output_index": 2, "item": calls[0]},
        {"type": "function_call_arguments.delta", **at(first, 2), "delta": '{"a"'},
        {"type": "function_call_arguments.delta", **at(first, 2), "delta": ":1}"},
        {"type": "function_call_arguments.done", **at(first, 2), "arguments": '{"a":1}', "name": "f"},
        {"type": "output_item.done", "output_index": 2, "item": items[2]},
        {"type": "output_item.added", "output_index": 3, "item": calls[1]},
        {"type": "function_call_arguments.delta", **at(second, 3), "delta": "{}"},
        {"type": "function_call_arguments.done", **at(second, 3), "arguments": "{}", "name": ""},
        {"type": "output_item.done", "output_index": 3, "item": items[3]},
    ]
    assert builder.items == builder.finished_items() == items


def test_log_probabilities_go_with_the_text_that_they_are_of() -> None:
    tokenizer = SimpleNamespace(token_text=lambda token_id: f"t{token_id}", token_bytes=lambda token_id: b"b")
    writer = LogprobWriter(tokenizer=cast("Any", tokenizer), num_top=0)

    def position(token_id: int) -> list[TokenLogprobs]:
        return [TokenLogprobs(token_ids=[token_id], logprobs=[-1.0], sampled_rank=1)]

    def entry(token_id: int) -> dict[str, Any]:
        return {"token": f"t{token_id}", "logprob": -1.0, "bytes": [98], "top_logprobs": []}

    builder = OutputBuilder(logprobs=writer, id_seed="seed")
    events: list[dict[str, Any]] = []
    call = ToolCallDelta(0, None, None, "x")
    for one in (
        delta(reasoning="r", logprobs=position(1)),
        delta(logprobs=position(2)),
        delta("a", logprobs=position(3)),
        delta("b", logprobs=position(4)),
        delta(logprobs=position(5)),
    ):
        events += builder.add(one)
    told = [event["logprobs"] for event in events if event["type"] == "response.output_text.delta"]
    assert told == [[entry(2), entry(3)], [entry(4)]]
    (done,) = [event for event in builder.close("incomplete") if event["type"] == "response.output_text.done"]
    assert done["logprobs"] == [entry(2), entry(3), entry(4), entry(5)]
    assert builder.items[-1]["status"] == "incomplete"
    list(builder.add(delta(calls=(ToolCallDelta(0, "c", "f", ""), call), logprobs=position(6))))
    assert [event["logprobs"] for event in builder.add(delta("c")) if "logprobs" in event] == [[]]


def test_what_is_kept_of_the_input() -> None:
    def drawn(prefix: str, number: int) -> str:
        return prefix + sha256(f"seed/input {number}".encode()).hexdigest()[:32]

    given: list[dict[str, Any]] = [
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "a", "id": "mine", "status": "in_progress"},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "r"},
        {"type": "reasoning", "summary": []},
        {"type": "other"},
        {"id": "kept"},
        {"type": "item_reference", "id": "kept", "role": "user"},
    ]
    kept = {"id": "kept", "type": "message"}
    asked = [ResponseItem.model_validate(item) for item in given]
    items = input_items(asked, stored_items=lambda: {"kept": kept}, id_seed="seed")
    assert items == [
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "u"}],
            "type": "message",
            "id": drawn("msg_", 0),
            "status": "completed",
        },
        {
            "role": "assistant",
            "content": [{"type": "output_text", "text": "a"}],
            "type": "message",
            "id": "mine",
            "status": "in_progress",
        },
        {**given[2], "id": drawn("fc_", 2), "status": "completed"},
        {**given[3], "id": drawn("fco_", 3), "status": "completed"},
        {**given[4], "id": drawn("rs_", 4), "status": "completed"},
        {**given[5], "id": drawn("item_", 5), "status": "completed"},
        kept,
        kept,
    ]


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({str(number): "" for number in range(16)}, None),
        ({str(number): "" for number in range(17)}, "metadata may have at most 16 keys, got 17"),
        ({"k" * 64: "v" * 512}, None),
        (
            {"k" * 65: "v"},
            f"metadata.{'k' * 64}: a key may have 64 characters and a value 512, got 65 and 1",
        ),
        ({"k": "v" * 513}, "metadata.k: a key may have 64 characters and a value 512, got 1 and 513"),
    ],
)
def test_metadata_take_their_bounds(metadata: dict[str, str], message: str | None) -> None:
    body = ResponsesBody(input="x", metadata=metadata)
    if message is None:
        _check(body, can_store=True)
        return
    with pytest.raises(InvalidRequest) as caught:
        _check(body, can_store=True)
    assert (caught.value.field, caught.value.message) == ("metadata", message)


@pytest.mark.parametrize(
    ("store", "can_store", "is_good"),
    [(None, True, True), (True, True, True), (False, True, False), (None, False, False)],
)
def test_the_background_needs_a_store(store: bool | None, can_store: bool, is_good: bool) -> None:
    _check(ResponsesBody(input="x", store=store), can_store=can_store)
    body = ResponsesBody(input="x", background=True, store=store)
    if is_good:
        _check(body, can_store=can_store)
        return
    with pytest.raises(InvalidRequest) as caught:
        _check(body, can_store=can_store)
    assert caught.value.field == "background"


def test_a_stream_waits_a_second_for_its_first_event_and_up_to_ten_more_for_a_time_limit() -> None:
    assert [patience_of(timeout_s) for timeout_s in (0.0, 2.5, 10.0, 10.5, 600.0)] == [1.0, 3.5, 11.0, 11.0, 11.0]


async def test_a_stream_is_announced_when_its_first_event_is_long_in_coming() -> None:
    may_continue = asyncio.Event()
    is_closed = asyncio.Event()

    async def stream() -> Any:
        try:
            await may_continue.wait()
            yield 1
            yield 2
        finally:
            is_closed.set()

    told = announced(stream(), patience_s=0.0)
    assert await anext(told) is None
    may_continue.set()
    assert [one async for one in told] == [1, 2]
    assert is_closed.is_set()
    assert [one async for one in announced(stream(), patience_s=240.0)] == [1, 2]
    is_closed.clear()
    left = announced(stream(), patience_s=240.0)
    assert await anext(left) == 1
    await left.aclose()
    assert is_closed.is_set()
