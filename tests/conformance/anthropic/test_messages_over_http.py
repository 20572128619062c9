"""/v1/messages and /v1/messages/count_tokens, as Anthropic's reference describes them, without its client."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.conformance.api import API_KEYS, MODEL, Api, Json

MESSAGES = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
CAPITAL = "What is the capital of France?"
PARIS = "The capital of France is Paris."


def body(content: Any = CAPITAL, **fields: Any) -> Json:
    is_messages = isinstance(content, list) and content and "role" in content[0]
    messages = content if is_messages else [{"role": "user", "content": content}]
    return {"model": MODEL, "max_tokens": 50, "temperature": 0, "messages": messages, **fields}


def message(api: Api, content: Any = CAPITAL, **fields: Any) -> Json:
    """A whole message, checked for its form."""
    answer = api.ok(MESSAGES, body(content, **fields))
    assert answer["id"].startswith("msg_")
    assert (answer["type"], answer["role"], answer["model"]) == ("message", "assistant", MODEL)
    assert answer["stop_reason"] in ("end_turn", "max_tokens", "stop_sequence", "tool_use")
    assert input_tokens(answer) > 0
    assert answer["usage"]["output_tokens"] >= 0
    assert "stop_sequence" in answer
    return answer


def input_tokens(answer: Json) -> int:
    """Those that were computed and those that the cache had, which this API counts apart."""
    usage = answer["usage"]
    cached = (usage.get("cache_read_input_tokens") or 0) + (usage.get("cache_creation_input_tokens") or 0)
    return int(usage["input_tokens"]) + cached


def text_of(answer: Json) -> str:
    return "".join(block["text"] for block in answer["content"] if block["type"] == "text")


def events(api: Api, request: Json) -> list[Json]:
    """The events of a stream, whose names are those of their data."""
    with api.http.stream("POST", MESSAGES, json={**request, "stream": True}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        return list(parsed(response.iter_lines()))


def parsed(lines: Iterator[str]) -> Iterator[Json]:
    name = ""
    for line in lines:
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            data: Json = json.loads(line.removeprefix("data: "))
            assert data["type"] == name
            yield data


def refused(api: Api, path: str, request: Any, status: int = 400) -> Json:
    """The error of a refusal, in Anthropic's form."""
    response = api.http.post(path, json=request)
    assert response.status_code == status, response.text
    answer = response.json()
    assert answer["type"] == "error"
    error: Json = answer["error"]
    assert error["message"]
    assert error["type"] == {400: "invalid_request_error", 404: "not_found_error"}[status]
    return error


def test_a_question_is_answered(api: Api) -> None:
    answer = message(api)
    assert text_of(answer) == PARIS
    assert answer["stop_reason"] == "end_turn"
    assert answer["stop_sequence"] is None


CONTENTS: dict[str, list[Json]] = {
    "a block of text": [{"role": "user", "content": [{"type": "text", "text": CAPITAL}]}],
    "a block with cache control": [
        {"role": "user", "content": [{"type": "text", "text": CAPITAL, "cache_control": {"type": "ephemeral"}}]}
    ],
    "an earlier turn": [
        {"role": "user", "content": "Hello!"},
        {"role": "assistant", "content": [{"type": "text", "text": "Hello! How can I help you today?"}]},
        {"role": "user", "content": CAPITAL},
    ],
}


@pytest.mark.parametrize("messages", CONTENTS.values(), ids=CONTENTS)
def test_a_conversation_may_hold(api: Api, messages: list[Json]) -> None:
    assert "Paris" in text_of(message(api, messages))


SYSTEM = ["You are kind.", [{"type": "text", "text": "You are kind."}]]


@pytest.mark.parametrize("system", SYSTEM, ids=["text", "blocks"])
def test_the_system_prompt_is_part_of_the_input(api: Api, system: Any) -> None:
    assert input_tokens(message(api, system=system)) > input_tokens(message(api))


def test_the_length_ends_it(api: Api) -> None:
    answer = message(api, "Tell me a story.", max_tokens=5)
    assert answer["stop_reason"] == "max_tokens"
    assert answer["usage"]["output_tokens"] == 5


def test_a_stop_sequence_ends_it(api: Api) -> None:
    answer = message(api, stop_sequences=["France", "xyz"])
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "France")
    assert text_of(answer) == "The capital of "


@pytest.mark.parametrize("fields", [{}, {"max_tokens": 4}, {"stop_sequences": ["France"]}], ids=str)
def test_the_events_make_the_message(api: Api, fields: Json) -> None:
    whole = message(api, **fields)
    seen = [event for event in events(api, body(**fields)) if event["type"] != "ping"]
    kinds = [event["type"] for event in seen]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    start = seen[0]["message"]
    assert (start["role"], start["content"], start["stop_reason"]) == ("assistant", [], None)
    assert input_tokens(start) == input_tokens(whole)
    assert seen[1]["content_block"]["type"] == "text"
    deltas = [event["delta"] for event in seen if event["type"] == "content_block_delta"]
    assert "".join(delta["text"] for delta in deltas) == text_of(whole)
    end = seen[-2]
    assert end["delta"]["stop_reason"] == whole["stop_reason"]
    assert end["delta"]["stop_sequence"] == whole["stop_sequence"]
    assert end["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


def test_tokens_are_counted_as_they_are_used(api: Api) -> None:
    request = body("Hello!", system="You are kind.")
    del request["max_tokens"]
    used = message(api, "Hello!", system="You are kind.")
    assert api.ok(COUNT, request)["input_tokens"] == input_tokens(used)


def test_top_k_and_top_p_are_heard(api: Api) -> None:
    assert text_of(message(api, temperature=1.0, top_k=1)) == PARIS
    assert text_of(message(api, temperature=1.0, top_p=1e-9)) == PARIS


TOOL: Json = {
    "name": "get_weather",
    "description": "Get the weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}], ids=["any", "tool"])
def test_a_tool_is_used(api: Api, choice: Json) -> None:
    fields: Json = {"tools": [TOOL], "tool_choice": choice, "max_tokens": 300}
    answer = message(api, "What is the weather in Paris?", **fields)
    assert answer["stop_reason"] == "tool_use"
    uses = [block for block in answer["content"] if block["type"] == "tool_use"]
    assert uses[0]["name"] == "get_weather"
    assert isinstance(uses[0]["input"]["city"], str)
    assert uses[0]["id"]
    seen = events(api, body("What is the weather in Paris?", **fields))
    pieces = [event["delta"] for event in seen if event["type"] == "content_block_delta" and event["index"] == 0]
    assert json.loads("".join(piece["partial_json"] for piece in pieces)) == uses[0]["input"]


BAD: dict[str, Json] = {
    "no max_tokens": {"max_tokens": None},
    "max_tokens of zero": {"max_tokens": 0},
    "a negative max_tokens": {"max_tokens": -1},
    "no messages": {"messages": []},
    "messages of the wrong type": {"messages": "Hello!"},
    "an unknown role": {"messages": [{"role": "nobody", "content": "a"}]},
    "a message without content": {"messages": [{"role": "user"}]},
    "a block of an unknown type": {"messages": [{"role": "user", "content": [{"type": "smell"}]}]},
    "a temperature out of its bounds": {"temperature": 3},
    "a top_p out of its bounds": {"top_p": 2},
    "stop sequences of the wrong type": {"stop_sequences": "a"},
    "tools of the wrong type": {"tools": "a"},
}


@pytest.mark.parametrize("fields", BAD.values(), ids=BAD)
def test_what_is_wrong_is_refused(api: Api, fields: Json) -> None:
    refused(api, MESSAGES, {**body(), **fields})


@pytest.mark.parametrize("path", [MESSAGES, COUNT])
def test_an_unknown_model_is_not_found(api: Api, path: str) -> None:
    assert "nobody" in refused(api, path, body(model="nobody"), status=404)["message"]


def test_a_prompt_beyond_the_context_is_refused(api: Api) -> None:
    refused(api, MESSAGES, body("dog " * 3000))


def test_the_key_may_come_in_anthropics_header(api: Api) -> None:
    url = f"{api.http.base_url}{MESSAGES}"
    assert httpx.post(url, json=body(), headers={"x-api-key": API_KEYS[1]}, timeout=240).status_code == 200
    response = httpx.post(url, json=body(), headers={"x-api-key": "sk-other"}, timeout=240)
    assert response.status_code == 401
    assert response.json()["error"]


def test_no_json_is_refused_in_the_same_form(api: Api) -> None:
    response = api.http.post(MESSAGES, content=b"{", headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    assert response.json()["type"] == "error"
