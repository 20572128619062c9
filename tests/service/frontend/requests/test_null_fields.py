"""Every field that OpenAI's SDK types as optional may be null: as if it were not there."""

import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, NotRequired, Required, Union, get_args, get_origin, get_type_hints

import pytest
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params

from tests.service.frontend.harness import MODEL, Running

CHAT, COMPLETIONS, EMBEDDINGS, RESPONSES = (
    f"/v1/{name}" for name in ("chat/completions", "completions", "embeddings", "responses")
)
USER = {"role": "user", "content": "hello"}
BODIES: dict[str, tuple[Any, dict[str, Any]]] = {
    CHAT: (chat_create_params.CompletionCreateParamsNonStreaming, {"messages": [USER], "max_tokens": 1}),
    COMPLETIONS: (completion_create_params.CompletionCreateParamsNonStreaming, {"prompt": "x", "max_tokens": 1}),
    EMBEDDINGS: (embedding_create_params.EmbeddingCreateParams, {"input": "x"}),
    RESPONSES: (response_create_params.ResponseCreateParamsNonStreaming, {"input": "x", "max_output_tokens": 16}),
}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
SCHEMA = {"name": "s", "schema": {"type": "object"}, "strict": None, "description": None}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "x", "id": None, "status": None, "caller": None}
FUNCTION = {"type": "function", "name": "f", "parameters": None, "strict": None, "description": None}
NESTED: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": [USER, {"role": "assistant", "content": "x", "refusal": None, "audio": None}, USER]}),
    (CHAT, {"messages": [USER, {"role": "assistant", "content": None, "function_call": None, "tool_calls": [CALL]}]}),
    (CHAT, {"messages": [USER, {"role": "assistant", "content": "x", "tool_calls": None, "name": None}, USER]}),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "f", "strict": None, "parameters": None}}]}),
    (CHAT, {"tools": None, "tool_choice": None, "response_format": None, "functions": None, "user": None}),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": SCHEMA}}),
    (CHAT, {"stream": True, "stream_options": {"include_usage": None, "include_obfuscation": None}}),
    (RESPONSES, {"reasoning": {"effort": None, "summary": None, "generate_summary": None}}),
    (RESPONSES, {"text": {"verbosity": None}}),
    (RESPONSES, {"text": {"format": {"type": "json_schema", **SCHEMA}}}),
    (RESPONSES, {"tools": [FUNCTION | {"allowed_callers": None, "output_schema": None}]}),
    (RESPONSES, {"input": [{**USER, "type": "message", "phase": None, "id": None, "status": None}]}),
    (
        RESPONSES,
        {
            "input": [
                USER,
                {"type": "reasoning", "id": "r", "summary": [], "content": None, "encrypted_content": None},
                {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "c", "id": None, "caller": None},
                OUTPUT,
            ]
        },
    ),
]


def takes_null(hint: Any) -> bool:
    """Whether None is one of the values of a type."""
    origin = get_origin(hint)
    if origin in (Required, NotRequired, Annotated):
        return takes_null(get_args(hint)[0])
    if origin is Literal:
        return None in get_args(hint)
    return origin in (Union, types.UnionType) and any(part is type(None) or takes_null(part) for part in get_args(hint))


def optional_fields() -> Iterator[tuple[str, str]]:
    for path, (params, _) in BODIES.items():
        for name, hint in get_type_hints(params, include_extras=True).items():
            if takes_null(hint) and name != "prompt":
                yield path, name


async def test_every_optional_field_takes_null(frontend: Running) -> None:
    fields = list(optional_fields())
    assert len(fields) > 50
    refused = []
    for path, name in fields:
        response = await frontend.post(path, {"model": MODEL, **BODIES[path][1], name: None})
        if response.status_code != 200:
            refused.append((path, name, response.text[:200]))
    assert refused == []


@pytest.mark.parametrize("place", range(len(NESTED)))
async def test_nested_fields_take_null(frontend: Running, place: int) -> None:
    path, more = NESTED[place]
    response = await frontend.post(path, {"model": MODEL, **BODIES[path][1], **more})
    assert response.status_code == 200, response.text
