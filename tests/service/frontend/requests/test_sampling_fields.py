"""Every field of the table of sampling fields, by every way that takes it: the engine gets the value that was sent."""

import json
from collections.abc import AsyncIterator
from dataclasses import fields
from typing import Any

import pytest
import pytest_asyncio

from pagoda.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from pagoda_common.engine.convert import sampling_params_from_proto
from pagoda_common.params.fields import EVERYWHERE, Api, SamplingField
from pagoda_common.params.sampling_params import SAMPLING_FIELDS, SamplingParams
from pagoda_common.params.structured_outputs import StructuredOutputsParams
from pagoda_frontend.grpc.convert import sampling_params_of
from pagoda_frontend.grpc.convert_chat import chat_body_from_proto
from pagoda_frontend.messages import input as messages_input
from pagoda_frontend.messages.protocol import MessagesBody
from pagoda_frontend.openai.protocol import ChatBody, CompletionBody
from pagoda_frontend.requests.params import SamplingDefaults, make_sampling_params, sampling_defaults
from pagoda_frontend.responses import input as responses_input
from pagoda_frontend.responses.protocol import ResponsesBody
from tests.service.frontend.harness import MODEL, Running, running_frontend

pytestmark = pytest.mark.asyncio(loop_scope="module")

OTHERS: dict[str, Any] = {
    "seed": 7,
    "logit_bias": {5: 2.5},
    "bad_words_token_ids": ((5, 7), (9,)),
    "structured_outputs": StructuredOutputsParams(regex="a+"),
    "extra_args": {"limit": 3},
}
"""Values of fields that have no plain kind, or bounds too wide for a rule."""
SENT: dict[str, Any] = {"logit_bias": {"5": 2.5}, "structured_outputs": {"regex": "a+"}, "truncation": "auto"}
"""What bodies say for them, by name in the body."""
WITH: dict[tuple[str, str], dict[str, Any]] = {
    ("logprobs", "chat"): {"logprobs": True},
    ("logprob_token_ids", "chat"): {"logprobs": True},
    ("logprob_token_ids", "completions"): {"logprobs": 0},
}
"""Fields that others need, by API."""
MESSAGES = [{"role": "user", "content": "hello there, how are you today?"}]
BASES: dict[Api, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": MESSAGES}),
    "completions": ("/v1/completions", {"prompt": [5, 6, 7, 8, 9]}),
    "responses": ("/v1/responses", {"input": "hello there, how are you today?"}),
    "messages": ("/v1/messages", {"messages": MESSAGES, "max_tokens": 16}),
}
IN_ENGINE = [row for row in SAMPLING_FIELDS.values() if row.proto is not None]
IN_FRONTEND = [row for row in SAMPLING_FIELDS.values() if row.proto is None and row.apis]
PLACED = {"bad_words", "truncate_prompt_tokens"}
"""Fields of the frontend that tokens of prompt or bad words are made with."""


def value_of(row: SamplingField) -> Any:
    """A value within the bounds that is not the default."""
    if row.name in OTHERS:
        return OTHERS[row.name]
    plain = {"flag": not row.default, "token_ids": (5, 7), "texts": ["zebra"]}
    return row.low + {"number": 0.5, "integer": 3}[row.kind] if row.kind in ("number", "integer") else plain[row.kind]


def body_of(row: SamplingField, api: Api) -> dict[str, Any]:
    """What `api` is sent for `row`, besides the prompt."""
    name = row.name_in(api)
    assert name is not None
    return {name: SENT.get(name, value_of(row)), **WITH.get((row.name, api), {})}


def message_of(row: SamplingField) -> types_pb2.SamplingParams:
    """The message that carries the value of `row`, written down field by field where it is not plain."""
    value = value_of(row)
    if row.name == "structured_outputs":
        return types_pb2.SamplingParams(structured_output=types_pb2.StructuredOutput(regex="a+"))
    if row.name == "extra_args":
        return types_pb2.SamplingParams(extra_args_json=json.dumps(value))
    if row.name == "bad_words_token_ids":
        return types_pb2.SamplingParams(bad_words_token_ids=[types_pb2.TokenIds(ids=ids) for ids in value])
    logprobs = {"logprobs": 0} if row.name == "logprob_token_ids" else {}
    return types_pb2.SamplingParams(**{row.proto or "": value, **logprobs})


def expected_of(row: SamplingField) -> Any:
    return getattr(SamplingParams(**{row.name: value_of(row)}), row.name)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def frontend() -> AsyncIterator[Running]:
    async with running_frontend() as running:
        yield running


def received(frontend: Running) -> SamplingParams:
    return sampling_params_from_proto(frontend.fake.submits[-1].sampling_params)


async def test_the_table_has_every_field_and_messages_no_other() -> None:
    assert list(SAMPLING_FIELDS) == [one.name for one in fields(SamplingParams)]
    known = {field.name for field in types_pb2.SamplingParams.DESCRIPTOR.fields}
    assert known == {row.proto for row in IN_ENGINE}
    for row in SAMPLING_FIELDS.values():
        if row.apis or row.proto is not None:
            assert value_of(row) != row.default


@pytest.mark.parametrize("api", EVERYWHERE)
@pytest.mark.parametrize("row", IN_ENGINE, ids=lambda row: row.name)
async def test_the_engine_gets_what_a_body_says(frontend: Running, row: SamplingField, api: Api) -> None:
    if row.name_in(api) is None:
        assert row.name in ("n", "logprobs", "prompt_logprobs", "logprob_token_ids", "bad_words_token_ids")
        return
    path, base = BASES[api]
    response = await frontend.post(path, {"model": MODEL, **base, **body_of(row, api)})
    assert response.status_code == 200, response.text
    assert getattr(received(frontend), row.name) == expected_of(row)


@pytest.mark.parametrize("row", IN_ENGINE, ids=lambda row: row.name)
async def test_the_engine_gets_what_grpc_says(frontend: Running, row: SamplingField) -> None:
    stub: Any = inference_pb2_grpc.InferenceStub(frontend.channel)
    prompt = types_pb2.TokenIds(ids=[5, 6, 7])
    await stub.GenerateUnary(inference_pb2.GenerateRequest(token_ids=prompt, sampling_params=message_of(row)))
    assert getattr(received(frontend), row.name) == expected_of(row)
    if row.name == "bad_words_token_ids":
        return  # conversations take words, and refuse it
    asked = [inference_pb2.ChatMessage(role="user", content="hello")]
    await stub.ChatUnary(inference_pb2.ChatRequest(messages=asked, sampling_params=message_of(row)))
    assert getattr(received(frontend), row.name) == expected_of(row)


@pytest.mark.parametrize("api", EVERYWHERE)
@pytest.mark.parametrize("row", [row for row in IN_FRONTEND if row.name not in PLACED], ids=lambda row: row.name)
async def test_the_frontend_samples_as_a_body_says(row: SamplingField, api: Api) -> None:
    if row.name_in(api) is None:
        assert row.name in ("detokenize", "spaces_between_special_tokens")
        return
    given = {**BASES[api][1], **body_of(row, api)}
    body: ChatBody | CompletionBody
    if api == "responses":
        body = responses_input.chat_body_of(ResponsesBody.model_validate(given), MESSAGES)
    elif api == "messages":
        body = messages_input.chat_body_of(MessagesBody.model_validate(given))
    else:
        body = (ChatBody if api == "chat" else CompletionBody).model_validate(given)
    params = make_sampling_params(body, defaults=SamplingDefaults(), logprobs=None, max_tokens=16)
    assert getattr(params, row.name) == expected_of(row)


@pytest.mark.parametrize("api", EVERYWHERE)
async def test_bad_words_and_truncation_change_tokens(frontend: Running, api: Api) -> None:
    path, base = BASES[api]
    for name in ("bad_words", "truncate_prompt_tokens"):
        row = SAMPLING_FIELDS[name]
        if row.name_in(api) is None:
            assert (name, api) == ("truncate_prompt_tokens", "messages")
            continue
        body = {"model": MODEL, **base, **body_of(row, api)}
        if name == "truncate_prompt_tokens" and api == "responses":
            body["input"] = "hello " * 600  # more than the context: refused unless it is cut
        assert (await frontend.post(path, body)).status_code == 200
        if name == "bad_words":
            assert received(frontend).bad_words_token_ids
        elif api != "responses":
            assert len(frontend.fake.submits[-1].prompt_token_ids) // 4 == value_of(row)


@pytest.mark.parametrize("name", ["stop", "skip_special_tokens", "include_stop_str_in_output", "bad_words"])
async def test_grpc_has_fields_of_the_frontend_beside_its_sampling_parameters(name: str) -> None:
    row = SAMPLING_FIELDS[name]
    chat = chat_body_from_proto(
        inference_pb2.ChatRequest(
            messages=[inference_pb2.ChatMessage(role="user", content="x")], **{name: value_of(row)}
        )
    )
    assert getattr(chat, name) == value_of(row)
    if name == "bad_words":
        return  # Generate takes bad_words_token_ids
    request = inference_pb2.GenerateRequest(text="x", **{name: value_of(row)})
    params = sampling_params_of(request, defaults=SamplingDefaults(), vocab_size=100, max_logprobs=20)
    assert getattr(params, name) == expected_of(row)


@pytest.mark.parametrize(
    "row", [row for row in SAMPLING_FIELDS.values() if row.generation_config], ids=lambda row: row.name
)
async def test_defaults_of_the_model_are_those_that_the_table_names(row: SamplingField) -> None:
    defaults = sampling_defaults(json.dumps({row.generation_config: value_of(row)}))
    body = CompletionBody.model_validate({"prompt": "x"})
    params = make_sampling_params(body, defaults=defaults, logprobs=None, max_tokens=None)
    assert getattr(params, row.name) == expected_of(row)
    request = inference_pb2.GenerateRequest(text="x")
    over_grpc = sampling_params_of(request, defaults=defaults, vocab_size=100, max_logprobs=20)
    assert getattr(over_grpc, row.name) == expected_of(row)
