"""Refusals: the status, OpenAI's error object, and the field that is at fault."""

import json
from typing import Any

import pytest

from tests.conformance.api import (
    CHAT,
    COMPLETIONS,
    MAX_MODEL_LEN,
    MODEL,
    PROMPT,
    VOCAB_SIZE,
    Api,
    chat_body,
    check_error,
)

BOTH: list[tuple[str, Any]] = [
    ("temperature", -0.1),
    ("temperature", 2.1),
    ("temperature", "hot"),
    ("temperature", [1]),
    ("top_p", 0),
    ("top_p", 1.1),
    ("top_p", -0.5),
    ("top_k", -2),
    ("top_k", 1.5),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("presence_penalty", 2.1),
    ("presence_penalty", -2.1),
    ("frequency_penalty", 2.1),
    ("frequency_penalty", -2.1),
    ("repetition_penalty", 0),
    ("repetition_penalty", -1),
    ("n", 0),
    ("n", -1),
    ("n", 16385),
    ("n", "two"),
    ("max_tokens", -1),
    ("max_tokens", "many"),
    ("max_tokens", 1.5),
    ("min_tokens", -1),
    ("min_tokens", 9),
    ("stop", ["a"] * 129),
    ("stop", ""),
    ("stop", ["a", ""]),
    ("stop", 5),
    ("stop_token_ids", [VOCAB_SIZE]),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", ["a"]),
    ("logit_bias", {"x": 1}),
    ("logit_bias", {str(VOCAB_SIZE): 1}),
    ("logit_bias", {"5": "much"}),
    ("allowed_token_ids", []),
    ("allowed_token_ids", [VOCAB_SIZE]),
    ("bad_words", [""]),
    ("seed", "x"),
    ("stream", "maybe"),
    ("stream_options", {"include_usage": True}),
    ("cache_salt", "a/b"),
    ("cache_salt", "a" * 129),
    ("priority", 2**63),
    ("truncate_prompt_tokens", -2),
]


def name(value: Any) -> str:
    return json.dumps(value)[:30]


@pytest.mark.parametrize(("field", "value"), BOTH, ids=[f"{field}={name(value)}" for field, value in BOTH])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT], ids=["completions", "chat"])
def test_a_field_out_of_its_bounds_is_named(api: Api, path: str, field: str, value: Any) -> None:
    body = chat_body() if path == CHAT else {"model": MODEL, "prompt": PROMPT, "max_tokens": 8}
    error = api.refused(path, {**body, field: value}, param=field)
    assert error["type"] in ("BadRequestError", "Bad Request", "invalid_request_error")


PROMPTS: list[Any] = [
    None,
    "",
    [],
    [[]],
    [""],
    5,
    [1.5],
    [-1],
    [VOCAB_SIZE],
    ["a", 1],
    [1, "a"],
    {"text": "a"},
    [[1], "a"],
]


@pytest.mark.parametrize("prompt", PROMPTS, ids=name)
def test_a_prompt_of_no_valid_form_is_refused(api: Api, prompt: Any) -> None:
    api.refused(COMPLETIONS, {"model": MODEL, "prompt": prompt, "max_tokens": 1}, param="prompt")


@pytest.mark.parametrize("value", [2**53, 1e300, -1e300, "long"], ids=name)
def test_the_length_penalty_of_a_beam_search_is_bounded(api: Api, value: Any) -> None:
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 3, "use_beam_search": True, "n": 2, "length_penalty": value}
    api.refused(COMPLETIONS, body, param="length_penalty")


def test_a_completion_without_a_prompt_is_refused(api: Api) -> None:
    api.refused(COMPLETIONS, {"model": MODEL, "max_tokens": 1}, param="prompt")


def test_more_than_1024_prompts_are_refused(api: Api) -> None:
    api.refused(COMPLETIONS, {"model": MODEL, "prompt": ["a"] * 1025, "max_tokens": 1}, param="prompt")


@pytest.mark.parametrize("value", [21, -2, "all"], ids=name)
def test_logprobs_of_a_completion_are_bounded(api: Api, value: Any) -> None:
    api.refused(COMPLETIONS, {"model": MODEL, "prompt": PROMPT, "logprobs": value}, param="logprobs")


@pytest.mark.parametrize("fields", [{"logprobs": True, "top_logprobs": 21}, {"logprobs": True, "top_logprobs": -2}])
def test_top_logprobs_of_a_chat_are_bounded(api: Api, fields: dict[str, Any]) -> None:
    api.refused(CHAT, chat_body(**fields), param="top_logprobs")


def test_top_logprobs_need_logprobs(api: Api) -> None:
    api.refused(CHAT, chat_body(top_logprobs=2), param="top_logprobs")


MESSAGES: dict[str, Any] = {
    "none at all": None,
    "an empty list": [],
    "a string": "Hello!",
    "a list of strings": ["Hello!"],
    "no role": [{"content": "Hello!"}],
    "a role of the wrong type": [{"role": 5, "content": "Hello!"}],
    "a user without content": [{"role": "user"}],
    "content of the wrong type": [{"role": "user", "content": 5}],
    "a part without a type": [{"role": "user", "content": [{"smell": "rose"}]}],
    "a part of an unknown type": [{"role": "user", "content": [{"type": "smell", "smell": "rose"}]}],
    "a text part without its text": [{"role": "user", "content": [{"type": "text"}]}],
}


@pytest.mark.parametrize("messages", MESSAGES.values(), ids=MESSAGES)
def test_messages_of_no_valid_form_are_refused(api: Api, messages: Any) -> None:
    api.refused(CHAT, {"model": MODEL, "messages": messages, "max_tokens": 1}, param="messages")


def test_an_image_for_a_model_that_reads_text_is_refused(api: Api) -> None:
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    api.refused(CHAT, chat_body([{"role": "user", "content": [part]}]), param="messages")


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
def test_an_unknown_model_is_not_found(api: Api, path: str) -> None:
    body = {**chat_body(), "prompt": "a", "tokens": [5], "model": "nobody"}
    if path != CHAT:
        del body["messages"]
    error = api.refused(path, body, status=404, param="model")
    assert "nobody" in error["message"]


def test_a_prompt_beyond_the_context_is_refused_with_both_numbers(api: Api) -> None:
    error = api.refused(COMPLETIONS, {"model": MODEL, "prompt": [5] * 1500, "max_tokens": 1}, param="prompt")
    assert "1500" in error["message"]
    assert str(MAX_MODEL_LEN) in error["message"]
    assert "maximum context length" in error["message"], "clients look for these words"


def test_a_conversation_beyond_the_context_is_refused(api: Api) -> None:
    error = api.refused(CHAT, chat_body("dog " * 3000), param="messages")
    assert "maximum context length" in error["message"]


BODIES: dict[str, bytes] = {
    "nothing": b"",
    "half an object": b'{"model": "pagoda-tiny", "prompt": ',
    "a list": b"[1, 2]",
    "a number": b"5",
    "null": b"null",
    "a string": b'"text"',
    "bytes that are not UTF-8": b'{"model": "pagoda-tiny", "prompt": "\xff\xfe"}',
    "half a surrogate pair": b'{"model": "pagoda-tiny", "prompt": "\\ud83d", "max_tokens": 1}',
    "deep nesting": b'{"prompt": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
    "NaN": b'{"model": "pagoda-tiny", "prompt": "a", "temperature": NaN}',
    "infinity": b'{"model": "pagoda-tiny", "prompt": "a", "temperature": Infinity}',
    "a number beyond float": b'{"model": "pagoda-tiny", "prompt": "a", "temperature": 1e999}',
    "an integer beyond 64 bits": b'{"model": "pagoda-tiny", "prompt": "a", "max_tokens": 99999999999999999999999}',
}


@pytest.mark.parametrize("content", BODIES.values(), ids=BODIES)
def test_a_body_that_is_no_valid_json_object_is_a_400(api: Api, content: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    check_error(api.http.post(COMPLETIONS, content=content, headers=headers), 400)


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_another_content_type_is_a_400(api: Api, content_type: str) -> None:
    body = json.dumps(chat_body()).encode()
    check_error(api.http.post(CHAT, content=body, headers={"Content-Type": content_type}), 400)


def test_a_charset_in_the_content_type_is_fine(api: Api) -> None:
    headers = {"Content-Type": "application/json; charset=utf-8"}
    assert api.http.post(CHAT, content=json.dumps(chat_body()).encode(), headers=headers).status_code == 200


def test_a_body_beyond_32_mebibytes_is_refused(api: Api) -> None:
    content = b'{"model": "pagoda-tiny", "prompt": "' + b"a" * (33 << 20) + b'"}'
    response = api.http.post(COMPLETIONS, content=content, headers={"Content-Type": "application/json"})
    check_error(response, 413)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
def test_another_method_is_a_405(api: Api, method: str, path: str) -> None:
    check_error(api.http.request(method, path), 405)


@pytest.mark.parametrize(
    "path", ["/v1/nothing", "/v2/chat/completions", "/nothing", "/v1/completions/", "/v1/models/nobody"]
)
def test_an_unknown_path_is_a_404(api: Api, path: str) -> None:
    check_error(api.http.get(path), 404)


def test_a_refusal_of_a_stream_is_a_status_and_no_event(api: Api) -> None:
    api.refused(CHAT, chat_body(stream=True, temperature=5), param="temperature")
