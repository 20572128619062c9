"""pagoda.v1.Inference says what the HTTP API says, with statuses of gRPC."""

import json
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from pagoda.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from tests.conformance.api import API_KEYS, MODEL, PROMPT, QUESTION, VOCAB_SIZE, Api
from tests.process.stack import Stack

KEY = (("authorization", f"Bearer {API_KEYS[0]}"),)


@pytest.fixture(scope="module")
def stub(stack: Stack) -> Iterator[Any]:
    with grpc.insecure_channel(f"127.0.0.1:{stack.grpc_port}") as channel:
        yield inference_pb2_grpc.InferenceStub(channel)


def generate(text: str = PROMPT, **params: Any) -> inference_pb2.GenerateRequest:
    sampling_params = types_pb2.SamplingParams(**{"temperature": 0, "max_tokens": 8, **params})
    return inference_pb2.GenerateRequest(text=text, sampling_params=sampling_params)


def ask(**fields: Any) -> inference_pb2.ChatRequest:
    params = types_pb2.SamplingParams(temperature=0, max_tokens=300)
    messages = [inference_pb2.ChatMessage(role="user", content=fields.pop("content", QUESTION))]
    return inference_pb2.ChatRequest(messages=messages, sampling_params=params, **fields)


def status_of(call: Any, request: Any, metadata: Any = KEY, timeout: float = 120) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as caught:
        call(request, metadata=metadata, timeout=timeout)
    return caught.value


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "seed": 5, "max_tokens": 30}, {"max_tokens": 1}], ids=str)
def test_generate_says_what_a_completion_says(api: Api, stub: Any, params: dict[str, Any]) -> None:
    text = api.text(**params)
    responses = list(stub.Generate(generate(**params), metadata=KEY, timeout=240))
    assert "".join(response.text for response in responses) == text
    assert responses[-1].finish_reason == types_pb2.FINISH_REASON_LENGTH
    unary = stub.GenerateUnary(generate(**params), metadata=KEY, timeout=240)
    assert [output.text for output in unary.outputs] == [text]


def test_chat_says_what_a_chat_completion_says(api: Api, stub: Any) -> None:
    responses = list(stub.Chat(ask(), metadata=KEY, timeout=240))
    assert "".join(response.content for response in responses) == api.says(max_tokens=300)


def test_a_named_tool_is_called(stub: Any) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tool = inference_pb2.Tool(name="get_weather", parameters_json=json.dumps(schema))
    request = ask(content="What is the weather in Paris?", tools=[tool], tool_choice_function="get_weather")
    deltas = [delta for response in stub.Chat(request, metadata=KEY, timeout=240) for delta in response.tool_calls]
    assert [delta.name for delta in deltas if delta.name] == ["get_weather"]
    assert isinstance(json.loads("".join(delta.arguments for delta in deltas))["city"], str)


def test_text_to_tokens_and_back(api: Api, stub: Any) -> None:
    text = "naïve 日本 🙂"
    token_ids = list(stub.Tokenize(inference_pb2.TokenizeRequest(text=text), metadata=KEY, timeout=240).token_ids)
    assert token_ids == api.ok("/tokenize", {"model": MODEL, "prompt": text})["tokens"]
    request = inference_pb2.DetokenizeRequest(token_ids=token_ids)
    assert stub.Detokenize(request, metadata=KEY, timeout=240).text == text


def test_model_and_server_are_described(stub: Any) -> None:
    info = stub.GetModelInfo(inference_pb2.GetModelInfoRequest(), metadata=KEY, timeout=240)
    assert list(info.served_model_names) == [MODEL]
    assert stub.GetServerInfo(inference_pb2.GetServerInfoRequest(), metadata=KEY, timeout=240).version


INVALID: dict[str, tuple[dict[str, Any], str]] = {
    "temperature": ({"temperature": 3}, "temperature"),
    "top_p": ({"top_p": 1.5}, "top_p"),
    "min_p": ({"min_p": 2}, "min_p"),
    "repetition_penalty": ({"repetition_penalty": -1}, "repetition_penalty"),
    "presence_penalty": ({"presence_penalty": 3}, "presence_penalty"),
    "frequency_penalty": ({"frequency_penalty": -3}, "frequency_penalty"),
    "stop_token_ids": ({"stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids"),
    "min_tokens": ({"min_tokens": 9}, "min_tokens"),
    "logprobs": ({"logprobs": 21}, "logprobs"),
}


@pytest.mark.parametrize(("params", "field"), INVALID.values(), ids=INVALID)
def test_a_field_out_of_its_bounds_is_named_in_the_details(stub: Any, params: dict[str, Any], field: str) -> None:
    error = status_of(stub.GenerateUnary, generate(**params))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert field in error.details()
    trailing = dict(error.trailing_metadata())
    status = status_pb2.Status.FromString(trailing["grpc-status-details-bin"])
    bad = error_details_pb2.BadRequest()
    assert any(detail.Unpack(bad) for detail in status.details)
    assert field in bad.field_violations[0].field


def test_an_unknown_model_is_not_found(stub: Any) -> None:
    request = generate()
    request.model = "nobody"
    assert status_of(stub.GenerateUnary, request).code() is grpc.StatusCode.NOT_FOUND


def test_no_prompt_is_refused(stub: Any) -> None:
    request = inference_pb2.GenerateRequest(sampling_params=types_pb2.SamplingParams(max_tokens=1))
    assert status_of(stub.GenerateUnary, request).code() is grpc.StatusCode.INVALID_ARGUMENT


def test_a_prompt_beyond_the_context_is_refused(stub: Any) -> None:
    error = status_of(stub.GenerateUnary, generate("dog " * 3000))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "1024" in error.details()


@pytest.mark.parametrize("metadata", [(), (("authorization", "Bearer sk-other"),)], ids=["none", "another"])
def test_the_service_needs_a_key(stub: Any, metadata: Any) -> None:
    assert status_of(stub.GenerateUnary, generate(), metadata).code() is grpc.StatusCode.UNAUTHENTICATED


def test_a_deadline_is_honoured(api: Api, stub: Any) -> None:
    error = status_of(stub.GenerateUnary, generate(max_tokens=1000, ignore_eos=True), timeout=0.05)
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert api.text() == api.text(), "the engine serves on"


def test_an_aborted_request_ends(stub: Any) -> None:
    request = generate(max_tokens=1000, ignore_eos=True)
    request.request_id = "to-be-aborted"
    stream = stub.Generate(request, metadata=KEY, timeout=240)
    next(stream)
    stub.Abort(inference_pb2.AbortGenerationRequest(request_ids=["to-be-aborted"]), metadata=KEY, timeout=240)
    last = list(stream)[-1]
    assert last.finish_reason == types_pb2.FINISH_REASON_ABORT
