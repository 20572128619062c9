"""Every field of a body of Responses and of Messages in the conversation that answers it, and every fault by name."""

from typing import Any

import pytest

from pagoda_common.errors import InvalidRequest
from pagoda_frontend.messages.input import chat_body_of as of_messages
from pagoda_frontend.messages.protocol import MessagesBody
from pagoda_frontend.responses.input import add_input
from pagoda_frontend.responses.input import chat_body_of as of_responses
from pagoda_frontend.responses.protocol import ResponseItem, ResponsesBody

ASKED = {"role": "user", "content": "hello"}
SCHEMA = {"type": "object"}


def chat_of_messages(**fields: Any) -> dict[str, Any]:
    body = MessagesBody.model_validate({"messages": [ASKED], "max_tokens": 9, **fields})
    return of_messages(body).model_dump(exclude_unset=True)


def function(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


def call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


TOOL = {"name": "f", "description": "d", "input_schema": SCHEMA, "strict": True}
CHAT_TOOL = function("f", description="d", parameters=SCHEMA, strict=True)
OF_MESSAGES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"stop_sequences": ["a", "b"]}, {"stop": ["a", "b"]}),
    ({"temperature": 0.5, "top_p": 0.25, "top_k": 7}, {"temperature": 0.5, "top_p": 0.25, "top_k": 7}),
    ({"model": "m", "priority": -1, "timeout": 2.5}, {"model": "m", "priority": -1, "timeout": 2.5}),
    ({"cache_salt": "s", "chat_template_kwargs": {"a": 1}}, {"cache_salt": "s", "chat_template_kwargs": {"a": 1}}),
    ({"output_config": {"effort": "low"}}, {"reasoning_effort": "low"}),
    (
        {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True},
            }
        },
    ),
    ({"tools": [TOOL]}, {"tools": [CHAT_TOOL]}),
    ({"tools": [{"name": "g", "type": "custom"}]}, {"tools": [function("g")]}),
    ({"tools": [TOOL], "tool_choice": {"type": "auto"}}, {"tools": [CHAT_TOOL], "tool_choice": "auto"}),
    ({"tools": [TOOL], "tool_choice": {"type": "any"}}, {"tools": [CHAT_TOOL], "tool_choice": "required"}),
    ({"tools": [TOOL], "tool_choice": {"type": "none"}}, {"tools": [CHAT_TOOL], "tool_choice": "none"}),
    ({"tool_choice": {"type": "auto"}}, {}),
    ({"tool_choice": {"type": "none"}}, {}),
    ({"tool_choice": {"type": "any"}}, {"tool_choice": "required"}),
    (
        {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True}},
        {"tools": [CHAT_TOOL], "tool_choice": function("f"), "parallel_tool_calls": False},
    ),
    ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": False}}, {}),
    ({"thinking": {"type": "adaptive"}}, {}),
    (
        {"thinking": {"type": "enabled", "budget_tokens": 5}},
        {"chat_template_kwargs": {"enable_thinking": True}, "thinking_token_budget": 5},
    ),
    (
        {"thinking": {"type": "enabled", "budget_tokens": 5}, "thinking_token_budget": 7},
        {"chat_template_kwargs": {"enable_thinking": True}, "thinking_token_budget": 7},
    ),
    (
        {"thinking": {"type": "disabled", "budget_tokens": 5}, "chat_template_kwargs": {"a": 1}},
        {"chat_template_kwargs": {"enable_thinking": False, "a": 1}, "include_reasoning": False},
    ),
    (
        {"thinking": {"type": "disabled"}, "chat_template_kwargs": {"enable_thinking": True}},
        {"chat_template_kwargs": {"enable_thinking": True}, "include_reasoning": False},
    ),
    (
        {"system": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"messages": [{"role": "system", "content": "a\nb"}, ASKED]},
    ),
    ({"system": [{"type": "text", "text": "x-anthropic-billing-header: 1"}]}, {"messages": [ASKED]}),
    ({"system": []}, {"messages": [{"role": "system", "content": ""}, ASKED]}),
    (
        {
            "messages": [
                ASKED,
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "t1"},
                        {"type": "redacted_thinking"},
                        {"type": "thinking", "thinking": "t2"},
                        {"type": "text", "text": "x"},
                        {"type": "text", "text": "y"},
                        {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": 1}},
                        {"type": "tool_use", "id": "c2", "name": "g"},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "so"},
                        {"type": "tool_result", "tool_use_id": "c1", "content": "r1"},
                        {"type": "tool_result", "tool_use_id": "c2", "content": [{"type": "text", "text": "r2"}]},
                        {"type": "tool_result", "tool_use_id": "c3"},
                    ],
                },
            ]
        },
        {
            "messages": [
                ASKED,
                {
                    "role": "assistant",
                    "content": "x\ny",
                    "reasoning": "t1\nt2",
                    "tool_calls": [call("c1", "f", '{"a":1}'), call("c2", "g", "{}")],
                },
                {"role": "tool", "tool_call_id": "c1", "content": "r1"},
                {"role": "tool", "tool_call_id": "c2", "content": "r2"},
                {"role": "tool", "tool_call_id": "c3", "content": ""},
                {"role": "user", "content": "so"},
            ]
        },
    ),
    (
        {"messages": [ASKED, {"role": "assistant", "content": "He"}]},
        {
            "messages": [ASKED, {"role": "assistant", "content": "He"}],
            "continue_final_message": True,
            "add_generation_prompt": False,
        },
    ),
    (
        {"messages": [{"role": "assistant", "content": [{"type": "thinking", "thinking": "t"}]}, ASKED]},
        {"messages": [{"role": "assistant", "content": "", "reasoning": "t"}, ASKED]},
    ),
    ({"messages": [{"role": "user", "content": []}]}, {"messages": [{"role": "user", "content": ""}]}),
]


@pytest.mark.parametrize(("fields", "more"), OF_MESSAGES)
def test_a_body_of_messages_is_this_conversation(fields: dict[str, Any], more: dict[str, Any]) -> None:
    assert chat_of_messages(**fields) == {"messages": [ASKED], "max_tokens": 9, **more}


def content(*blocks: dict[str, Any], role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(blocks)}]}


@pytest.mark.parametrize(
    ("fields", "field", "message"),
    [
        (content({"type": "image"}), "messages", "messages.0.content.0: blocks of type 'image' are not supported here"),
        (content({"type": "text"}), "messages", "messages.0.content.0.text: field required"),
        (content({"type": "tool_result"}), "messages", "messages.0.content.0.tool_use_id: field required"),
        (
            content({"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image"}]}),
            "messages",
            "messages.0.content.0.content.0: blocks of type 'image' are not supported here",
        ),
        (
            content({"type": "tool_use", "name": "f"}, role="assistant"),
            "messages",
            "messages.0.content.0.id: field required",
        ),
        (
            content({"type": "tool_use", "id": "f"}, role="assistant"),
            "messages",
            "messages.0.content.0.name: field required",
        ),
        ({"system": [{"type": "image"}]}, "system", "system.0: blocks of type 'image' are not supported here"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice", "tool_choice.name: field required"),
        (
            {"tools": [TOOL, {"name": "g", "type": "bash"}]},
            "tools",
            "tools.1.type: tools of type 'bash' are not supported",
        ),
        (
            {"output_config": {"format": {"type": "xml"}}},
            "output_config.format",
            "output_config.format.type must be json_schema, got 'xml'",
        ),
    ],
)
def test_what_is_wrong_in_messages_is_named(fields: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat_of_messages(**fields)
    assert (caught.value.field, caught.value.message) == (field, message)


def chat_of_responses(**fields: Any) -> dict[str, Any]:
    body = ResponsesBody.model_validate({"input": "hello", **fields})
    return of_responses(body, [dict(ASKED)]).model_dump(exclude_unset=True)


RESPONSE_TOOL = {"type": "function", "name": "f", "description": "d", "parameters": SCHEMA, "strict": True}
OTHER = {"type": "function", "name": "g"}
ALLOWED = {"type": "allowed_tools", "tools": [OTHER]}
OF_RESPONSES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"instructions": "Be short."}, {"messages": [{"role": "system", "content": "Be short."}, ASKED]}),
    (
        {"max_output_tokens": 9, "temperature": 0.5, "top_p": 0.25},
        {"max_completion_tokens": 9, "temperature": 0.5, "top_p": 0.25},
    ),
    ({"truncation": "auto"}, {"truncate_prompt_tokens": -1}),
    ({"truncation": "disabled"}, {}),
    ({"top_logprobs": 3}, {"logprobs": True, "top_logprobs": 3}),
    ({"include": ["message.output_text.logprobs"]}, {"logprobs": True, "top_logprobs": 0}),
    ({"include": ["reasoning.encrypted_content"], "top_logprobs": 0}, {}),
    ({"model": "m", "priority": 3, "timeout": 1.5}, {"model": "m", "priority": 3, "timeout": 1.5}),
    ({"cache_salt": "s", "user": "u"}, {"cache_salt": "s", "user": "u"}),
    (
        {"include_reasoning": False, "thinking_token_budget": 4},
        {"include_reasoning": False, "thinking_token_budget": 4},
    ),
    ({"chat_template_kwargs": {"a": 1}}, {"chat_template_kwargs": {"a": 1}}),
    ({"parallel_tool_calls": False}, {"parallel_tool_calls": False}),
    ({"reasoning": {"effort": "high"}}, {"reasoning_effort": "high"}),
    ({"text": {"format": {"type": "text"}}}, {}),
    ({"text": {"format": {"type": "json_object"}}}, {"response_format": {"type": "json_object"}}),
    (
        {
            "text": {
                "format": {"type": "json_schema", "name": "n", "description": "d", "schema": SCHEMA, "strict": True}
            }
        },
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "description": "d", "schema": SCHEMA, "strict": True},
            }
        },
    ),
    (
        {"text": {"format": {"type": "json_schema", "schema": SCHEMA, "strict": False}}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA, "strict": False}}},
    ),
    ({"tools": [RESPONSE_TOOL, OTHER]}, {"tools": [CHAT_TOOL, function("g")]}),
    ({"tools": [RESPONSE_TOOL], "tool_choice": "none"}, {"tools": [CHAT_TOOL], "tool_choice": "none"}),
    ({"tool_choice": "auto"}, {}),
    ({"tool_choice": "required"}, {"tool_choice": "required"}),
    (
        {"tools": [RESPONSE_TOOL], "tool_choice": {"type": "function", "name": "f"}},
        {"tools": [CHAT_TOOL], "tool_choice": function("f")},
    ),
    (
        {
            "tools": [RESPONSE_TOOL, OTHER],
            "tool_choice": {**ALLOWED, "mode": "required"},
        },
        {"tools": [function("g")], "tool_choice": "required"},
    ),
    (
        {"tools": [RESPONSE_TOOL, OTHER], "tool_choice": ALLOWED},
        {"tools": [function("g")], "tool_choice": "auto"},
    ),
]


@pytest.mark.parametrize(("fields", "more"), OF_RESPONSES)
def test_a_body_of_responses_is_this_conversation(fields: dict[str, Any], more: dict[str, Any]) -> None:
    assert chat_of_responses(**fields) == {"messages": [ASKED], **more}


@pytest.mark.parametrize(
    ("fields", "field", "message"),
    [
        ({"tools": [OTHER, {"type": "bash"}]}, "tools", "tools.1.type: tools of type 'bash' are not supported"),
        ({"tools": [OTHER, {"type": "function"}]}, "tools", "tools.1.name: field required"),
        ({"conversation": "c"}, "conversation", "conversation is not supported"),
        ({"prompt": {"id": "p"}}, "prompt", "prompt is not supported"),
        ({"tool_choice": {"type": "custom"}}, "tool_choice", "tool_choice.type 'custom' is not supported"),
    ],
)
def test_what_is_wrong_in_responses_is_named(fields: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat_of_responses(**fields)
    assert (caught.value.field, caught.value.message) == (field, message)


STORED = {"msg_1": {"id": "msg_1", "type": "message", "role": "assistant", "content": "kept"}}


def conversation(*items: dict[str, Any]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    add_input(messages, [ResponseItem.model_validate(item) for item in items], lambda: STORED)
    return messages


def test_items_are_these_messages() -> None:
    part = {"type": "output_text", "text": "a"}
    assert conversation(
        {"role": "user", "content": [{"type": "input_text", "text": "x"}, {"type": "refusal", "refusal": "no"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}]},
        {"role": "assistant", "content": [part]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "r"},
        {"id": "msg_1"},
        {"type": "item_reference", "id": "msg_1"},
        {"role": "developer", "content": "d"},
    ) == [
        {"role": "user", "content": "x\nno"},
        {"role": "assistant", "content": "a", "reasoning": "s", "tool_calls": [call("c", "f", "{}")]},
        {"role": "tool", "tool_call_id": "c", "content": "r"},
        {"role": "assistant", "content": "kept"},
        {"role": "assistant", "content": "kept"},
        {"role": "developer", "content": "d"},
    ]


@pytest.mark.parametrize("item_id", ["msg_1", "msg_2"])
def test_an_item_with_a_role_is_a_message_whatever_its_id(item_id: str) -> None:
    assert conversation({"id": item_id, "role": "user", "content": "new"}) == [{"role": "user", "content": "new"}]


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ({"content": "x"}, "input.1.role: field required"),
        ({"role": "user"}, "input.1.content: field required"),
        ({"type": "function_call", "name": "f", "arguments": ""}, "input.1.call_id: field required"),
        ({"type": "function_call", "call_id": "c", "arguments": ""}, "input.1.name: field required"),
        ({"type": "function_call", "call_id": "c", "name": "f"}, "input.1.arguments: field required"),
        ({"type": "function_call_output", "output": "x"}, "input.1.call_id: field required"),
        ({"type": "function_call_output", "call_id": "c"}, "input.1.output: field required"),
        ({"type": "web_search_call"}, "input.1.type: items of type 'web_search_call' are not supported"),
        ({"id": "msg_2"}, "input.1.id: no item 'msg_2' is stored"),
        (
            {"role": "user", "content": [{"type": "input_image"}]},
            "input.1.content.0: parts of type 'input_image' are not supported yet",
        ),
        ({"role": "user", "content": [{"type": "input_text"}]}, "input.1.content.0.text: field required"),
    ],
)
def test_an_item_that_is_not_understood_is_named(item: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        conversation(ASKED, item)
    assert (caught.value.field, caught.value.message) == ("input", message)
