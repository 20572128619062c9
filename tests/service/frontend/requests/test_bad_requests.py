"""Every way to ask wrongly gets a 4xx in OpenAI's shape that names the field, and the next good request works."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.service.frontend.harness import MODEL, Running, running_frontend

pytestmark = pytest.mark.asyncio(loop_scope="module")

USER = [{"role": "user", "content": "hello"}]
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared() -> AsyncIterator[Running]:
    async with running_frontend(max_request_body_bytes=12 * 1024**2) as running:
        yield running


def check_error(response: Any, *, status: int, param: str | None = None) -> None:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == status
    assert error["message"]
    assert len(error["message"]) < 3000
    assert "Traceback" not in error["message"]
    assert "/work" not in error["message"]
    if param is not None:
        assert error["param"] == param, error


async def check_alive(running: Running) -> None:
    answer = await running.complete(max_tokens=2)
    assert answer["choices"][0]["finish_reason"] == "length"


BAD_COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [""]}, "prompt"),
    ({"prompt": 7}, "prompt"),
    ({"prompt": {"text": "x"}}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": [1.5]}, "prompt"),
    ({"prompt": [True, False]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [3072]}, "prompt"),
    ({"prompt": [2**40]}, "prompt"),
    ({"prompt": [5] * 512}, "prompt"),
    ({"prompt": [5] * 100_000}, "prompt"),
    ({"prompt": "word " * 2000}, "prompt"),
    ({"prompt": ["x"] * 1025}, "prompt"),
    ({"model": 5}, "model"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -5}, "max_tokens"),
    ({"max_tokens": "ten"}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": [1]}, "max_tokens"),
    ({"max_tokens": 1e30}, "max_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.5}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": {}}, "temperature"),
    ({"temperature": [1]}, "temperature"),
    ({"temperature": float("nan")}, "temperature"),
    ({"temperature": float("inf")}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_p": float("nan")}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": -0.1}, "min_p"),
    ({"min_p": 1.1}, "min_p"),
    ({"n": 0}, "n"),
    ({"n": -1}, "n"),
    ({"n": 100_000}, "n"),
    ({"n": "two"}, "n"),
    ({"n": 2, "temperature": 0}, "n"),
    ({"n": 16384, "prompt": ["a", "b"]}, "n"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": float("-inf")}, "repetition_penalty"),
    ({"seed": 1.5}, "seed"),
    ({"seed": "x"}, "seed"),
    ({"seed": 2**70}, "seed"),
    ({"stop": ["a"] * 129}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop"),
    ({"stop": 5}, "stop"),
    ({"stop": [5]}, "stop"),
    ({"stop_token_ids": "x"}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": [99999]}, "stop_token_ids"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 20, "max_tokens": 10}, "min_tokens"),
    ({"logprobs": -2}, "logprobs"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": "all"}, "logprobs"),
    ({"logprobs": -1}, "logprobs"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"5": "x"}}, "logit_bias"),
    ({"logit_bias": {"99999": 1}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [99999]}, "allowed_token_ids"),
    ({"bad_words": [""]}, "bad_words"),
    ({"stream": "maybe"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": "x"}}, "stream_options"),
    ({"stream": True, "stream_options": 5}, "stream_options"),
    ({"echo": "x"}, "echo"),
    ({"suffix": "end"}, "suffix"),
    ({"n": 2, "best_of": 1}, "best_of"),
    ({"best_of": 21}, "best_of"),
    ({"n": 0, "best_of": 2}, "n"),
    ({"best_of": 3, "stream": True}, "best_of"),
    ({"best_of": 3, "temperature": 0}, "best_of"),
    ({"use_beam_search": 2}, "use_beam_search"),
    ({"use_beam_search": True, "n": 2, "logprobs": 1}, "logprobs"),
    ({"use_beam_search": True, "min_tokens": 2}, "min_tokens"),
    ({"use_beam_search": True, "presence_penalty": 1}, "presence_penalty"),
    ({"use_beam_search": True, "repetition_penalty": 1.1}, "repetition_penalty"),
    ({"use_beam_search": True, "early_stopping": "soon"}, "early_stopping"),
    ({"use_beam_search": True, "length_penalty": "long"}, "length_penalty"),
    ({"timeout": 0}, "timeout"),
    ({"timeout": "soon"}, "timeout"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
    ({"priority": 2**80}, "priority"),
    ({"priority": "high"}, "priority"),
    ({"cache_salt": "x" * 200}, "cache_salt"),
    ({"cache_salt": 5}, "cache_salt"),
]

BAD_CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hello"}, "messages"),
    ({"messages": ["hello"]}, "messages"),
    ({"messages": [{"content": "hello"}]}, "messages"),
    ({"messages": [{"role": "", "content": "hello"}]}, "messages"),
    ({"messages": [{"role": 5, "content": "hello"}]}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": "word " * 2000}]}, "messages"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_completion_tokens": "x"}, "max_completion_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -5}, "top_logprobs"),
    ({"logprobs": 2}, "logprobs"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": {"type": "nonsense"}}, "response_format"),
    ({"response_format": "json"}, "response_format"),
    ({"tools": [{"type": "function", "function": {"name": "two words"}}]}, "tools"),
    ({"tools": []}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"chat_template": "{{ messages }}"}, "chat_template"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": 5}, "chat_template_kwargs"),
]


def _name(case: Any) -> str | None:
    return str(case)[:60] if isinstance(case, dict) else None


@pytest.mark.parametrize(("fields", "param"), BAD_COMPLETIONS, ids=_name)
async def test_a_bad_completion_is_a_400_that_names_the_field(
    shared: Running, fields: dict[str, Any], param: str
) -> None:
    body = json.dumps({"model": MODEL, "prompt": "hello", **fields})
    response = await shared.http.post(COMPLETIONS, content=body, headers={"Content-Type": "application/json"})
    check_error(response, status=400, param=param)
    await check_alive(shared)


@pytest.mark.parametrize(("fields", "param"), BAD_CHATS, ids=_name)
async def test_a_bad_chat_is_a_400_that_names_the_field(shared: Running, fields: dict[str, Any], param: str) -> None:
    body = json.dumps({"model": MODEL, "messages": USER, **fields})
    response = await shared.http.post(CHAT, content=body, headers={"Content-Type": "application/json"})
    check_error(response, status=400, param=param)
    await check_alive(shared)


RAW: list[tuple[str, bytes, str | None, int]] = [
    ("broken JSON", b'{"model": "tiny", "prompt": ', "application/json", 400),
    ("no body", b"", "application/json", 400),
    ("a list", b"[1, 2]", "application/json", 400),
    ("a string", b'"hello"', "application/json", 400),
    ("null", b"null", "application/json", 400),
    ("not UTF-8", b'{"prompt": "\xff\xfe"}', "application/json", 400),
    ("half a surrogate pair", rb'{"prompt": "\ud800"}', "application/json", 400),
    ("deep nesting", b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "application/json", 400),
    ("NaN in an unread field", b'{"prompt": "hello", "extra": NaN}', "application/json", 400),
    ("a huge number", b'{"prompt": "hello", "temperature": 1' + b"0" * 400 + b"}", "application/json", 400),
    ("plain text", b'{"prompt": "hello"}', "text/plain", 400),
    ("a form", b"prompt=hello", "application/x-www-form-urlencoded", 400),
    ("no content type", b'{"prompt": "hello"}', None, 400),
    ("10 MB of text", b'{"prompt": "' + b"word " * 2_000_000 + b'"}', "application/json", 400),
    ("10 MB of token ids", b'{"prompt": [' + b"5," * 5_000_000 + b"5]}", "application/json", 400),
    (
        "10 MB of stop string",
        b'{"prompt": "hello", "stop": ["' + b"x" * 10_000_000 + b'", ""]}',
        "application/json",
        400,
    ),
    ("more than is read", b'{"prompt": "' + b"x" * 13 * 1024**2 + b'"}', "application/json", 413),
]


@pytest.mark.parametrize(("content", "content_type", "status"), [row[1:] for row in RAW], ids=[row[0] for row in RAW])
async def test_a_body_that_is_no_request_is_a_4xx(
    shared: Running, content: bytes, content_type: str | None, status: int
) -> None:
    headers = {"Content-Type": content_type} if content_type else {}
    for path in (COMPLETIONS, CHAT):
        check_error(await shared.http.post(path, content=content, headers=headers), status=status)
    await check_alive(shared)


async def test_a_chunked_body_over_the_limit_is_a_413(shared: Running) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(14):
            yield b"x" * 1024**2

    headers = {"Content-Type": "application/json"}
    check_error(await shared.http.post(COMPLETIONS, content=chunks(), headers=headers), status=413)
    await check_alive(shared)


async def test_an_unknown_model_is_a_404(shared: Running) -> None:
    for path, body in ((COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": USER})):
        response = await shared.post(path, {"model": "gpt-9", **body})
        check_error(response, status=404, param="model")
        assert response.json()["error"]["message"] == "The model `gpt-9` does not exist."
    check_error(await shared.http.get("/v1/models/gpt-9"), status=404)


async def test_an_unknown_route_is_a_404_and_a_wrong_method_a_405(shared: Running) -> None:
    check_error(await shared.http.get("/v1/nonsense"), status=404)
    check_error(await shared.http.get(CHAT), status=405)
    check_error(await shared.http.delete("/v1/models"), status=405)


async def test_a_list_is_read_up_to_its_first_wrong_item(shared: Running) -> None:
    """An error for each of a million would be seconds of work."""
    messages = [{"role": "user", "content": "x"}, *([{"role": 5, "content": "x"}] * 25)]
    response = await shared.post(CHAT, {"model": MODEL, "messages": messages})
    check_error(response, status=400, param="messages")
    told = "messages.1.role: Input should be a valid string (got 5) [string_type]"
    assert response.json()["error"]["message"] == told


async def test_at_most_ten_errors_are_reported(shared: Running) -> None:
    names = ("temperature", "top_p", "min_p", "top_k", "seed", "n", "stream", "max_tokens", "min_tokens", "logprobs")
    wrong = dict.fromkeys((*names, "priority", "echo"), "x")
    response = await shared.post(CHAT, {"model": MODEL, "messages": USER, **wrong})
    check_error(response, status=400)
    message = response.json()["error"]["message"]
    assert message.count("(got 'x')") == 10
    assert message.endswith("; and 2 more")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": 5}),
        ("/tokenize", {"prompt": "x", "messages": USER}),
        ("/detokenize", {"tokens": "x"}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": [99999]}),
    ],
)
async def test_bad_tokens_and_texts_are_400s(shared: Running, path: str, body: dict[str, Any]) -> None:
    check_error(await shared.post(path, body), status=400)


async def test_unknown_and_null_fields_are_ignored(shared: Running) -> None:
    extras = {"metadata": {"a": 1}, "nonsense": [1], "n": None, "stop": None, "stream": None, "logit_bias": None}
    answer = await shared.complete(max_tokens=2.0, tools=None, best_of=None, **extras)
    assert answer["usage"]["completion_tokens"] == 2
