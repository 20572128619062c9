"""The Messages API with Anthropic's own client."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import jsonschema
import pytest

from tests.conformance.api import API_KEYS, MODEL, QUESTION, Api
from tests.conformance.responses.test_responses import PARAMETERS
from tests.process.stack import Stack

ASKED: Any = [{"role": "user", "content": QUESTION}]
TOOLS: Any = [{"name": "get_time", "input_schema": PARAMETERS}]
SCHEMA = {**PARAMETERS, "properties": {**PARAMETERS["properties"], "city": {"enum": ["Rome", "Oslo"]}}}


@pytest.fixture(scope="module")
def client(stack: Stack) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=stack.url, api_key=API_KEYS[1], max_retries=0, timeout=240) as client:
        yield client


def test_it_says_what_chat_completions_says(client: anthropic.Anthropic, api: Api) -> None:
    greedy: dict[str, Any] = {"extra_body": {"temperature": 0}}
    message = client.messages.create(model=MODEL, messages=ASKED, max_tokens=24, **greedy)
    chat = api.chat(QUESTION, max_tokens=24)
    [block] = message.content
    assert block.type == "text"
    assert block.text == chat["choices"][0]["message"]["content"]
    usage = message.usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == chat["usage"]["prompt_tokens"]
    assert usage.output_tokens == chat["usage"]["completion_tokens"]
    assert client.messages.count_tokens(model=MODEL, messages=ASKED).input_tokens == chat["usage"]["prompt_tokens"]
    with client.messages.stream(model=MODEL, messages=ASKED, max_tokens=24, **greedy) as stream:
        assert "".join(stream.text_stream) == block.text
        assert stream.get_final_message().stop_reason == message.stop_reason


def test_a_named_tool_is_used_with_an_input_of_its_schema(client: anthropic.Anthropic) -> None:
    asked: Any = [{"role": "user", "content": "What time is it in Paris?"}]
    choice: Any = {"type": "tool", "name": "get_time"}
    message = client.messages.create(model=MODEL, messages=asked, max_tokens=200, tools=TOOLS, tool_choice=choice)
    assert message.stop_reason == "tool_use"
    [block] = message.content
    assert block.type == "tool_use"
    jsonschema.validate(block.input, PARAMETERS)
    result: Any = [{"type": "tool_result", "tool_use_id": block.id, "content": "noon"}]
    turns: Any = [*asked, {"role": "assistant", "content": [block.to_dict()]}, {"role": "user", "content": result}]
    answer = client.messages.create(model=MODEL, messages=turns, max_tokens=8, tools=TOOLS)
    assert answer.usage.output_tokens > 0
    with client.messages.stream(model=MODEL, messages=asked, max_tokens=200, tools=TOOLS, tool_choice=choice) as stream:
        [streamed] = stream.get_final_message().content
    assert streamed.type == "tool_use"
    jsonschema.validate(streamed.input, PARAMETERS)


def test_an_answer_matches_the_schema_that_was_asked_for(client: anthropic.Anthropic) -> None:
    wanted: Any = {"format": {"type": "json_schema", "schema": SCHEMA}}
    message = client.messages.create(model=MODEL, messages=ASKED, max_tokens=200, extra_body={"output_config": wanted})
    [block] = message.content
    assert block.type == "text"
    jsonschema.validate(json.loads(block.text), SCHEMA)
