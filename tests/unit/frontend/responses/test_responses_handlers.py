"""Responses and Messages without HTTP: what goes on, what is refused, what becomes of inputs, and usage."""

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any, cast

import orjson
import pytest

from pagoda_common.errors import InvalidRequest, NotFound, PagodaError
from pagoda_frontend.budget.caller import current_hold
from pagoda_frontend.budget.held_memory import HeldMemory
from pagoda_frontend.conversation.message import MessageDelta
from pagoda_frontend.messages import handlers as messages_handlers
from pagoda_frontend.messages.input import chat_body_of as messages_chat_body
from pagoda_frontend.messages.protocol import MessagesBody
from pagoda_frontend.responses import draft as drafts
from pagoda_frontend.responses.draft import Draft, encoded_stream
from pagoda_frontend.responses.handlers import Responses
from pagoda_frontend.responses.input import add_input, chat_body_of
from pagoda_frontend.responses.protocol import ResponseItem, ResponsesBody
from pagoda_frontend.responses.store import ResponseStore, StoredResponse, held_bytes_of


@pytest.fixture
def responses(monkeypatch: pytest.MonkeyPatch) -> Responses:
    config = SimpleNamespace(max_stored_responses=5, sse_keep_alive_interval_s=0.0)
    monkeypatch.setattr(Responses, "_tenant", lambda self, request: "")
    shared = SimpleNamespace(responses=ResponseStore(max_responses=5))
    return Responses(serving=cast("Any", SimpleNamespace(config=config, shared=shared)))


def stored(status: str = "completed") -> StoredResponse:
    said = [{"role": "user", "content": "said"}]
    return StoredResponse("", {"id": "a", "status": status, "output": []}, said)


@pytest.mark.parametrize("status", ["completed", "incomplete", "queued", "in_progress", "failed", "cancelled"])
def test_a_conversation_goes_on_from_an_answer_that_has_come_to_its_end(responses: Responses, status: str) -> None:
    responses._store.add(stored(status))
    body = ResponsesBody.model_validate({"input": "more", "previous_response_id": "a"})
    if status in ("completed", "incomplete"):
        assert [message["content"] for message in responses._messages(body, "")] == ["said", "more"]
        return
    with pytest.raises(InvalidRequest, match=f"the previous response is {status}") as caught:
        responses._messages(body, "")
    assert caught.value.field == "previous_response_id"


def test_what_continues_an_answer_changes_nothing_of_it(responses: Responses) -> None:
    kept = stored()
    kept.messages = [{"role": "user", "content": "said"}, {"role": "assistant", "reasoning": "hm"}]
    before = [dict(message) for message in kept.messages]
    responses._store.add(kept)
    items = [{"type": "message", "role": "assistant", "content": "well"}]
    body = ResponsesBody.model_validate({"input": items, "previous_response_id": "a"})
    messages = responses._messages(body, "")
    assert messages[1:] == [{"role": "assistant", "reasoning": "hm", "content": "well"}]
    assert kept.messages == before


def test_an_unknown_answer_is_an_error_of_the_field_that_names_it(responses: Responses) -> None:
    body = ResponsesBody.model_validate({"input": "more", "previous_response_id": "nobody's"})
    with pytest.raises(NotFound) as caught:
        responses._messages(body, "")
    assert caught.value.field == "previous_response_id"


async def test_an_answer_that_is_deleted_is_made_no_further(responses: Responses) -> None:
    one = stored("in_progress")
    one.task = task = asyncio.create_task(asyncio.sleep(3600))
    responses._store.add(one)
    await asyncio.sleep(0)
    await responses.delete(cast("Any", None), "a")
    assert task.cancelling() == 1
    assert responses._store.find("a", "") is None


class Made:
    """A draft with known events: the answer comes with the last one."""

    num_events = 3

    def __init__(self, error: Exception | None = None) -> None:
        self.response: dict[str, Any] = {"id": "a", "status": "in_progress", "output": []}
        self.error = error
        self.num_released = 0

    async def events(self) -> AsyncGenerator[list[bytes], None]:
        yield [b"3"]
        if self.error is not None:
            raise self.error
        self.response["output"] = [{"type": "message", "role": "assistant", "content": "well"}]
        yield [b"4", b"5"]

    def fail(self, error: Exception) -> list[bytes]:
        return [f"failed: {error}".encode()]

    def release(self) -> None:
        self.num_released += 1


@pytest.mark.parametrize("error", [None, PagodaError("lost"), RuntimeError("broken")])
async def test_an_answer_in_the_background_goes_on_from_what_it_has_said(
    responses: Responses, error: Exception | None
) -> None:
    draft, kept = Made(error), stored()
    kept.response = draft.response
    before = list(kept.messages)
    assert responses._start_in_background(cast("Any", draft), kept, with_events=True) is kept
    assert responses._store.get("a", "") is kept
    assert (kept.num_bytes, kept.first_event) == (held_bytes_of(kept.messages, [], kept.response), 3)
    assert kept.task is not None
    await kept.task
    answer = [] if error else [{"role": "assistant", "content": "well"}]
    assert kept.messages == before + answer
    assert kept.events == ([b"3", f"failed: {error}".encode()] if error else [b"3", b"4", b"5"])
    assert draft.num_released == 1


@pytest.mark.parametrize(
    ("start", "told"), [(0, b"34"), (-5, b"34"), (3, b"34"), (4, b"4"), (5, b""), (1, None), (2, None)]
)
async def test_events_are_told_from_the_first_that_is_here(
    responses: Responses, start: int, told: bytes | None
) -> None:
    one = stored()
    one.first_event, one.events = 3, [b"3", b"4"]
    one.task = asyncio.create_task(asyncio.sleep(0))
    await one.task
    if told is None:
        with pytest.raises(InvalidRequest, match="before number 3 were sent") as caught:
            responses._follow(one, start, field="starting_after")
        assert caught.value.field == "starting_after"
        return
    made: list[Any] = []
    responses._event_stream = lambda events, *_, **__: made.append(events)  # type: ignore[assignment,method-assign]
    responses._follow(one, start, field="starting_after")
    assert b"".join([part async for part in made[0]]) == told


def test_tools_that_are_not_allowed_are_not_shown() -> None:
    tools = [{"type": "function", "name": name} for name in ("one", "two", "three")]
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "two"}]}
    body = ResponsesBody.model_validate({"input": "x", "tools": tools, "tool_choice": allowed})
    chat = chat_body_of(body, [])
    assert [tool.function.name for tool in chat.tools or ()] == ["two"]
    assert chat.tool_choice == "required"


def test_items_of_one_turn_are_one_message_and_what_it_has_begins_the_next() -> None:
    def text(content: str) -> dict[str, Any]:
        return {"type": "message", "role": "assistant", "content": content}

    def thought(content: str) -> dict[str, Any]:
        return {"type": "reasoning", "content": [{"type": "reasoning_text", "text": content}]}

    def call(name: str) -> dict[str, Any]:
        return {"type": "function_call", "call_id": name, "name": name, "arguments": "{}"}

    items = [thought("t1"), text("c1"), call("f1"), call("f2"), text("c2"), text("c3"), thought("t2"), call("f3")]
    messages: list[dict[str, Any]] = []
    add_input(messages, [ResponseItem.model_validate(item) for item in items], dict)
    shown = [
        (message.get("reasoning"), message["content"], [made["id"] for made in message.get("tool_calls", ())])
        for message in messages
    ]
    assert shown == [("t1", "c1", ["f1", "f2"]), (None, "c2", []), (None, "c3", []), ("t2", None, ["f3"])]


@pytest.mark.parametrize(
    ("content", "goes_on"),
    [
        ("So", True),
        ([{"type": "text", "text": "So"}], True),
        ([{"type": "text", "text": "So"}, {"type": "tool_use", "id": "i", "name": "n", "input": {}}], False),
        ([{"type": "tool_use", "id": "i", "name": "n", "input": {}}], False),
        ("", False),
    ],
)
def test_a_last_turn_of_the_assistant_is_the_beginning_of_the_answer_unless_it_has_called(
    content: Any, goes_on: bool
) -> None:
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": content}]
    chat = messages_chat_body(MessagesBody.model_validate({"model": "m", "max_tokens": 5, "messages": turns}))
    assert bool(chat.continue_final_message) is goes_on
    assert (chat.add_generation_prompt is False) is goes_on


def test_tokens_of_the_prompt_are_counted_as_read_or_as_cached_and_not_as_both() -> None:
    run = SimpleNamespace(num_prompt_tokens=9, num_cached_tokens=4, num_output_tokens=2)
    assert messages_handlers._usage(cast("Any", SimpleNamespace(run=run))) == {
        "input_tokens": 5,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 4,
        "output_tokens": 2,
    }


# Streams of Messages and Responses.


def delta(**fields: Any) -> MessageDelta:
    told = {"index": 0, "reasoning": "", "content": "", "tool_calls": [], "source": None, "finish_reason": None}
    source = cast("Any", SimpleNamespace(is_replayed=False))
    return MessageDelta(**{**told, "source": source, "stop_reason": None, "token_ids": [5], "logprobs": None, **fields})


def conversation(*steps: Any) -> Any:
    """A conversation that says its deltas, waits for as long as a number says, or fails."""

    async def deltas() -> AsyncGenerator[list[MessageDelta], None]:
        for step in steps:
            if isinstance(step, float):
                await asyncio.sleep(step)
            elif isinstance(step, Exception):
                raise step
            else:
                yield [step]

    told: list[str] = []
    run = SimpleNamespace(
        call=SimpleNamespace(engine_id="e", resumption=None, timeout_s=0.0, request_id="r", created=7),
        num_prompt_tokens=10,
        num_cached_tokens=4,
        num_output_tokens=3,
        note_place=lambda one: told.append(one.content),
        event_ids=None,
        release=lambda: told.append("released"),
        told=told,
        model=SimpleNamespace(
            names=("m",),
            defaults=SimpleNamespace(values={"temperature": 0.5}),
            tokenizer=SimpleNamespace(decode=lambda ids, skip_special_tokens: f"{list(ids)} {skip_special_tokens}"),
        ),
    )
    usage = {"completion_tokens_details": {"reasoning_tokens": 2}}
    return SimpleNamespace(run=run, deltas=deltas, logprobs=None, prompt=[1, 2], usage=lambda: usage)


def types_of(stream: list[bytes]) -> list[list[str]]:
    """Types of the events that came together."""
    return [[line[7:].decode() for line in part.split(b"\n") if line.startswith(b"event: ")] for part in stream]


def stream_of(kind: str, talk: Any, **fields: Any) -> AsyncGenerator[bytes, None]:
    if kind == "messages":
        return messages_handlers._encoded_stream(talk, {"id": "r"})
    body = ResponsesBody.model_validate({"input": "x", **fields})
    return encoded_stream(Draft(body=body, conversation=talk))


KINDS = ["messages", "responses"]
OPENING = {"messages": ["message_start"], "responses": ["response.created", "response.in_progress"]}


@pytest.mark.parametrize("kind", KINDS)
async def test_a_stream_begins_before_news_that_are_long_in_coming(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (messages_handlers, drafts):
        monkeypatch.setattr(module, "patience_of", lambda timeout_s: 0.001)
    talk = conversation(0.05, delta(content="a"), delta(content="b", finish_reason="stop"))
    first, second, *_ = types_of([body async for body in stream_of(kind, talk)])
    assert first == OPENING[kind]
    assert not set(second) & set(first)
    assert second
    assert talk.run.told == ["a", "b", "released"]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_fault_is_raised_before_the_first_event_and_is_an_event_after_it(kind: str) -> None:
    talk = conversation(PagodaError("lost"))
    with pytest.raises(PagodaError, match="lost"):
        _ = [body async for body in stream_of(kind, talk)]
    assert talk.run.told == ["released"]
    talk = conversation(delta(content="a"), PagodaError("lost"))
    *_, last = [body async for body in stream_of(kind, talk)]
    assert types_of([last]) == [["error" if kind == "messages" else "response.failed"]]
    assert b"lost" in last
    assert talk.run.told == ["a", "released"]


@pytest.mark.parametrize("kind", KINDS)
async def test_an_answer_that_is_aborted_fails(kind: str) -> None:
    *_, last = [body async for body in stream_of(kind, conversation(delta(content="a", finish_reason="abort")))]
    assert b"the request was aborted" in last


@pytest.mark.parametrize("kind", KINDS)
async def test_a_client_that_leaves_early_releases_the_request(kind: str) -> None:
    talk = conversation(delta(content="a"), 3600.0)
    stream = stream_of(kind, talk)
    await anext(stream)
    await stream.aclose()
    assert talk.run.told == ["a", "released"]


@pytest.mark.parametrize(
    ("reason", "status", "details"),
    [("stop", "completed", None), ("tool_calls", "completed", None), ("length", "incomplete", "max_output_tokens")],
)
async def test_how_a_response_ends(reason: Any, status: str, details: str | None) -> None:
    talk = conversation(delta(content="a"), delta(content="b", finish_reason=reason, token_ids=[6, 7]))
    body = ResponsesBody.model_validate({"input": "x", "enable_response_messages": True})
    draft = Draft(body=body, conversation=talk)
    sent = [orjson.loads(part.split(b"data: ")[1]) async for parts in draft.events() for part in parts]
    assert [event["sequence_number"] for event in sent] == list(range(draft.num_events))
    assert sent[-1] == {"type": f"response.{status}", "sequence_number": len(sent) - 1, "response": draft.response}
    told = draft.response
    assert (told["status"], (told["incomplete_details"] or {}).get("reason")) == (status, details)
    assert (told["completed_at"] is not None) == (status == "completed")
    assert [item["status"] for item in told["output"]] == [status]
    assert told["usage"] == {
        "input_tokens": 10,
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
        "output_tokens": 3,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 13,
    }
    raw = {"type": "raw_message_tokens"}
    assert told["input_messages"] == [{**raw, "message": "[1, 2] False", "tokens": [1, 2]}]
    assert told["output_messages"] == [{**raw, "message": "[5, 6, 7] False", "tokens": [5, 6, 7]}]


async def test_a_response_goes_on_from_the_events_that_a_lost_frontend_sent() -> None:
    replayed = delta(content="a", source=cast("Any", SimpleNamespace(is_replayed=True)))
    talk = conversation(replayed, delta(content="b", finish_reason="stop"))
    body = ResponsesBody.model_validate({"input": "x", "background": True})
    draft = Draft(body=body, conversation=talk, num_events=5)
    assert draft.response["status"] == "queued"
    sent = [[orjson.loads(part.split(b"data: ")[1]) for part in parts] async for parts in draft.events()]
    assert sent[0] == []
    assert draft.response["status"] == "completed"
    flat = [event for events in sent for event in events]
    assert [event["sequence_number"] for event in flat] == list(range(5, 5 + len(flat)))
    assert (flat[0]["type"], flat[0]["delta"]) == ("response.output_text.delta", "b")
    assert draft.response["output"][0]["content"][0]["text"] == "ab"


@pytest.mark.parametrize(
    ("error", "code"), [(PagodaError("x"), "server_error"), (InvalidRequest("x"), "invalid_prompt")]
)
def test_a_response_that_fails_says_whose_fault_it_is(error: PagodaError, code: str) -> None:
    draft = Draft(body=ResponsesBody.model_validate({"input": "x"}), conversation=conversation())
    [event] = draft.fail(error)
    assert event.startswith(b"event: response.failed\ndata: ")
    assert (draft.response["status"], draft.response["error"]) == ("failed", {"code": code, "message": "x"})
    assert (orjson.loads(event.split(b"data: ")[1])["sequence_number"], draft.num_events) == (0, 1)


# Stored responses over their paths.


def request_of(*, last_event_id: str | None = None, **query: str) -> Any:
    headers = {} if last_event_id is None else {"last-event-id": last_event_id}
    return SimpleNamespace(headers=headers, query_params=query)


@pytest.mark.parametrize(
    ("query", "field", "message"),
    [
        ({"starting_after": "x"}, "starting_after", "starting_after must be an integer, got 'x'"),
        ({"starting_after": ""}, "starting_after", "must be an integer, got ''"),
        ({"starting_after": "1.5"}, "starting_after", "must be an integer, got '1.5'"),
        ({"starting_after": "9" * 19}, "starting_after", "must be an integer"),
        ({"starting_after": "1"}, "starting_after", "events before number 3 were sent by a frontend that is lost"),
    ],
)
async def test_where_a_stored_stream_begins_is_a_number(
    responses: Responses, query: dict[str, str], field: str, message: str
) -> None:
    one = stored("in_progress")
    one.events, one.first_event = [b"3"], 3
    responses._store.add(one)
    with pytest.raises(InvalidRequest, match=message) as caught:
        await responses.retrieve(request_of(stream="TRUE", **query), "a")
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("query", "start"),
    [({}, 0), ({"starting_after": "-1"}, 0), ({"starting_after": "0"}, 1), ({"starting_after": "9" * 18}, 10**18)],
)
async def test_a_stored_stream_begins_after_the_event_that_is_named(
    responses: Responses, query: dict[str, str], start: int
) -> None:
    one = stored("in_progress")
    one.events = [b"0"]
    responses._store.add(one)
    asked: list[Any] = []
    responses._follow = lambda *given, **field: asked.append((given, field))  # type: ignore[assignment,method-assign]
    for flag in ("true", "1"):
        await responses.retrieve(request_of(stream=flag, **query), "a")
    assert asked == [((one, start), {"field": "starting_after"})] * 2
    for flag in ("false", "0", ""):
        shown = await responses.retrieve(request_of(stream=flag, **query), "a")
        assert orjson.loads(bytes(shown.body)) == one.response
    one.events = None
    with pytest.raises(InvalidRequest, match="created with background=true and stream=true") as caught:
        await responses.retrieve(request_of(stream="true"), "a")
    assert caught.value.field == "stream"


async def test_a_last_event_id_says_where_a_stored_stream_resumes(responses: Responses) -> None:
    one = stored("in_progress")
    one.events = [b"0"]
    responses._store.add(one)
    asked: list[Any] = []
    responses._follow = lambda *given, **field: asked.append((given, field))  # type: ignore[assignment,method-assign]
    await responses.retrieve(request_of(last_event_id="a:4@7", stream="true"), "a")
    assert asked == [((one, 7), {"field": "Last-Event-ID"})]
    with pytest.raises(InvalidRequest, match="Last-Event-ID is not an event of 'a'") as caught:
        await responses.retrieve(request_of(last_event_id="b:4@7", stream="true"), "a")
    assert caught.value.field == "Last-Event-ID"


@pytest.mark.parametrize(
    ("before", "after"),
    [*((state, "cancelled") for state in ("queued", "in_progress")), *((s, s) for s in ("completed", "failed"))],
)
async def test_a_response_in_the_background_may_be_cancelled(responses: Responses, before: str, after: str) -> None:
    one = stored(before)
    responses._store.add(one)
    with pytest.raises(InvalidRequest, match="Cannot cancel a synchronous response"):
        await responses.cancel(request_of(), "a")
    one.task = task = asyncio.create_task(asyncio.sleep(3600))
    shown = await responses.cancel(request_of(), "a")
    assert task.cancelled()
    assert orjson.loads(bytes(shown.body))["status"] == one.response["status"] == after


async def test_an_answer_in_the_background_holds_what_its_call_held_and_its_events(responses: Responses) -> None:
    memory = HeldMemory(max_bytes=1000)
    hold = memory.begin()
    hold.add(40)
    token = current_hold.set(hold)
    try:
        kept = stored()
        responses._start_in_background(cast("Any", Made(None)), kept, with_events=True)
    finally:
        current_hold.reset(token)
    hold.end()
    assert memory.num_bytes == 40, "the call is over"
    assert kept.task is not None
    await kept.task
    assert (memory.num_bytes, memory.num_bytes_taken) == (0, 43), "three events of a byte"
