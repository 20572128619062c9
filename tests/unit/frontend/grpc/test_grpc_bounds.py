"""Lists and JSON texts of messages over gRPC: each takes its bound and not one more."""

from typing import Any

import pytest
from google.protobuf.message import Message

from pagoda.v1 import inference_pb2, types_pb2
from pagoda_common.errors import InvalidRequest
from pagoda_frontend.grpc.bounds import LISTS, MAX_MESSAGE_BYTES, check_message


def generate(**params: Any) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(sampling_params=types_pb2.SamplingParams(**params))


def of_choices(number: int) -> Message:
    output = types_pb2.StructuredOutput()
    output.choice.texts.extend(["x"] * number)
    return inference_pb2.GenerateRequest(sampling_params=types_pb2.SamplingParams(structured_output=output))


MESSAGES: list[tuple[str, int, Any]] = [
    ("stop", 128, lambda number: inference_pb2.GenerateRequest(stop=["x"] * number)),
    ("inputs", 2048, lambda number: inference_pb2.EmbedRequest(inputs=[inference_pb2.EmbedInput()] * number)),
    ("request_ids", 4096, lambda number: inference_pb2.AbortGenerationRequest(request_ids=["x"] * number)),
    ("messages", 4096, lambda number: inference_pb2.ChatRequest(messages=[inference_pb2.ChatMessage()] * number)),
    ("tools", 1024, lambda number: inference_pb2.ChatRequest(tools=[inference_pb2.Tool()] * number)),
    ("bad_words_token_ids", 128, lambda number: generate(bad_words_token_ids=[types_pb2.TokenIds()] * number)),
    ("texts", 10_000, of_choices),
    ("token_ids", 512 * 1024, lambda number: inference_pb2.DetokenizeRequest(token_ids=[5] * number)),
    ("ids", 512 * 1024, lambda number: inference_pb2.GenerateRequest(token_ids=types_pb2.TokenIds(ids=[5] * number))),
    (
        "received",
        16_384,
        lambda number: inference_pb2.GenerateRequest(
            resume_from=inference_pb2.ResumeFrom(received=[inference_pb2.ReceivedSequence()] * number)
        ),
    ),
    (
        "tool_calls",
        8192,
        lambda number: inference_pb2.ChatRequest(
            messages=[inference_pb2.ChatMessage(tool_calls=[inference_pb2.ToolCall()] * number)]
        ),
    ),
]


@pytest.mark.parametrize(("name", "bound", "make"), MESSAGES)
def test_a_list_takes_its_bound_and_not_one_more(name: str, bound: int, make: Any) -> None:
    assert LISTS[name] == bound
    check_message(make(min(bound, 16_382)) if name == "received" else make(bound))  # messages are bounded together too
    with pytest.raises(InvalidRequest, match=f"{name} must have at most {bound} entries, got {bound + 1}") as caught:
        check_message(make(bound + 1))
    assert caught.value.field == name


def test_a_message_takes_4_mib_and_16384_messages_within() -> None:
    assert MAX_MESSAGE_BYTES == 4_194_304

    def chat(num_each: int, num_more: int) -> Message:
        call = inference_pb2.ToolCall()
        messages = [inference_pb2.ChatMessage(tool_calls=[call] * num_each)] * 3
        return inference_pb2.ChatRequest(messages=[*messages, inference_pb2.ChatMessage(tool_calls=[call] * num_more)])

    # The request itself and its four messages are five of them.
    check_message(chat(5000, 16_384 - 5 - 15_000))
    with pytest.raises(InvalidRequest, match="the request has more than 16384 messages in it"):
        check_message(chat(5000, 16_384 - 5 - 15_000 + 1))


@pytest.mark.parametrize(
    "make",
    [
        lambda text: inference_pb2.ChatRequest(chat_template_kwargs_json=text),
        lambda text: inference_pb2.ChatRequest(tools=[inference_pb2.Tool(parameters_json=text)]),
        lambda text: generate(extra_args_json=text),
    ],
)
def test_json_within_is_scanned(make: Any) -> None:
    check_message(make("[" + "{}," * 100 + "{}]"))
    with pytest.raises(InvalidRequest, match="texts, lists and objects"):
        check_message(make("[" + "{}," * 65_536 + "{}]"))


def test_a_map_is_no_list_of_messages() -> None:
    check_message(generate(logit_bias=dict.fromkeys(range(300), 1.0)))
    with pytest.raises(InvalidRequest) as caught:
        check_message(generate(logit_bias=dict.fromkeys(range(LISTS["logit_bias"] + 1), 1.0)))
    assert caught.value.field == "logit_bias"
