"""/v1/responses as OpenAI's reference describes it, without its client: create, stream, retrieve, cancel, go on."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.conformance.api import MODEL, Api, Json, check_error

RESPONSES = "/v1/responses"
CAPITAL = "What is the capital of France?"
PARIS = "The capital of France is Paris."


def body(question: Any = CAPITAL, **fields: Any) -> Json:
    return {"model": MODEL, "input": question, "temperature": 0, "max_output_tokens": 50, **fields}


def respond(api: Api, question: Any = CAPITAL, **fields: Any) -> Json:
    """A whole response, checked for its form."""
    response = api.ok(RESPONSES, body(question, **fields))
    check_response(response)
    return response


def check_response(response: Json) -> None:
    assert response["id"].startswith("resp_")
    assert response["object"] == "response"
    assert response["model"] == MODEL
    assert response["created_at"] > 1_600_000_000
    assert response["status"] in ("completed", "incomplete", "in_progress", "queued", "cancelled", "failed")
    assert {"error", "incomplete_details", "instructions", "metadata", "output", "tools", "usage"} <= response.keys()
    if response["usage"]:
        usage = response["usage"]
        assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]


def text_of(response: Json) -> str:
    parts = [part for item in response["output"] if item["type"] == "message" for part in item["content"]]
    assert all(part["type"] == "output_text" for part in parts)
    return "".join(part["text"] for part in parts)


def events(api: Api, request: Json) -> list[Json]:
    with api.http.stream("POST", RESPONSES, json={**request, "stream": True}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        return list(parsed(response.iter_lines()))


def parsed(lines: Iterator[str]) -> Iterator[Json]:
    name = ""
    for line in lines:
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: ") and line != "data: [DONE]":
            data: Json = json.loads(line.removeprefix("data: "))
            assert data["type"] == name
            yield data


def test_a_question_is_answered(api: Api) -> None:
    response = respond(api)
    assert response["status"] == "completed"
    [item] = response["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    assert text_of(response) == PARIS


INPUTS: dict[str, list[Json]] = {
    "a message": [{"role": "user", "content": CAPITAL}],
    "a message with its type": [{"type": "message", "role": "user", "content": CAPITAL}],
    "parts": [{"role": "user", "content": [{"type": "input_text", "text": CAPITAL}]}],
    "an earlier turn": [
        {"role": "user", "content": "Hello!"},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Hello! How can I help you today?"}]},
        {"role": "user", "content": CAPITAL},
    ],
}


@pytest.mark.parametrize("items", INPUTS.values(), ids=INPUTS)
def test_the_input_may_be(api: Api, items: list[Json]) -> None:
    assert "Paris" in text_of(respond(api, items))


def test_instructions_are_part_of_the_input(api: Api) -> None:
    plain, instructed = respond(api), respond(api, instructions="You are kind.")
    assert instructed["usage"]["input_tokens"] > plain["usage"]["input_tokens"]
    assert instructed["instructions"] == "You are kind."


def test_the_length_leaves_it_incomplete(api: Api) -> None:
    response = respond(api, "Tell me a story.", max_output_tokens=5)
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["usage"]["output_tokens"] == 5


def test_metadata_come_back(api: Api) -> None:
    assert respond(api, metadata={"a": "b"})["metadata"] == {"a": "b"}


@pytest.mark.parametrize("fields", [{}, {"max_output_tokens": 4}], ids=str)
def test_the_events_make_the_response(api: Api, fields: Json) -> None:
    whole = respond(api, **fields)
    seen = events(api, body(**fields))
    kinds = [event["type"] for event in seen]
    numbers = [event["sequence_number"] for event in seen]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    assert kinds[0] == "response.created"
    assert kinds[-1] == f"response.{whole['status']}"
    for kind in ("response.output_item.added", "response.content_part.added", "response.output_text.done"):
        assert kinds.count(kind) == 1
    assert kinds.index("response.output_item.added") < kinds.index("response.content_part.added")
    text = "".join(event["delta"] for event in seen if event["type"] == "response.output_text.delta")
    assert text == text_of(whole)
    last = seen[-1]["response"]
    check_response(last)
    assert text_of(last) == text_of(whole)
    assert last["usage"]["total_tokens"] == whole["usage"]["total_tokens"]


def test_a_response_is_kept_and_can_be_retrieved(api: Api) -> None:
    response = respond(api)
    kept = api.http.get(f"{RESPONSES}/{response['id']}").json()
    assert (kept["id"], kept["status"], text_of(kept)) == (response["id"], "completed", PARIS)


def test_a_response_that_is_not_to_be_kept_is_not(api: Api) -> None:
    response = respond(api, store=False)
    check_error(api.http.get(f"{RESPONSES}/{response['id']}"), 404)


def test_a_conversation_goes_on_from_a_response(api: Api) -> None:
    first = respond(api, "Hello!")
    second = respond(api, CAPITAL, previous_response_id=first["id"])
    assert second["previous_response_id"] == first["id"]
    assert second["usage"]["input_tokens"] > respond(api)["usage"]["input_tokens"]


def test_an_unknown_response_is_not_found(api: Api) -> None:
    check_error(api.http.get(f"{RESPONSES}/resp_nobody"), 404)
    check_error(api.http.post(f"{RESPONSES}/resp_nobody/cancel"), 404)
    error = check_error(api.http.post(RESPONSES, json=body(previous_response_id="resp_nobody")), 404)
    assert "resp_nobody" in error["message"]


def test_a_response_in_the_background_can_be_cancelled(api: Api) -> None:
    response = respond(api, "Tell me a long story.", background=True, max_output_tokens=900)
    assert response["status"] in ("queued", "in_progress")
    cancelled = api.http.post(f"{RESPONSES}/{response['id']}/cancel").json()
    assert cancelled["status"] in ("cancelled", "completed")
    assert api.http.get(f"{RESPONSES}/{response['id']}").json()["status"] == cancelled["status"]


def test_a_form_of_the_text_is_kept_to(api: Api) -> None:
    schema: Json = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    schema["additionalProperties"] = False
    response = respond(api, text={"format": {"type": "json_schema", "name": "s", "schema": schema, "strict": True}})
    assert list(json.loads(text_of(response))) == ["ok"]


def test_a_function_is_called(api: Api) -> None:
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tool = {"type": "function", "name": "get_weather", "parameters": parameters}
    choice = {"type": "function", "name": "get_weather"}
    fields: Json = {"tools": [tool], "tool_choice": choice, "max_output_tokens": 300}
    [call] = respond(api, "What is the weather in Paris?", **fields)["output"]
    assert (call["type"], call["name"]) == ("function_call", "get_weather")
    assert call["call_id"]
    assert isinstance(json.loads(call["arguments"])["city"], str)


BAD: list[tuple[str, Any]] = [
    ("input", None),
    ("input", 5),
    ("input", []),
    ("input", [{"role": "nobody", "content": "a"}]),
    ("input", [{"type": "smell"}]),
    ("max_output_tokens", 0),
    ("max_output_tokens", "many"),
    ("temperature", 3),
    ("top_p", 2),
    ("metadata", "a"),
    ("stream", "maybe"),
]


@pytest.mark.parametrize(("field", "value"), BAD, ids=[f"{field}={value}" for field, value in BAD])
def test_what_is_wrong_is_refused(api: Api, field: str, value: Any) -> None:
    api.refused(RESPONSES, {**body(), field: value}, param=field)


def test_an_unknown_model_is_not_found(api: Api) -> None:
    api.refused(RESPONSES, body(model="nobody"), status=404, param="model")
