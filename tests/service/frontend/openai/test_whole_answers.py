"""Every field of every answer of OpenAI's older endpoints, and every byte of their streams, for one known output."""

from typing import Any

import orjson
import pytest

from tests.service.frontend.harness import Running, running_frontend

pytestmark = pytest.mark.usefixtures("pinned")

HELLO, THERE = 1213, 518
"""The tokens "Hello" and " there"."""
ASKED = [{"role": "user", "content": "hello"}]
CHAT_PROMPT = [1, 579, 267, 202, 260, 284, 82, 2, 202, 1, 292, 312, 298, 202]
"""ASKED with the template around it."""
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
JSON_HEADERS = {"x-request-id": "r", "content-type": "application/json"}
STREAM_HEADERS = {
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
    "x-request-id": "r",
    "content-type": "text/event-stream; charset=utf-8",
}


def usage(prompt: int, completion: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def envelope(running: Running, prefix: str, kind: str) -> dict[str, Any]:
    return {
        "id": f"{prefix}-r",
        "object": kind,
        "created": 1000,
        "model": "tiny",
        "system_fingerprint": running.server.serving.model.fingerprint,
    }


TRANSPORT = {"date", "content-length", "transfer-encoding"}


async def asked(running: Running, path: str, body: Any, headers: dict[str, str]) -> Any:
    """The answer to a call named r, whose headers are these and those that transport adds."""
    running.fake.script, running.fake.tokens_per_step = [HELLO, THERE], 9  # all tokens come together
    response = await running.http.post(path, json=body, headers={"X-Request-Id": "r"})
    assert response.status_code == 200, response.text
    shown = {name: value for name, value in response.headers.items() if name not in TRANSPORT}
    assert shown == headers
    return response.json() if headers is JSON_HEADERS else response.text


def completion_choice(index: int = 0, **fields: Any) -> dict[str, Any]:
    return {
        "index": index,
        "text": "Hello there",
        "logprobs": None,
        "finish_reason": "stop",
        "stop_reason": None,
        "token_ids": None,
        "prompt_token_ids": None,
        "prompt_logprobs": None,
        **fields,
    }


def lists(tokens: list[str], offsets: list[int]) -> dict[str, Any]:
    return {
        "text_offset": offsets,
        "token_logprobs": [-0.5] * len(tokens),
        "tokens": tokens,
        "top_logprobs": [{token: -0.5} for token in tokens],
    }


@pytest.mark.parametrize(
    ("body", "choices", "counted"),
    [
        ({"prompt": [5, 6], "max_tokens": 9}, [completion_choice()], usage(2, 3)),
        (
            {"prompt": [5, 6], "max_tokens": 2, "logprobs": 1},
            [completion_choice(finish_reason="length", logprobs=lists(["Hello", " there"], [0, 5]))],
            usage(2, 2),
        ),
        (
            {"prompt": "hello", "max_tokens": 1, "n": 2, "return_token_ids": True},
            [
                completion_choice(
                    index, text="Hello", finish_reason="length", token_ids=[HELLO], prompt_token_ids=[260, 284, 82]
                )
                for index in range(2)
            ],
            usage(3, 2),
        ),
        (
            {"prompt": [[5, 6], [7]], "max_tokens": 9, "stop_token_ids": [THERE], "return_token_ids": True},
            [
                completion_choice(
                    index, text="Hello", stop_reason=THERE, token_ids=[HELLO, THERE], prompt_token_ids=prompt
                )
                for index, prompt in enumerate(([5, 6], [7]))
            ],
            usage(3, 4),
        ),
        (
            {"prompt": [5, 6], "max_tokens": 9, "stop": [" th"]},
            [completion_choice(text="Hello", stop_reason=" th")],
            usage(2, 2),
        ),
    ],
)
async def test_a_completion(frontend: Running, body: Any, choices: list[Any], counted: Any) -> None:
    assert await asked(frontend, COMPLETIONS, body, JSON_HEADERS) == {
        **envelope(frontend, "cmpl", "text_completion"),
        "choices": choices,
        "usage": counted,
        "service_tier": None,
        "kv_transfer_params": None,
    }


def chat_choice(index: int = 0, **fields: Any) -> dict[str, Any]:
    content = fields.pop("content", "Hello there")
    message = {
        "role": "assistant",
        "content": content,
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
        "tool_calls": [],
        "reasoning": None,
    }
    return {
        "index": index,
        "message": message,
        "logprobs": None,
        "finish_reason": "stop",
        "stop_reason": None,
        "token_ids": None,
        **fields,
    }


def entry(token: str) -> dict[str, Any]:
    return {"token": token, "logprob": -0.5, "bytes": list(token.encode()), "top_logprobs": []}


@pytest.mark.parametrize(
    ("body", "choices", "counted", "prompt"),
    [
        ({"model": "alias"}, [chat_choice()], usage(14, 3), None),
        (
            {"max_tokens": 2, "logprobs": True, "return_token_ids": True},
            [
                chat_choice(
                    finish_reason="length",
                    token_ids=[HELLO, THERE],
                    logprobs={"content": [entry("Hello"), entry(" there")], "refusal": None},
                )
            ],
            usage(14, 2),
            CHAT_PROMPT,
        ),
        (
            {"n": 2, "max_completion_tokens": 1},
            [chat_choice(index, content="Hello", finish_reason="length") for index in range(2)],
            usage(14, 2),
            None,
        ),
        ({"stop": " th"}, [chat_choice(content="Hello", stop_reason=" th")], usage(14, 2), None),
    ],
)
async def test_a_chat_completion(
    frontend: Running, body: dict[str, Any], choices: list[Any], counted: Any, prompt: list[int] | None
) -> None:
    assert await asked(frontend, CHAT, {"messages": ASKED, **body}, JSON_HEADERS) == {
        **envelope(frontend, "chatcmpl", "chat.completion"),
        "model": body.get("model", "tiny"),
        "choices": choices,
        "usage": counted,
        "service_tier": None,
        "kv_transfer_params": None,
        "prompt_logprobs": None,
        "prompt_token_ids": prompt,
    }


async def test_a_batch_of_conversations_numbers_the_choices_through_and_adds_the_usages_up(frontend: Running) -> None:
    body = {"messages": [ASKED, ASKED], "n": 2, "max_tokens": 1}
    assert await asked(frontend, f"{CHAT}/batch", body, JSON_HEADERS) == {
        **envelope(frontend, "chatcmpl", "chat.completion"),
        "choices": [chat_choice(index, content="Hello", finish_reason="length") for index in range(4)],
        "usage": usage(28, 4),
    }


async def test_usage_has_details_where_the_server_gives_them() -> None:
    async with running_frontend(enable_prompt_tokens_details=True) as running:
        running.fake.num_cached_tokens = 1
        detailed = {**usage(2, 1), "prompt_tokens_details": {"cached_tokens": 1}}
        assert (await running.complete(prompt=[5, 6], max_tokens=1))["usage"] == detailed
        both = {**usage(28, 2), "prompt_tokens_details": {"cached_tokens": 2}}
        body = {"messages": [ASKED, ASKED], "max_tokens": 1}
        assert (await asked(running, f"{CHAT}/batch", body, JSON_HEADERS))["usage"] == both


Event = tuple[str | None, dict[str, Any]]


def told(text: str) -> list[tuple[str | None, Any]]:
    """Id and JSON of each event; the last one is [DONE]."""
    *events, done, end = text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    read = []
    for one in events:
        first, _, second = one.partition("\n")
        name, data = (first.removeprefix("id: "), second) if first.startswith("id: ") else (None, one)
        assert data.startswith("data: ")
        read.append((name, orjson.loads(data.removeprefix("data: "))))
    return read


ECHOED = {
    "text_offset": [0, 1],
    "token_logprobs": [None, -0.5],
    "tokens": ['"', "#"],
    "top_logprobs": [None, {"#": -0.5}],
}
"""Of the prompt [5, 6]."""


def part(index: int, text: str, finish: str | None = None, **more: Any) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": finish, "stop_reason": None} | more


@pytest.mark.parametrize(
    ("body", "events"),
    [
        ({"max_tokens": 2}, [("cmpl-r:2f", {"choices": [part(0, "Hello there", "length")]})]),
        (
            {"max_tokens": 9, "stream_options": {"include_usage": True}},
            [
                ("cmpl-r:3f", {"choices": [part(0, "Hello there", "stop")], "usage": None}),
                (None, {"choices": [], "usage": usage(2, 3)}),
            ],
        ),
        (
            {"max_tokens": 2, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
            [
                ("cmpl-r:2f", {"choices": [part(0, "Hello there", "length")], "usage": usage(2, 2)}),
                (None, {"choices": [], "usage": usage(2, 2)}),
            ],
        ),
        (
            {"max_tokens": 9, "stop": [" th"], "n": 2},
            [
                ("cmpl-r:2f,0", {"choices": [part(0, "Hello", "stop", stop_reason=" th")]}),
                ("cmpl-r:2f,2f", {"choices": [part(1, "Hello", "stop", stop_reason=" th")]}),
            ],
        ),
        (
            {"max_tokens": 2, "echo": True, "return_token_ids": True, "logprobs": 0},
            [
                (None, {"choices": [part(0, '"#', logprobs=ECHOED)]}),
                (
                    "cmpl-r:2f",
                    {
                        "choices": [
                            part(
                                0,
                                "Hello there",
                                "length",
                                logprobs=lists(["Hello", " there"], [2, 7]),
                                token_ids=[HELLO, THERE],
                                prompt_token_ids=[5, 6],
                            )
                        ]
                    },
                ),
            ],
        ),
    ],
)
async def test_a_stream_of_completions(frontend: Running, body: dict[str, Any], events: list[Event]) -> None:
    text = await asked(frontend, COMPLETIONS, {"prompt": [5, 6], "stream": True, **body}, STREAM_HEADERS)
    head = envelope(frontend, "cmpl", "text_completion")
    assert told(text) == [(name, {**head, **fields}) for name, fields in events]


def chat_part(index: int, delta: dict[str, Any], finish: str | None = None, **more: Any) -> dict[str, Any]:
    ended = {"stop_reason": None} if finish or more else {}
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish, **ended, **more}


def roles(n: int, **more: Any) -> list[Event]:
    return [(None, {"choices": [chat_part(i, {"role": "assistant", "content": ""})], **more}) for i in range(n)]


@pytest.mark.parametrize(
    ("body", "events"),
    [
        (
            {"stream_options": {"include_usage": True}},
            [
                *roles(1, usage=None),
                ("chatcmpl-r:3f", {"choices": [chat_part(0, {"content": "Hello there"}, "stop")], "usage": None}),
                (None, {"choices": [], "usage": usage(14, 3)}),
            ],
        ),
        (
            {"max_tokens": 2, "return_token_ids": True},
            [
                *roles(1, prompt_token_ids=CHAT_PROMPT),
                (
                    "chatcmpl-r:2f",
                    {"choices": [chat_part(0, {"content": "Hello there"}, "length", token_ids=[HELLO, THERE])]},
                ),
            ],
        ),
        (
            {"max_tokens": 1, "n": 2, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
            [
                *roles(2, usage=usage(14, 0)),
                (
                    "chatcmpl-r:1f,0",
                    {"choices": [chat_part(0, {"content": "Hello"}, "length")], "usage": usage(14, 2)},
                ),
                (
                    "chatcmpl-r:1f,1f",
                    {"choices": [chat_part(1, {"content": "Hello"}, "length")], "usage": usage(14, 2)},
                ),
                (None, {"choices": [], "usage": usage(14, 2)}),
            ],
        ),
    ],
)
async def test_a_stream_of_a_chat(frontend: Running, body: dict[str, Any], events: list[Event]) -> None:
    text = await asked(frontend, CHAT, {"messages": ASKED, "stream": True, **body}, STREAM_HEADERS)
    head = envelope(frontend, "chatcmpl", "chat.completion.chunk")
    assert told(text) == [(name, {**head, **fields}) for name, fields in events]


async def test_embeddings(frontend: Running) -> None:
    answer = await asked(frontend, "/v1/embeddings", {"input": [[5, 6], [7]]}, JSON_HEADERS)
    head = envelope(frontend, "embd", "list")
    del head["system_fingerprint"]
    assert answer == {
        **head,
        "data": [
            {"index": 0, "object": "embedding", "embedding": [2.0, 6.0, 0.0, 0.0]},
            {"index": 1, "object": "embedding", "embedding": [1.0, 7.0, 0.0, 0.0]},
        ],
        "usage": usage(3, 0),
    }
