"""Tools: what a choice of tool promises, and the same message whole and streamed."""

import json
from typing import Any

import jsonschema
import pytest

from tests.conformance.api import CHAT, MODEL, Api, Json, Stream, chat_body

WEATHER: Json = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
TIME: Json = {
    "type": "function",
    "function": {
        "name": "get_time",
        "description": "Get the time of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "hours": {"type": "integer", "minimum": 0, "maximum": 24}},
            "required": ["city", "hours"],
            "additionalProperties": False,
        },
    },
}
TOOLS = [WEATHER, TIME]
SCHEMAS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
QUESTION = "What is the weather in Paris?"


def named(name: str) -> Json:
    return {"type": "function", "function": {"name": name}}


def check_calls(calls: list[Json]) -> None:
    assert len({call["id"] for call in calls}) == len(calls)
    for call in calls:
        assert call["type"] == "function"
        assert call["id"]
        arguments = json.loads(call["function"]["arguments"])
        jsonschema.validate(arguments, SCHEMAS[call["function"]["name"]])


def streamed_calls(stream: Stream) -> list[Json]:
    """The calls that the pieces make, checked as clients put them together."""
    calls: dict[int, Json] = {}
    for part in stream.choices():
        pieces = part["delta"].get("tool_calls") or []
        assert len({piece["index"] for piece in pieces}) == len(pieces), "a chunk has one piece of a call at most"
        for piece in pieces:
            index = piece["index"]
            if index not in calls:
                assert index == len(calls), "calls come in order"
                assert piece["id"]
                assert piece["type"] == "function"
                assert piece["function"]["name"]
                calls[index] = {"name": piece["function"]["name"], "arguments": ""}
            else:
                assert not piece.get("id")
                assert not piece["function"].get("name")
            calls[index]["arguments"] += piece["function"].get("arguments") or ""
    return list(calls.values())


@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("temperature", [0, 1.0, 2.0])
def test_a_named_tool_is_called_with_arguments_of_its_schema(api: Api, name: str, temperature: float) -> None:
    fields: Json = {"tools": TOOLS, "tool_choice": named(name), "temperature": temperature, "seed": 1}
    [choice] = api.chat(QUESTION, **fields, max_tokens=400)["choices"]
    calls = choice["message"]["tool_calls"]
    assert [call["function"]["name"] for call in calls] == [name]
    if choice["finish_reason"] != "length":
        assert choice["finish_reason"] in ("stop", "tool_calls")
        check_calls(calls)
    assert not choice["message"]["content"]


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("question", [QUESTION, "Hello!", "Tell me a story."])
def test_a_required_tool_is_called_whatever_was_asked(api: Api, question: str, temperature: float) -> None:
    fields: Json = {"tools": TOOLS, "tool_choice": "required", "temperature": temperature, "seed": 2}
    [choice] = api.chat(question, **fields, max_tokens=500)["choices"]
    assert choice["message"]["tool_calls"]
    if choice["finish_reason"] != "length":
        assert choice["finish_reason"] == "tool_calls"
        check_calls(choice["message"]["tool_calls"])


def test_at_most_one_call_without_parallel_calls(api: Api) -> None:
    fields: Json = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 400}
    [choice] = api.chat(QUESTION, **fields)["choices"]
    assert len(choice["message"]["tool_calls"]) == 1


def test_a_model_that_may_choose_calls_the_tool(api: Api) -> None:
    """The embedded model was taught to; `auto` is the default when there are tools."""
    for fields in ({}, {"tool_choice": "auto"}):
        [choice] = api.chat(QUESTION, tools=[WEATHER], max_tokens=100, **fields)["choices"]
        assert choice["finish_reason"] == "tool_calls"
        [call] = choice["message"]["tool_calls"]
        assert call["function"]["name"] == "get_weather"
        assert json.loads(call["function"]["arguments"])["city"] == "Paris"
        assert not choice["message"]["content"]


def test_no_tool_is_called_when_none_is_chosen(api: Api) -> None:
    [choice] = api.chat(QUESTION, tools=[WEATHER], tool_choice="none", max_tokens=60)["choices"]
    assert not choice["message"].get("tool_calls")
    assert choice["finish_reason"] in ("stop", "length")


@pytest.mark.parametrize("tool_choice", ["auto", "required", named("get_weather"), named("get_time")], ids=str)
@pytest.mark.parametrize("question", [QUESTION, "Hello!"])
def test_streamed_and_whole_are_the_same_message(api: Api, question: str, tool_choice: Any) -> None:
    fields: Json = {"tools": TOOLS, "tool_choice": tool_choice, "max_tokens": 300}
    [choice] = api.chat(question, **fields)["choices"]
    stream = api.stream(CHAT, chat_body(question, **fields))
    whole = [call["function"] for call in choice["message"].get("tool_calls") or []]
    assert streamed_calls(stream) == [{"name": call["name"], "arguments": call["arguments"]} for call in whole]
    assert stream.text() == (choice["message"]["content"] or "")
    assert stream.finish_reason() == choice["finish_reason"]


def test_arguments_are_streamed_in_pieces(api: Api) -> None:
    body = chat_body(QUESTION, tools=TOOLS, tool_choice=named("get_weather"), max_tokens=200)

    def num_pieces() -> int:
        return sum(bool(part["delta"].get("tool_calls")) for part in api.stream(CHAT, body).choices())

    # A frontend that is behind is given several steps in one message, so one answer alone may come in fewer pieces.
    assert any(num_pieces() > 2 for _ in range(10))


def test_the_result_of_a_tool_is_part_of_the_conversation(api: Api) -> None:
    [call] = api.chat(QUESTION, tools=[WEATHER], tool_choice="auto", max_tokens=100)["choices"][0]["message"][
        "tool_calls"
    ]
    messages: list[Json] = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "Sunny, 21 degrees."},
    ]
    answer = api.chat(messages, tools=[WEATHER], max_tokens=40)
    alone = api.chat(QUESTION, tools=[WEATHER])
    assert answer["usage"]["prompt_tokens"] > alone["usage"]["prompt_tokens"]


def test_tools_are_part_of_the_prompt(api: Api) -> None:
    one, two = (api.chat(QUESTION, tools=TOOLS[:count])["usage"]["prompt_tokens"] for count in (1, 2))
    assert api.chat(QUESTION)["usage"]["prompt_tokens"] < one < two


def test_each_choice_has_calls_of_its_own(api: Api) -> None:
    fields: Json = {"tools": TOOLS, "tool_choice": "required", "n": 3, "temperature": 1.0, "seed": 3}
    ids = set()
    for choice in api.chat(QUESTION, **fields, max_tokens=400)["choices"]:
        ids.update(call["id"] for call in choice["message"]["tool_calls"])
    assert len(ids) >= 3


BAD: list[tuple[Json, str]] = [
    ({"tools": []}, "tools"),
    ({"tools": "get_weather"}, "tools"),
    ({"tools": [5]}, "tools"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tools": [{"type": "function", "function": {"description": "no name"}}]}, "tools"),
    ({"tools": [{"type": "hammer", "hammer": {}}]}, "tools"),
    ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": named("nobody")}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"tool_choice": named("get_weather")}, "tool_choice"),
]


@pytest.mark.parametrize(("fields", "param"), BAD, ids=[json.dumps(fields)[:60] for fields, _ in BAD])
def test_tools_and_choices_that_are_none_are_refused(api: Api, fields: Json, param: str) -> None:
    api.refused(CHAT, chat_body(**fields), param=param)


def test_a_schema_that_cannot_be_guaranteed_is_refused(api: Api) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "nothing"}}}
    api.refused(CHAT, chat_body(tools=[tool], tool_choice=named("f")), param="tools")


def test_a_tool_without_parameters_is_called(api: Api) -> None:
    tool = {"type": "function", "function": {"name": "ping"}}
    body = {"model": MODEL, "tools": [tool], "tool_choice": named("ping"), "max_tokens": 100}
    [choice] = api.chat("Ping!", **body)["choices"]
    assert isinstance(json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]), dict)
