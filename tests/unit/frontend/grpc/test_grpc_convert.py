"""Messages of pagoda.v1.Inference: every field that the frontend reads or writes, with values besides the defaults."""

from typing import Any

import pytest
from google.protobuf.message import Message

from pagoda.v1 import inference_pb2, types_pb2
from pagoda_common.errors import InvalidRequest
from pagoda_common.params.outputs import HypothesisLogprobs, SequenceDelta, TokenLogprobs
from pagoda_common.params.sampling_params import SamplingParams
from pagoda_frontend.conversation.message import CollectedMessage, MessageDelta, ToolCall, ToolCallDelta
from pagoda_frontend.grpc.convert import delta_to_proto, finish_number, sampling_params_of, sequence_to_proto
from pagoda_frontend.grpc.convert_chat import (
    chat_body_from_proto,
    message_delta_to_proto,
    message_to_proto,
    tokenize_body_from_proto,
)
from pagoda_frontend.requests.params import SamplingDefaults
from pagoda_frontend.requests.run import CollectedSequence

ENTRY = TokenLogprobs(token_ids=[7, 8, 9], logprobs=[-0.5, -1.0, -2.0], sampled_rank=3)
USAGE = inference_pb2.Usage(num_prompt_tokens=11, num_output_tokens=5, num_cached_tokens=4)
HYPOTHESIS = HypothesisLogprobs(cumulative_logprob=-3.5, logprobs=[-3.5], ranks=[1])


def unset(message: Message) -> set[str]:
    """Fields of `message` that are not there."""
    return {field.name for field in message.DESCRIPTOR.fields} - {field.name for field, _ in message.ListFields()}


def last_delta(**fields: Any) -> SequenceDelta:
    return SequenceDelta(
        index=2,
        text="abc",
        token_ids=[7],
        offset=4,
        logprobs=[ENTRY],
        finish_reason="stop",
        num_output_tokens=5,
        num_cached_tokens=4,
        prompt_logprobs=[None, ENTRY],
        hypothesis=HYPOTHESIS,
        **fields,
    )


def check_logprobs(shown: inference_pb2.TokenLogprobs) -> None:
    assert (shown.logprob, shown.rank) == (-0.5, 3)
    assert [(top.token_id, top.logprob) for top in shown.top] == [(8, -1.0), (9, -2.0)]


def test_the_last_message_of_a_sequence_has_every_field() -> None:
    shown = delta_to_proto(last_delta(stop_reason="Stop."), request_id="a", num_prompt_tokens=11)
    assert unset(shown) == {"stop_token_id"}  # the other one of a oneof
    assert (shown.request_id, shown.index, shown.text, list(shown.token_ids), shown.offset) == ("a", 2, "abc", [7], 4)
    assert (shown.finish_reason, shown.stop_string) == (types_pb2.FINISH_REASON_STOP, "Stop.")
    assert (shown.usage, shown.cumulative_logprob) == (USAGE, -3.5)
    check_logprobs(shown.logprobs[0])
    [prompt] = shown.prompt_logprobs  # the first token has none
    check_logprobs(prompt)


def test_a_stop_token_of_id_0_is_told_from_none() -> None:
    shown = delta_to_proto(last_delta(stop_reason=0), request_id="a", num_prompt_tokens=11)
    assert shown.WhichOneof("stop_reason") == "stop_token_id"
    ended = delta_to_proto(last_delta(), request_id="a", num_prompt_tokens=11)
    assert ended.WhichOneof("stop_reason") is None


def test_a_message_before_the_last_has_no_end() -> None:
    delta = SequenceDelta(index=1, text="a", token_ids=[7], offset=3, num_output_tokens=4)
    shown = delta_to_proto(delta, request_id="a", num_prompt_tokens=11)
    assert {"usage", "finish_reason", "stop_string", "stop_token_id", "cumulative_logprob"} <= unset(shown)


def test_a_whole_sequence_has_every_field_but_the_offset() -> None:
    sequence = CollectedSequence(
        index=2,
        parts=["ab", "c"],
        token_ids=[7],
        logprobs=[ENTRY],
        finish_reason="length",
        stop_reason=9,
        num_output_tokens=5,
        num_cached_tokens=4,
        prompt_logprobs=[None, ENTRY],
        hypothesis=HYPOTHESIS,
    )
    shown = sequence_to_proto(sequence, request_id="a", num_prompt_tokens=11)
    assert unset(shown) == {"offset", "stop_string"}
    assert (shown.request_id, shown.index, shown.text, list(shown.token_ids)) == ("a", 2, "abc", [7])
    assert (shown.finish_reason, shown.stop_token_id, shown.usage) == (types_pb2.FINISH_REASON_LENGTH, 9, USAGE)
    check_logprobs(shown.logprobs[0])


def test_the_last_delta_of_a_message_has_every_field() -> None:
    delta = MessageDelta(
        index=2,
        reasoning="Hm.",
        content="Yes.",
        tool_calls=[ToolCallDelta(index=1, id="call", name="f", arguments="{}")],
        source=last_delta(),
        finish_reason="tool_calls",
        stop_reason="Stop.",
        token_ids=[7],
        logprobs=[ENTRY],
    )
    shown = message_delta_to_proto(delta, request_id="a", offset=4, usage=USAGE)
    assert unset(shown) == {"stop_token_id"}
    assert (shown.request_id, shown.index, shown.reasoning, shown.content) == ("a", 2, "Hm.", "Yes.")
    assert (list(shown.token_ids), shown.offset, shown.usage) == ([7], 4, USAGE)
    assert (shown.finish_reason, shown.stop_string) == (types_pb2.FINISH_REASON_TOOL_CALLS, "Stop.")
    [call] = shown.tool_calls
    assert (call.index, call.id, call.name, call.arguments) == (1, "call", "f", "{}")


def test_a_whole_message_has_every_field_but_the_offset() -> None:
    calls = [ToolCall(id="c0", name="f", arguments="{}"), ToolCall(id="c1", name="g", arguments="[]")]
    message = CollectedMessage(2, "Hm.", "Yes.", calls, "tool_calls", 0, [7], [ENTRY], HYPOTHESIS)
    shown = message_to_proto(message, request_id="a", usage=USAGE)
    assert unset(shown) == {"offset", "stop_string"}
    assert [(call.index, call.id, call.name) for call in shown.tool_calls] == [(0, "c0", "f"), (1, "c1", "g")]
    assert (shown.content, shown.cumulative_logprob) == ("Yes.", -3.5)


MESSAGE = inference_pb2.ChatMessage(
    role="assistant",
    content="x",
    tool_calls=[inference_pb2.ToolCall(id="c", name="f", arguments="{}")],
    tool_call_id="d",
    reasoning="r",
    name="n",
)
TOOL = inference_pb2.Tool(name="f", description="d", parameters_json='{"type": "object"}', strict=False)
ELSEWHERE = {"request_id", "resume_from", "beam_search", "tool_choice"}
"""Fields of a ChatRequest that its servicer reads itself, and the other one of a oneof."""


def test_a_chat_request_s_fields_are_all_in_the_body() -> None:
    given: dict[str, Any] = {
        "stop": ["s"],
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "bad_words": ["w"],
        "model": "m",
        "priority": -3,
        "cache_salt": "salt",
        "parallel_tool_calls": False,
        "include_reasoning": False,
        "reasoning_effort": "low",
        "add_generation_prompt": False,
        "continue_final_message": True,
        "thinking_token_budget": 9,
    }
    request = inference_pb2.ChatRequest(
        messages=[MESSAGE],
        sampling_params=types_pb2.SamplingParams(min_p=0.5),
        tools=[TOOL],
        tool_choice_function="f",
        chat_template_kwargs_json='{"a": 1}',
        response_format_json='{"type": "text"}',
        **given,
    )
    assert unset(request) == ELSEWHERE
    body = chat_body_from_proto(request).model_dump(exclude_none=True)
    assert {name: body[name] for name in given} == given
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    told = {"role": "assistant", "content": "x", "tool_call_id": "d", "reasoning": "r", "name": "n"}
    assert body["messages"] == [told | {"tool_calls": [call]}]
    function = {"name": "f", "description": "d", "parameters": {"type": "object"}, "strict": False}
    assert body["tools"] == [{"type": "function", "function": function}]
    assert body["tool_choice"] == {"type": "function", "function": {"name": "f"}}
    assert (body["chat_template_kwargs"], body["response_format"], body["min_p"]) == ({"a": 1}, {"type": "text"}, 0.5)


def test_a_tokenize_request_s_fields_are_all_in_the_body() -> None:
    request = inference_pb2.TokenizeRequest(
        messages=[MESSAGE],
        tools=[TOOL],
        add_special_tokens=True,
        add_generation_prompt=False,
        chat_template_kwargs_json='{"a": 1}',
        return_token_strs=True,
        model="m",
    )
    assert unset(request) == {"text"}
    body = tokenize_body_from_proto(request)
    assert (body.add_special_tokens, body.add_generation_prompt, body.return_token_strs) == (True, False, True)
    assert (body.model, body.chat_template_kwargs, body.prompt) == ("m", {"a": 1}, None)
    assert body.messages is not None
    assert body.tools is not None
    assert tokenize_body_from_proto(inference_pb2.TokenizeRequest(text="t")).prompt == "t"


def params_of(defaults: SamplingDefaults | None = None, **fields: Any) -> SamplingParams:
    given = defaults or SamplingDefaults(top_k=9, temperature=0.5)
    request = inference_pb2.GenerateRequest(**fields)
    return sampling_params_of(request, defaults=given, vocab_size=100, max_logprobs=5)


def test_what_a_call_leaves_out_is_the_model_s_or_the_contract_s() -> None:
    plain = params_of(text="x")
    assert (plain.max_tokens, plain.top_k, plain.temperature) == (16, 9, 0.5)
    assert (plain.skip_special_tokens, plain.include_stop_str_in_output, plain.stop) == (True, False, [])
    assert params_of(chat=inference_pb2.ChatPrompt()).max_tokens is None, "as much as there is room for"
    told = params_of(
        text="x",
        stop=["a", "b"],
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        sampling_params=types_pb2.SamplingParams(max_tokens=7, top_k=3),
    )
    assert (told.max_tokens, told.top_k, told.temperature, told.stop) == (7, 3, 0.5, ["a", "b"])
    assert (told.skip_special_tokens, told.include_stop_str_in_output) == (False, True)
    assert params_of(text="x", skip_special_tokens=True).skip_special_tokens


@pytest.mark.parametrize(("asked", "bound", "expected"), [(7, 5, 5), (5, 7, 5), (None, 5, 5), (None, 20, 16)])
def test_the_model_bounds_an_output(asked: int | None, bound: int, expected: int) -> None:
    defaults = SamplingDefaults(max_new_tokens=bound)
    given = types_pb2.SamplingParams() if asked is None else types_pb2.SamplingParams(max_tokens=asked)
    assert params_of(defaults, text="x", sampling_params=given).max_tokens == expected
    assert params_of(defaults, chat=inference_pb2.ChatPrompt()).max_tokens == bound


def test_a_beam_search_takes_no_chances() -> None:
    given = types_pb2.SamplingParams(temperature=0.7, top_k=3, min_p=0.5, max_tokens=7)
    found = params_of(text="x", sampling_params=given, beam_search=types_pb2.BeamSearchParams(beam_width=2))
    none = SamplingParams()
    assert (found.top_k, found.min_p, found.max_tokens) == (none.top_k, none.min_p, 7)
    assert (given.top_k, given.min_p) == (3, 0.5), "the message stays as it was"


def test_parameters_over_grpc_have_bounds() -> None:
    for given, field in (
        (types_pb2.SamplingParams(stop_token_ids=[100]), "stop_token_ids"),
        (types_pb2.SamplingParams(logprobs=6), "logprobs"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            params_of(text="x", sampling_params=given)
        assert caught.value.field == field


@pytest.mark.parametrize(
    ("reason", "number"),
    [
        (None, types_pb2.FINISH_REASON_UNSPECIFIED),
        ("stop", types_pb2.FINISH_REASON_STOP),
        ("length", types_pb2.FINISH_REASON_LENGTH),
        ("abort", types_pb2.FINISH_REASON_ABORT),
        ("tool_calls", types_pb2.FINISH_REASON_TOOL_CALLS),
    ],
)
def test_why_it_ended_is_a_number(reason: Any, number: types_pb2.FinishReason) -> None:
    assert finish_number(reason) == number
