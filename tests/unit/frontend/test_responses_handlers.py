"""Responses and Messages without HTTP: what goes on, what is refused, what becomes of inputs, and usage."""

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pagoda_common.errors import InvalidRequest, NotFound, PagodaError
from pagoda_frontend.messages import handlers as messages_handlers
from pagoda_frontend.messages.input import chat_body_of as messages_chat_body
from pagoda_frontend.messages.protocol import MessagesBody
from pagoda_frontend.responses.handlers import Responses
from pagoda_frontend.responses.input import add_input, chat_body_of
from pagoda_frontend.responses.protocol import ResponseItem, ResponsesBody
from pagoda_frontend.responses.store import ResponseStore, StoredResponse


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
    assert (kept.num_bytes, kept.first_event) == (len('[{"role":"user","content":"said"}]') + len("[]"), 3)
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
