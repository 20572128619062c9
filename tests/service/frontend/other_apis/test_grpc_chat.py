"""Conversations over pagoda.v1.Inference: the same as over HTTP."""

import asyncio
from typing import Any

import grpc
import pytest

from pagoda.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from pagoda_common.text.tokenizer import Tokenizer
from pagoda_frontend.grpc.convert_chat import chat_body_from_proto
from tests.fakes.fake_scheduler import SAMPLED_LOGPROB
from tests.service.frontend.harness import MODEL, Running, until

TEXT = "An answer of some length, with 🙂 and 日本. Stop. Here."


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load("pagoda-tiny")


def ask(text: str = "hello", **fields: Any) -> inference_pb2.ChatRequest:
    messages = [inference_pb2.ChatMessage(role="user", content=text)]
    return inference_pb2.ChatRequest(**{"messages": messages, **fields})


def stub_of(running: Running) -> Any:
    return inference_pb2_grpc.InferenceStub(running.channel)


async def test_chat_streams_what_chat_unary_and_http_give(frontend: Running, tokenizer: Tokenizer) -> None:
    frontend.fake.script = tokenizer.encode(TEXT)
    stub = stub_of(frontend)
    request = ask(request_id="mine", sampling_params=types_pb2.SamplingParams(max_tokens=200, logprobs=2))
    responses = [response async for response in stub.Chat(request)]
    assert "".join(response.content for response in responses) == TEXT
    tokens = [token for response in responses for token in response.token_ids]
    last = responses[-1]
    assert last.finish_reason == types_pb2.FINISH_REASON_STOP
    assert last.usage.num_output_tokens == len(tokens)
    assert {response.request_id for response in responses} == {"mine"}
    assert not any(response.HasField("usage") for response in responses[:-1])
    [message] = (await stub.ChatUnary(request)).messages
    assert (message.content, list(message.token_ids), message.usage) == (TEXT, tokens, last.usage)
    assert len(message.logprobs) == len(tokens)
    assert len(message.logprobs[0].top) == 2
    body: Any = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 200, "model": MODEL}
    http = (await frontend.post("/v1/chat/completions", body)).json()
    assert http["choices"][0]["message"]["content"] == message.content
    assert http["usage"]["prompt_tokens"] == message.usage.num_prompt_tokens
    submits = frontend.fake.submits
    assert submits[0].prompt_token_ids == submits[1].prompt_token_ids == submits[2].prompt_token_ids


async def test_several_messages_stop_strings_and_the_context(frontend: Running, tokenizer: Tokenizer) -> None:
    stub = stub_of(frontend)
    params = types_pb2.SamplingParams(n=2, max_tokens=5)
    messages = (await stub.ChatUnary(ask(sampling_params=params))).messages
    assert [message.index for message in messages] == [0, 1]
    assert [message.finish_reason for message in messages] == [types_pb2.FINISH_REASON_LENGTH] * 2
    whole = (await stub.ChatUnary(ask(sampling_params=types_pb2.SamplingParams(ignore_eos=True)))).messages[0]
    assert whole.usage.num_prompt_tokens + whole.usage.num_output_tokens == 512
    frontend.fake.script = tokenizer.encode(TEXT)
    stopped = (await stub.ChatUnary(ask(stop=["Stop"]))).messages[0]
    assert (stopped.content, stopped.stop_string) == (TEXT.partition("Stop")[0], "Stop")


async def test_a_conversation_is_searched_as_it_is_over_http(frontend: Running) -> None:
    stub = stub_of(frontend)
    params = types_pb2.SamplingParams(n=2, max_tokens=4)
    beams = types_pb2.BeamSearchParams(beam_width=3, length_penalty=0.5, early_stopping=types_pb2.EARLY_STOPPING_FIRST)
    request = ask(
        sampling_params=params, beam_search=beams, response_format_json='{"type": "json_object"}', model=MODEL
    )
    messages = (await stub.ChatUnary(request)).messages
    streamed = [response async for response in stub.Chat(request)]
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "model": MODEL, "n": 2}
    search = {"use_beam_search": True, "length_penalty": 0.5, "response_format": {"type": "json_object"}}
    over_http = (await frontend.post("/v1/chat/completions", {**body, **search})).json()
    shown = [choice["message"]["content"] for choice in over_http["choices"]]
    assert [message.content for message in messages] == shown
    assert ["".join(one.content for one in streamed if one.index == index) for index in range(2)] == shown
    assert [message.cumulative_logprob for message in messages] == [4 * SAMPLED_LOGPROB] * 2
    ends = {one.index: one for one in streamed if one.HasField("usage")}
    assert [ends[index].cumulative_logprob for index in range(2)] == [4 * SAMPLED_LOGPROB] * 2
    first, second, third = frontend.fake.submits
    assert (first.beam_search, second.beam_search) == (beams, beams)
    assert (third.beam_search.beam_width, third.beam_search.length_penalty) == (2, 0.5)
    assert first.sampling_params.structured_output == third.sampling_params.structured_output
    assert first.sampling_params.HasField("structured_output")
    for wrong, field in (
        ({"beam_search": types_pb2.BeamSearchParams(length_penalty=99)}, "length_penalty"),
        ({"beam_search": beams, "sampling_params": types_pb2.SamplingParams(logprobs=1)}, "logprobs"),
    ):
        with pytest.raises(grpc.aio.AioRpcError, match=field) as caught:
            await stub.ChatUnary(ask(**wrong))
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


def test_everything_that_is_set_is_in_the_body() -> None:
    params = types_pb2.SamplingParams(
        temperature=0.5,
        top_k=3,
        seed=7,
        n=2,
        stop_token_ids=[4],
        logit_bias={5: -1.0},
        logprobs=0,
        extra_args_json='{"a": 1}',
        structured_output=types_pb2.StructuredOutput(regex="a+"),
    )
    call = inference_pb2.ToolCall(id="c1", name="add", arguments='{"a": 1}')
    messages = [
        inference_pb2.ChatMessage(role="user", content="1 + 1?", name="ann"),
        inference_pb2.ChatMessage(role="assistant", reasoning="add them", tool_calls=[call]),
        inference_pb2.ChatMessage(role="tool", content="2", tool_call_id="c1"),
    ]
    tool = inference_pb2.Tool(name="add", description="adds", parameters_json='{"type": "object"}', strict=True)
    request = inference_pb2.ChatRequest(
        messages=messages,
        sampling_params=params,
        stop=["x"],
        tools=[tool],
        tool_choice_function="add",
        parallel_tool_calls=False,
        include_reasoning=False,
        reasoning_effort="low",
        chat_template_kwargs_json='{"enable_thinking": false}',
        response_format_json='{"type": "text"}',
        priority=-1,
    )
    assert chat_body_from_proto(request).model_dump(exclude_unset=True) == {
        "messages": [
            {"role": "user", "content": "1 + 1?", "name": "ann"},
            {
                "role": "assistant",
                "content": None,
                "reasoning": "add them",
                "tool_calls": [
                    {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}},
                ],
            },
            {"role": "tool", "content": "2", "tool_call_id": "c1"},
        ],
        "tools": [
            {
                "type": "function",
                "function": {
                    "name": "add",
                    "description": "adds",
                    "parameters": {"type": "object"},
                    "strict": True,
                },
            }
        ],
        "tool_choice": {"type": "function", "function": {"name": "add"}},
        "temperature": 0.5,
        "top_k": 3,
        "seed": 7,
        "n": 2,
        "stop": ["x"],
        "stop_token_ids": [4],
        "logit_bias": {"5": -1.0},
        "logprobs": True,
        "top_logprobs": 0,
        "vllm_xargs": {"a": 1},
        "structured_outputs": {
            "regex": "a+",
            "disable_any_whitespace": False,
            "disable_additional_properties": False,
        },
        "parallel_tool_calls": False,
        "include_reasoning": False,
        "reasoning_effort": "low",
        "chat_template_kwargs": {"enable_thinking": False},
        "response_format": {"type": "text"},
        "priority": -1,
    }


BAD: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": [inference_pb2.ChatMessage(role="")]}, "messages"),
    ({"text": "word " * 2000}, "messages"),
    ({"sampling_params": types_pb2.SamplingParams(temperature=float("nan"))}, "temperature"),
    ({"sampling_params": types_pb2.SamplingParams(max_tokens=0)}, "max_tokens"),
    ({"sampling_params": types_pb2.SamplingParams(logprobs=21)}, "logprobs"),
    ({"sampling_params": types_pb2.SamplingParams(extra_args_json="[]")}, "extra_args_json"),
    ({"sampling_params": types_pb2.SamplingParams(structured_output=types_pb2.StructuredOutput())}, "structured"),
    ({"sampling_params": types_pb2.SamplingParams(bad_words_token_ids=[types_pb2.TokenIds(ids=[1])])}, "bad_words"),
    ({"tools": [inference_pb2.Tool(name="x", parameters_json="{")]}, "tools"),
    ({"chat_template_kwargs_json": "1"}, "chat_template_kwargs_json"),
    ({"response_format_json": '{"type": "poem"}'}, "response_format_json"),
    ({"stop": [""]}, "stop"),
    ({"tool_choice": 9}, "tool_choice"),
    ({"tool_choice": inference_pb2.TOOL_CHOICE_REQUIRED}, "tool_choice"),
    ({"request_id": "x" * 129}, "request_id"),
]


async def test_bad_requests_are_invalid_argument_and_name_the_field(frontend: Running) -> None:
    stub = stub_of(frontend)
    for fields, name in BAD:
        for call in (stub.ChatUnary, lambda request: stub.Chat(request).read()):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(ask(**fields))
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT, fields
            trailers = dict(caught.value.trailing_metadata() or ())
            assert name.encode() in trailers["grpc-status-details-bin"], fields
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.ChatUnary(ask(model="another"))
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND
    assert not frontend.fake.submits


async def test_a_search_without_n_is_as_wide_as_one(frontend: Running) -> None:
    params = types_pb2.SamplingParams(max_tokens=3)
    request = ask(sampling_params=params, beam_search=types_pb2.BeamSearchParams())
    assert len((await stub_of(frontend).ChatUnary(request)).messages) == 1
    assert frontend.fake.submits[-1].beam_search.beam_width == 1


async def test_a_cancelled_chat_ends_its_request_and_so_does_a_deadline(frontend: Running) -> None:
    frontend.fake.step_s = 0.005
    params = types_pb2.SamplingParams(ignore_eos=True)
    call = stub_of(frontend).Chat(ask(sampling_params=params))
    await call.read()
    call.cancel()
    await until(lambda: len(frontend.fake.aborted) == 1)
    frontend.fake.is_paused = True
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub_of(frontend).ChatUnary(ask(), timeout=0.3)
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    await until(lambda: frontend.server.serving.num_open == 0)


async def test_abort_ends_a_chat(frontend: Running) -> None:
    frontend.fake.step_s = 0.005
    stub = stub_of(frontend)
    call = stub.Chat(ask(request_id="mine", sampling_params=types_pb2.SamplingParams(ignore_eos=True)))
    responses = aiter(call)
    await anext(responses)
    await stub.Abort(inference_pb2.AbortGenerationRequest(request_ids=["mine"]))
    async with asyncio.timeout(240):
        last = [response async for response in responses][-1]
    assert last.finish_reason == types_pb2.FINISH_REASON_ABORT


async def test_a_conversation_is_tokenized_as_it_is_answered(frontend: Running, tokenizer: Tokenizer) -> None:
    stub = stub_of(frontend)
    messages = [inference_pb2.ChatMessage(role="user", content="hello")]
    answer = await stub.Tokenize(inference_pb2.TokenizeRequest(messages=messages, return_token_strs=True))
    chat = await stub.ChatUnary(ask())
    assert chat.messages[0].usage.num_prompt_tokens == len(answer.token_ids)
    assert answer.max_model_len == 512
    assert "hello" in "".join(answer.token_strs)
    http = await frontend.post("/tokenize", {"messages": [{"role": "user", "content": "hello"}]})
    assert http.json()["tokens"] == list(answer.token_ids)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Tokenize(inference_pb2.TokenizeRequest(messages=messages, text="x"))
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
