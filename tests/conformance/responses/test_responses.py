"""The Responses API with OpenAI's own client."""

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pydantic
import pytest

from tests.conformance.api import API_KEYS, MODEL, QUESTION
from tests.process.stack import Stack

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "hours": {"type": "integer", "minimum": 0, "maximum": 24},
    },
    "required": ["city", "hours"],
    "additionalProperties": False,
}
TOOLS: Any = [{"type": "function", "name": "get_time", "parameters": PARAMETERS, "strict": True}]
NAMED: Any = {"type": "function", "name": "get_time"}


class Pet(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=20)
    legs: int = pydantic.Field(ge=0, le=9)


@pytest.fixture(scope="module")
def client(stack: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key=API_KEYS[0], max_retries=0, timeout=240) as client:
        yield client


def test_it_says_what_chat_completions_says(client: openai.OpenAI) -> None:
    response = client.responses.create(model=MODEL, input=QUESTION, temperature=0, max_output_tokens=24)
    chat = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": QUESTION}], temperature=0, max_tokens=24
    )
    assert response.output_text == chat.choices[0].message.content
    assert response.usage is not None
    assert chat.usage is not None
    assert response.usage.input_tokens == chat.usage.prompt_tokens
    assert response.usage.output_tokens == chat.usage.completion_tokens
    stream = client.responses.create(model=MODEL, input=QUESTION, temperature=0, max_output_tokens=24, stream=True)
    events: list[Any] = list(stream)
    assert (
        "".join(event.delta for event in events if event.type == "response.output_text.delta") == response.output_text
    )
    assert events[-1].type == f"response.{response.status}"
    assert client.responses.retrieve(response.id).output_text == response.output_text


def test_a_conversation_goes_on(client: openai.OpenAI) -> None:
    first = client.responses.create(model=MODEL, input=QUESTION, temperature=0, max_output_tokens=16)
    second = client.responses.create(
        model=MODEL, input="Go on.", previous_response_id=first.id, temperature=0, max_output_tokens=16
    )
    turns: Any = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "Go on."},
    ]
    assert client.responses.create(model=MODEL, input=turns, temperature=0, max_output_tokens=16).output_text == (
        second.output_text
    )
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)


def test_a_named_function_is_called_with_arguments_of_its_schema(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "input": "What time is it in Paris?", "temperature": 0}
    response = client.responses.create(**asked, tools=TOOLS, tool_choice=NAMED, max_output_tokens=200)
    [call] = [item for item in response.output if item.type == "function_call"]
    assert call.name == "get_time"
    jsonschema.validate(json.loads(call.arguments), PARAMETERS)
    stream = client.responses.create(**asked, tools=TOOLS, tool_choice=NAMED, max_output_tokens=200, stream=True)
    events: list[Any] = list(stream)
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == call.arguments
    outputs: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "noon"}]
    answer = client.responses.create(
        model=MODEL, input=outputs, previous_response_id=response.id, tools=TOOLS, max_output_tokens=8
    )
    assert answer.usage is not None
    assert response.usage is not None
    assert answer.usage.input_tokens > response.usage.total_tokens


def test_parse_gives_the_model_that_was_asked_for(client: openai.OpenAI) -> None:
    response = client.responses.parse(
        model=MODEL, input="A pet, please.", text_format=Pet, temperature=1, max_output_tokens=200
    )
    assert isinstance(response.output_parsed, Pet)


def test_background(client: openai.OpenAI) -> None:
    response = client.responses.create(model=MODEL, input=QUESTION, background=True, max_output_tokens=400)
    assert client.responses.cancel(response.id).status in ("cancelled", "completed", "incomplete")
