"""Tools end to end with the embedded model: what must be called is called, with arguments that match the schema."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import jsonschema
import openai
import pytest

from tests.process.stack import Stack

MODEL = "pagoda-tiny"
MESSAGES: list[Any] = [{"role": "user", "content": "What is the weather in Rome?"}]
ARGUMENTS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["C", "F"]}},
        "required": ["city", "unit"],
    },
    "now": {},
    "plan_trip": {
        "type": "object",
        "properties": {
            "stops": {"type": "array", "items": {"$ref": "#/$defs/Stop"}, "minItems": 1, "maxItems": 2},
            "note": {"anyOf": [{"type": "string", "maxLength": 10}, {"type": "null"}]},
        },
        "required": ["stops", "note"],
        "additionalProperties": False,
        "$defs": {
            "Stop": {
                "type": "object",
                "properties": {"place": {"type": "string", "maxLength": 10}, "days": {"type": "integer", "maximum": 9}},
                "required": ["place", "days"],
            }
        },
    },
    "set.level-1": {
        "type": "object",
        "properties": {"level": {"type": "integer", "minimum": 1, "maximum": 5}, "is_on": {"type": "boolean"}},
        "required": ["level", "is_on"],
    },
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in ARGUMENTS.items()
]


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    stack = Stack("--disable-uvicorn-access-log")
    try:
        stack.wait_ready()
        yield stack
    finally:
        stack.end()


@pytest.fixture
async def client(stack: Stack) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none", timeout=180, max_retries=0) as client:
        yield client


async def whole(client: openai.AsyncOpenAI, **body: Any) -> tuple[list[tuple[str, str]], str | None, str]:
    """Calls, content and finish reason of a single response."""
    answer = await client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=400, **body)
    [choice] = answer.choices
    calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]
    return calls, choice.message.content or "", choice.finish_reason


async def streamed(client: openai.AsyncOpenAI, **body: Any) -> tuple[list[tuple[str, str]], str | None, str]:
    """The same from a stream."""
    calls: list[list[str]] = []
    content, finish_reason = "", ""
    stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=400, stream=True, **body)
    async for chunk in stream:
        [choice] = chunk.choices
        content += choice.delta.content or ""
        finish_reason = choice.finish_reason or finish_reason
        for call in choice.delta.tool_calls or ():
            if call.id is not None:
                calls.append([call.function.name, ""])
            calls[call.index][1] += call.function.arguments
    return [(name, arguments) for name, arguments in calls], content, finish_reason


def check(calls: list[tuple[str, str]]) -> None:
    for name, arguments in calls:
        jsonschema.validate(json.loads(arguments), ARGUMENTS[name])


@pytest.mark.parametrize("name", ARGUMENTS)
async def test_a_named_tool_is_called_with_arguments_that_match(client: openai.AsyncOpenAI, name: str) -> None:
    choice = {"type": "function", "function": {"name": name}}
    bodies = [{"tools": TOOLS, "tool_choice": choice, "seed": seed, "temperature": 1.5} for seed in range(4)]
    messages = await asyncio.gather(*(whole(client, **body) for body in bodies))
    for calls, content, finish_reason in messages:
        assert [called for called, _ in calls] == [name]
        check(calls)
        assert (content, finish_reason) == ("", "stop")
    assert await asyncio.gather(*(streamed(client, **body) for body in bodies)) == messages


async def test_required_tools_are_called_whatever_the_temperature(client: openai.AsyncOpenAI) -> None:
    bodies = [
        {
            "tools": TOOLS,
            "tool_choice": "required",
            "parallel_tool_calls": False,
            "seed": seed,
            "temperature": 0.5 * (seed % 5),
        }
        for seed in range(10)
    ]
    messages = await asyncio.gather(*(whole(client, **body) for body in bodies))
    for calls, content, finish_reason in messages:
        assert len(calls) == 1
        check(calls)
        assert (content, finish_reason) == ("", "tool_calls")
    assert await asyncio.gather(*(streamed(client, **body) for body in bodies)) == messages


async def test_the_model_calls_a_tool_by_itself_and_answers_with_its_result(client: openai.AsyncOpenAI) -> None:
    body: dict[str, Any] = {"tools": TOOLS[:1], "temperature": 0}
    calls, _, finish_reason = await whole(client, **body)
    assert [name for name, _ in calls] == ["get_weather"]
    assert finish_reason == "tool_calls"
    assert await streamed(client, **body) == (calls, "", finish_reason)
    call = {"id": "call_1", "type": "function", "function": {"name": calls[0][0], "arguments": calls[0][1]}}
    messages: list[Any] = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    answer = await client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS[:1], max_tokens=50)
    assert answer.usage is not None
    assert answer.usage.completion_tokens > 0
