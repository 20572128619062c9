"""Every field of every answer of Responses and Messages, and every event of their streams, for one known output."""

from collections.abc import Sequence
from hashlib import sha256
from typing import Any

import orjson
import pytest

from tests.service.frontend.harness import Running

pytestmark = pytest.mark.usefixtures("pinned")

SCRIPT = [1213, 518]
"""The tokens "Hello" and " there"."""
TEXT = "Hello there"
ASKED = [{"role": "user", "content": "hello"}]
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
RESPONSE_ID = f"resp_{0:032}"
ITEM_ID = "msg_" + sha256(f"{RESPONSE_ID}-00000000/item 0".encode()).hexdigest()[:32]


async def asked(running: Running, path: str, body: Any) -> Any:
    """The answer to a call named r: JSON, or of each event its id and JSON, once its name has been compared."""
    running.fake.script, running.fake.tokens_per_step = SCRIPT, 9  # all tokens come together
    running.fake.num_cached_tokens = 1
    response = await running.http.post(path, json=body, headers={"X-Request-Id": "r"})
    assert response.status_code == 200, response.text
    if not body.get("stream"):
        return response.json()
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    *events, end = response.text.split("\n\n")
    assert end == ""
    read = []
    for event in events:
        fields = dict(line.split(": ", 1) for line in event.split("\n"))
        data = orjson.loads(fields.pop("data"))
        assert fields.pop("event") == data["type"]
        read.append((fields.pop("id", None), data))
        assert not fields
    return read


def response_of(**fields: Any) -> dict[str, Any]:
    return {
        "id": RESPONSE_ID,
        "object": "response",
        "created_at": 1000,
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "max_output_tokens": None,
        "max_tool_calls": None,
        "metadata": {},
        "model": "tiny",
        "output": [],
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "prompt_cache_key": None,
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": None,
        "service_tier": "auto",
        "store": True,
        "temperature": 1.0,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "top_p": 1.0,
        "truncation": "disabled",
        "usage": None,
        "user": None,
        **fields,
    }


def item_of(text: str, status: str = "completed") -> dict[str, Any]:
    return {"id": ITEM_ID, "type": "message", "status": status, "role": "assistant", "content": [part_of(text)]}


def part_of(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def usage_of(prompt: int, output: int) -> dict[str, Any]:
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": 1, "cache_write_tokens": 0},
        "output_tokens": output,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + output,
    }


DONE = {"status": "completed", "completed_at": 1002, "output": [item_of(TEXT)], "usage": usage_of(14, 3)}
TOOL = {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}, "strict": False}
ECHOED: dict[str, Any] = {
    "max_tool_calls": 3,
    "metadata": {"a": "b"},
    "model": "alias",
    "parallel_tool_calls": False,
    "prompt_cache_key": "k",
    "reasoning": {"effort": "low", "summary": "auto"},
    "safety_identifier": "s",
    "service_tier": "default",
    "store": False,
    "temperature": 0.5,
    "text": {"format": {"type": "text"}, "verbosity": "low"},
    "tool_choice": "none",
    "tools": [TOOL],
    "top_logprobs": 0,
    "top_p": 0.25,
    "truncation": "auto",
    "user": "u",
}
"""Fields that an answer repeats, none with its default."""


async def test_a_response(frontend: Running) -> None:
    assert await asked(frontend, RESPONSES, {"input": "hello"}) == response_of(**DONE)


async def test_a_response_that_is_cut_off(frontend: Running) -> None:
    assert await asked(frontend, RESPONSES, {"input": "hello", "max_output_tokens": 1}) == response_of(
        status="incomplete",
        incomplete_details={"reason": "max_output_tokens"},
        max_output_tokens=1,
        output=[item_of("Hello", "incomplete")],
        usage=usage_of(14, 1),
    )


async def test_a_response_repeats_what_was_asked(frontend: Running) -> None:
    answer = await asked(frontend, RESPONSES, {"input": "hello", **ECHOED})
    num_prompt_tokens = answer["usage"]["input_tokens"]
    assert answer == response_of(**{**DONE, "usage": usage_of(num_prompt_tokens, 3)}, **ECHOED)


async def test_a_response_that_is_stored(frontend: Running) -> None:
    whole = await asked(frontend, RESPONSES, {"input": "hello"})
    path = f"{RESPONSES}/{RESPONSE_ID}"
    assert (await frontend.http.get(path)).json() == whole
    seed = f"{RESPONSE_ID}/input 0"
    item = {
        "role": "user",
        "content": [{"type": "input_text", "text": "hello"}],
        "type": "message",
        "id": "msg_" + sha256(seed.encode()).hexdigest()[:32],
        "status": "completed",
    }
    page = {"object": "list", "data": [item], "first_id": item["id"], "last_id": item["id"], "has_more": False}
    assert (await frontend.http.get(f"{path}/input_items")).json() == page
    refused = await frontend.http.post(f"{path}/cancel")
    message = "Cannot cancel a synchronous response: it was not created with background=true."
    fault = {"message": message, "type": "BadRequestError", "param": None, "code": 400}
    assert (refused.status_code, refused.json()) == (400, {"error": fault})
    deleted = await frontend.http.delete(path)
    assert deleted.json() == {"id": RESPONSE_ID, "object": "response", "deleted": True}
    message = f"Response with id '{RESPONSE_ID}' not found: it is not stored at this frontend."
    fault = {"message": message, "type": "NotFoundError", "param": "response_id", "code": 404}
    for response in (
        await frontend.http.get(path),
        await frontend.http.get(f"{path}/input_items"),
        await frontend.http.post(f"{path}/cancel"),
        await frontend.http.delete(path),
    ):
        assert (response.status_code, response.json()) == (404, {"error": fault})


def numbered(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**event, "sequence_number": number} for number, event in enumerate(events)]


@pytest.mark.parametrize(
    ("body", "text", "place", "end", "item_status"),
    [
        ({}, TEXT, "3f", DONE, "completed"),
        (
            {"max_output_tokens": 1},
            "Hello",
            "1f",
            {
                "status": "incomplete",
                "incomplete_details": {"reason": "max_output_tokens"},
                "output": [item_of("Hello", "incomplete")],
                "usage": usage_of(14, 1),
            },
            "incomplete",
        ),
    ],
)
async def test_the_events_of_a_response(
    frontend: Running, body: dict[str, Any], text: str, place: str, end: dict[str, Any], item_status: str
) -> None:
    told = await asked(frontend, RESPONSES, {"input": "hello", "stream": True, **body})
    begun, ended = response_of(**body), response_of(**body, **end)
    at: dict[str, Any] = {"item_id": ITEM_ID, "output_index": 0, "content_index": 0}
    opened = {**item_of(""), "status": "in_progress", "content": []}
    assert [event for _, event in told] == numbered(
        [
            {"type": "response.created", "response": begun},
            {"type": "response.in_progress", "response": begun},
            {"type": "response.output_item.added", "output_index": 0, "item": opened},
            {"type": "response.content_part.added", **at, "part": part_of("")},
            {"type": "response.output_text.delta", **at, "delta": text, "logprobs": []},
            {"type": "response.output_text.done", **at, "text": text, "logprobs": []},
            {"type": "response.content_part.done", **at, "part": part_of(text)},
            {"type": "response.output_item.done", "output_index": 0, "item": item_of(text, item_status)},
            {"type": f"response.{end['status']}", "response": ended},
        ]
    )
    assert [name for name, _ in told] == [*[None] * 4, f"{RESPONSE_ID}:{place}@5", *[None] * 4]


async def test_a_response_that_fails_in_the_middle(frontend: Running) -> None:
    frontend.fake.fail_at[f"{RESPONSE_ID}-00000000"] = 1
    told = await asked(frontend, RESPONSES, {"input": "hello", "stream": True})
    kinds = [event["type"].removeprefix("response.") for _, event in told]
    assert kinds[-1] == "failed"
    fault = {"code": "server_error", "message": "the fake failed this request"}
    assert told[-1][1]["response"] == response_of(
        status="failed", error=fault, output=told[-1][1]["response"]["output"]
    )
    assert [event["sequence_number"] for _, event in told] == list(range(len(told)))


def message_of(**fields: Any) -> dict[str, Any]:
    return {
        "id": "msg_r",
        "type": "message",
        "role": "assistant",
        "model": "tiny",
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": messages_usage(0),
        **fields,
    }


def messages_usage(output: int) -> dict[str, int]:
    return {
        "input_tokens": 13,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 1,
        "output_tokens": output,
    }


ENDS: list[tuple[dict[str, Any], str, str, dict[str, Any], int]] = [
    ({"max_tokens": 9}, TEXT, "3f", {"stop_reason": "end_turn", "stop_sequence": None}, 3),
    ({"max_tokens": 1}, "Hello", "1f", {"stop_reason": "max_tokens", "stop_sequence": None}, 1),
    (
        {"max_tokens": 9, "stop_sequences": [" th"]},
        "Hello",
        "2f",
        {"stop_reason": "stop_sequence", "stop_sequence": " th"},
        2,
    ),
]


@pytest.mark.parametrize(("body", "text", "place", "end", "num_tokens"), ENDS)
async def test_a_message_and_its_events(
    frontend: Running, body: dict[str, Any], text: str, place: str, end: dict[str, Any], num_tokens: int
) -> None:
    content = [{"type": "text", "text": text, "citations": None}]
    whole = message_of(content=content, usage=messages_usage(num_tokens), **end)
    assert await asked(frontend, MESSAGES, {"messages": ASKED, **body}) == whole
    told = await asked(frontend, MESSAGES, {"messages": ASKED, "stream": True, **body})
    assert told == [
        (None, {"type": "message_start", "message": message_of()}),
        (
            None,
            {
                "type": "content_block_start",
                "index": 0,
                "content_block": {"type": "text", "text": "", "citations": None},
            },
        ),
        (f"msg_r:{place}", {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}}),
        (None, {"type": "content_block_stop", "index": 0}),
        (None, {"type": "message_delta", "delta": end, "usage": messages_usage(num_tokens)}),
        (f"msg_r:{place}", {"type": "message_stop"}),
    ]


async def test_tokens_of_a_message_are_counted_without_an_answer(frontend: Running) -> None:
    assert await asked(frontend, f"{MESSAGES}/count_tokens", {"messages": ASKED}) == {"input_tokens": 14}
    assert frontend.fake.submits == []


async def test_a_message_that_is_refused(frontend: Running) -> None:
    response = await frontend.http.post(MESSAGES, json={"messages": ASKED, "max_tokens": 1, "model": "other"})
    fault = {"type": "not_found_error", "message": "model: The model `other` does not exist."}
    assert (response.status_code, response.json()) == (404, {"type": "error", "error": fault})
