"""Tools and reasoning through Responses, Messages and gRPC: what chat completions show, in their own shapes."""

import json
from typing import Any

import anthropic
import pydantic
import pytest

from pagoda.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from pagoda_common.engine.convert import token_ids_from_bytes
from pagoda_common.text.tokenizer import Tokenizer
from tests.service.frontend.harness import MODEL, Running, running_frontend

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
RESPONSES_TOOLS: Any = [
    {"type": "function", "name": "weather", "parameters": CITY, "strict": False},
    {"type": "function", "name": "now", "description": "the time", "parameters": None, "strict": False},
]
MESSAGES_TOOLS: Any = [
    {"name": "weather", "input_schema": CITY},
    {"name": "now", "description": "the time", "input_schema": {"type": "object"}},
]
CALLS = (
    'I look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome 🙂"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
THOUGHT = "<think>\nRome is hot.\n</think>\n\nHot."
ARGUMENTS = [{"city": "Rome 🙂"}, {}]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load("pagoda-tiny")


def last_prompt(running: Running, tokenizer: Tokenizer) -> str:
    ids = token_ids_from_bytes(running.fake.submits[-1].prompt_token_ids)
    return tokenizer.decode(ids, skip_special_tokens=False)


async def test_responses_call_functions_and_take_their_outputs(frontend: Running, tokenizer: Tokenizer) -> None:
    frontend.fake.script = tokenizer.encode(CALLS)
    responses = frontend.openai.responses
    response = await responses.create(model=MODEL, input="Weather?", tools=RESPONSES_TOOLS)
    assert response.status == "completed"
    message, *calls = response.output
    assert response.output_text == "I look.\n"
    assert message.type == "message"
    shown: list[Any] = [call.to_dict() for call in calls]
    assert [call["type"] for call in shown] == ["function_call"] * 2
    assert [call["name"] for call in shown] == ["weather", "now"]
    assert [json.loads(call["arguments"]) for call in shown] == ARGUMENTS
    assert [call["status"] for call in shown] == ["completed"] * 2

    stream = await responses.create(model=MODEL, input="Weather?", tools=RESPONSES_TOOLS, stream=True)
    events: list[Any] = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    added = [event for event in events if event.type == "response.output_item.added"]
    assert [event.item.type for event in added] == ["message", "function_call", "function_call"]
    assert [event.output_index for event in added] == [0, 1, 2]
    arguments = {event.item.id: "" for event in added[1:]}
    for event in events:
        if event.type == "response.function_call_arguments.delta":
            arguments[event.item_id] += event.delta
    assert [json.loads(text) for text in arguments.values()] == ARGUMENTS
    done = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert [event.arguments for event in done] == list(arguments.values())
    ended = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.to_dict() for item in ended] == [item.to_dict() for item in events[-1].response.output]

    frontend.fake.script = tokenizer.encode("It is hot.")
    outputs: Any = [
        {"type": "function_call_output", "call_id": call["call_id"], "output": output}
        for call, output in zip(shown, ("30 degrees", "noon"), strict=True)
    ]
    await responses.create(model=MODEL, input=outputs, previous_response_id=response.id, tools=RESPONSES_TOOLS)
    chained = last_prompt(frontend, tokenizer)
    question: Any = {"role": "user", "content": "Weather?"}
    await responses.create(
        model=MODEL, input=[question, *[item.to_dict() for item in response.output], *outputs], tools=RESPONSES_TOOLS
    )
    assert last_prompt(frontend, tokenizer) == chained
    calls_of_chat: Any = [
        {
            "id": call["call_id"],
            "type": "function",
            "function": {"name": call["name"], "arguments": call["arguments"]},
        }
        for call in shown
    ]
    conversation: Any = [
        question,
        {"role": "assistant", "content": "I look.\n", "tool_calls": calls_of_chat},
        *[{"role": "tool", "tool_call_id": one["call_id"], "content": one["output"]} for one in outputs],
    ]
    functions: Any = [
        {
            "type": "function",
            "function": {name: value for name, value in tool.items() if name != "type" and value is not None},
        }
        for tool in RESPONSES_TOOLS
    ]
    await frontend.openai.chat.completions.create(model=MODEL, messages=conversation, tools=functions)
    assert last_prompt(frontend, tokenizer) == chained


async def test_messages_use_tools_and_take_their_results(frontend: Running, tokenizer: Tokenizer) -> None:
    asked: Any = [{"role": "user", "content": "Weather?"}]
    url = str(frontend.http.base_url)
    async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client:
        frontend.fake.script = tokenizer.encode(CALLS)
        message = await client.messages.create(model=MODEL, messages=asked, max_tokens=200, tools=MESSAGES_TOOLS)
        assert message.stop_reason == "tool_use"
        blocks: list[Any] = [block.to_dict() for block in message.content]
        assert [block["type"] for block in blocks] == ["text", "tool_use", "tool_use"]
        assert [block["name"] for block in blocks[1:]] == ["weather", "now"]
        assert [block["input"] for block in blocks[1:]] == ARGUMENTS
        async with client.messages.stream(model=MODEL, messages=asked, max_tokens=200, tools=MESSAGES_TOOLS) as stream:
            final = await stream.get_final_message()
        assert final.stop_reason == "tool_use"
        assert [block.to_dict().get("input") for block in final.content] == [None, *ARGUMENTS]
        frontend.fake.script = tokenizer.encode("It is hot.")
        results: Any = [
            {"type": "tool_result", "tool_use_id": blocks[1]["id"], "content": [{"type": "text", "text": "30"}]},
            {"type": "tool_result", "tool_use_id": blocks[2]["id"], "content": "noon"},
            {"type": "text", "text": "So?"},
        ]
        turns: Any = [*asked, {"role": "assistant", "content": blocks}, {"role": "user", "content": results}]
        await client.messages.create(model=MODEL, messages=turns, max_tokens=20, tools=MESSAGES_TOOLS)
        prompt = last_prompt(frontend, tokenizer)
        places = [prompt.index(text) for text in ("Weather?", "I look.", "Rome", "30", "noon", "So?")]
        assert places == sorted(places)
        counted = await client.messages.count_tokens(model=MODEL, messages=turns, tools=MESSAGES_TOOLS)
        assert counted.input_tokens == len(token_ids_from_bytes(frontend.fake.submits[-1].prompt_token_ids))
        for choice in ({"type": "any"}, {"type": "tool", "name": "now", "disable_parallel_tool_use": True}):
            await client.messages.create(
                model=MODEL, messages=asked, max_tokens=20, tools=MESSAGES_TOOLS, tool_choice=choice
            )
            assert frontend.fake.submits[-1].sampling_params.HasField("structured_output")


async def test_grpc_chat_calls_tools(frontend: Running, tokenizer: Tokenizer) -> None:
    frontend.fake.script = tokenizer.encode(CALLS)
    stub: Any = inference_pb2_grpc.InferenceStub(frontend.channel)
    request = inference_pb2.ChatRequest(
        messages=[inference_pb2.ChatMessage(role="user", content="Weather?")],
        tools=[
            inference_pb2.Tool(name="weather", parameters_json=json.dumps(CITY)),
            inference_pb2.Tool(name="now", description="the time"),
        ],
    )
    [message] = (await stub.ChatUnary(request)).messages
    assert message.finish_reason == types_pb2.FINISH_REASON_TOOL_CALLS
    assert message.content == "I look.\n"
    assert [call.name for call in message.tool_calls] == ["weather", "now"]
    assert [json.loads(call.arguments) for call in message.tool_calls] == ARGUMENTS
    responses = [response async for response in stub.Chat(request)]
    assert responses[-1].finish_reason == types_pb2.FINISH_REASON_TOOL_CALLS
    texts = {0: "", 1: ""}
    for response in responses:
        for call in response.tool_calls:
            texts[call.index] += call.arguments
    assert [json.loads(text) for text in texts.values()] == ARGUMENTS


async def test_reasoning_is_an_item_a_block_and_a_field(tokenizer: Tokenizer) -> None:
    async with running_frontend(reasoning_parser="qwen3") as running:
        running.fake.script = tokenizer.encode(THOUGHT)
        response = await running.openai.responses.create(model=MODEL, input="Weather?")
        items: list[Any] = [item.to_dict() for item in response.output]
        assert [item["type"] for item in items] == ["reasoning", "message"]
        thought = items[0]["content"][0]["text"]
        assert thought.strip() == "Rome is hot."
        assert response.output_text.strip() == "Hot."
        assert response.usage is not None
        assert 0 < response.usage.output_tokens_details.reasoning_tokens < response.usage.output_tokens
        stream = await running.openai.responses.create(model=MODEL, input="Weather?", stream=True)
        events: list[Any] = [event async for event in stream]
        told = "".join(event.delta for event in events if event.type == "response.reasoning_text.delta")
        assert told == thought
        url = str(running.http.base_url)
        asked: Any = [{"role": "user", "content": "Weather?"}]
        async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client:
            message = await client.messages.create(model=MODEL, messages=asked, max_tokens=200)
            async with client.messages.stream(model=MODEL, messages=asked, max_tokens=200) as streaming:
                final = await streaming.get_final_message()
            off: Any = {"type": "disabled"}
            silent = await client.messages.create(model=MODEL, messages=asked, max_tokens=200, thinking=off)
        blocks: list[Any] = [block.to_dict() for block in message.content]
        assert [block["type"] for block in blocks] == ["thinking", "text"]
        assert blocks[0]["thinking"] == thought
        final_blocks: list[Any] = [block.to_dict() for block in final.content]
        assert [block["type"] for block in final_blocks] == ["thinking", "text"]
        assert final_blocks[0]["thinking"] == thought
        assert [block.type for block in silent.content] == ["text"]
        stub: Any = inference_pb2_grpc.InferenceStub(running.channel)
        request = inference_pb2.ChatRequest(messages=[inference_pb2.ChatMessage(role="user", content="Weather?")])
        [said] = (await stub.ChatUnary(request)).messages
        assert said.reasoning == thought
        assert said.content.strip() == "Hot."


async def test_the_clients_parse_asks_for_a_schema(frontend: Running, tokenizer: Tokenizer) -> None:
    class City(pydantic.BaseModel):
        name: str
        degrees: int

    frontend.fake.script = tokenizer.encode('{"name": "Rome", "degrees": 30}')
    response = await frontend.openai.responses.parse(model=MODEL, input="Weather?", text_format=City)
    assert response.output_parsed == City(name="Rome", degrees=30)
    constraint = frontend.fake.submits[-1].sampling_params.structured_output
    assert "degrees" in constraint.json_schema
    bad: Any = {"format": {"type": "json_schema", "name": "x", "schema": {"type": "nonsense"}}}
    refused = await frontend.post("/v1/responses", {"input": "x", "text": bad})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "text.format"
