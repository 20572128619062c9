"""Conversations of LLM.chat: what a template gets of each message, and every way in which one is wrong."""

from typing import Any

import pytest

from pagoda.llm.conversation import as_conversations, render, template_messages
from pagoda.options.refusals import EXTRAS, refuse_extras
from pagoda_common.errors import InvalidRequest
from pagoda_common.text.tokenizer import Tokenizer

USER = {"role": "user", "content": "hi"}


def call(arguments: Any) -> dict[str, Any]:
    return {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        (USER, USER),
        ({"role": "user", "content": "hi", "name": None, "x": 5}, {"role": "user", "content": "hi", "x": 5}),
        ({"role": "user", "content": ["a", {"type": "text", "text": "b"}]}, {"role": "user", "content": "a\nb"}),
        ({"role": "user", "content": {"text": "b"}}, {"role": "user", "content": "b"}),
        ({"role": "user", "content": []}, {"role": "user", "content": ""}),
        ({"role": "assistant", "content": None}, {"role": "assistant", "content": ""}),
        ({"role": "assistant"}, {"role": "assistant", "content": ""}),
        (
            {"role": "assistant", "content": "", "reasoning": "r"},
            {"role": "assistant", "content": "", "reasoning": "r", "reasoning_content": "r"},
        ),
        (
            {"role": "assistant", "content": "", "reasoning_content": "r"},
            {"role": "assistant", "content": "", "reasoning": "r", "reasoning_content": "r"},
        ),
        (
            {"role": "assistant", "content": "", "reasoning": ["r"]},
            {"role": "assistant", "content": "", "reasoning": ["r"]},
        ),
        ({"role": "assistant", "tool_calls": []}, {"role": "assistant", "content": "", "tool_calls": []}),
    ],
)
def test_what_a_template_gets(message: dict[str, Any], shown: dict[str, Any]) -> None:
    assert template_messages([message]) == [shown]


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ('{"a": 1}', {"a": 1}),
        ({"a": 1}, {"a": 1}),
        ("[1]", [1]),
        ("{broken", "{broken"),
        ("", {}),
        (None, {}),
        ({}, {}),
    ],
)
def test_arguments_of_calls_are_objects_where_they_can_be(arguments: Any, shown: Any) -> None:
    message = {"role": "assistant", "tool_calls": [call('{"first": true}'), call(arguments)]}
    [made] = template_messages([message])
    assert made["tool_calls"] == [call({"first": True}), call(shown)]
    assert message["tool_calls"][1] == call(arguments), "what was given stays"
    del message["tool_calls"][1]["function"]["arguments"]
    assert template_messages([message])[0]["tool_calls"][1] == call({})


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([USER, "hi"], "messages.1 must be an object with a role, got 'hi'"),
        ([{"content": "hi"}], "messages.0 must be an object with a role, got {'content': 'hi'}"),
        ([{"role": 5}], "messages.0 must be an object with a role, got {'role': 5}"),
        ([USER, {"role": "user"}], "messages.1.content: a user message needs content"),
        (
            [{"role": "user", "content": ["a", {"type": "image_url"}]}],
            "messages.0.content.1: models take text only, got {'type': 'image_url'}",
        ),
        ([{"role": "user", "content": 5}], "messages.0.content.0: models take text only, got 5"),
        (
            [{"role": "user", "content": [{"x": "y" * 200}]}],
            "messages.0.content.0: models take text only, got " + str({"x": "y" * 200})[:100],
        ),
        (
            [{"role": "assistant", "tool_calls": ["f"]}],
            "messages.0.tool_calls must be calls of functions, got 'f'",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"function": "f"}]}],
            "messages.0.tool_calls must be calls of functions, got {'function': 'f'}",
        ),
    ],
)
def test_what_is_no_message_is_named(messages: list[Any], text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        template_messages(messages)
    assert (caught.value.message, caught.value.field) == (text, "messages")


def test_one_conversation_or_several() -> None:
    assert as_conversations([]) == []
    assert as_conversations([USER, USER]) == [[USER, USER]]
    assert as_conversations(([USER], (USER, USER))) == [[USER], [USER, USER]]
    for wrong, text in (
        ("hi", "messages must be a list of messages, got 'hi'"),
        (USER, f"messages must be a list of messages, got {USER!r}"),
        ([[USER], []], "messages.1: a conversation must be a list of at least one message, got []"),
        ([[USER], "hi"], "messages.1: a conversation must be a list of at least one message, got 'hi'"),
        ([[USER], USER], f"messages.1: a conversation must be a list of at least one message, got {USER!r}"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            as_conversations(wrong)
        assert (caught.value.message, caught.value.field) == (text, "messages")


TEMPLATE = "{{ greeting }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if tools %}T{% endif %}"


def rendered(messages: Any, **changes: Any) -> list[str]:
    given: dict[str, Any] = {
        "chat_template": TEMPLATE + "{% if add_generation_prompt %}<gen>{% endif %}",
        "content_format": "auto",
        "add_generation_prompt": True,
        "continue_final_message": False,
        "tools": None,
        "variables": {},
    }
    return render(messages, Tokenizer.load("pagoda-tiny"), **(given | changes))


def test_each_conversation_is_a_text() -> None:
    assert rendered([[USER], [USER, {"role": "assistant", "content": "yes"}]]) == [
        "<user>hi<gen>",
        "<user>hi<assistant>yes<gen>",
    ]
    assert rendered([USER], add_generation_prompt=False, variables={"greeting": "G"}) == ["G<user>hi"]
    assert rendered([USER], tools=[{"type": "function"}]) == ["<user>hiT<gen>"]
    continued = rendered([USER], add_generation_prompt=False, continue_final_message=True, tools=[{}])
    assert continued == ["<user>hi"], "what comes after the last message is cut off"


@pytest.mark.parametrize(
    ("changes", "field", "text"),
    [
        (
            {"content_format": "xml"},
            "chat_template_content_format",
            "chat_template_content_format is 'xml', must be one of auto, string, openai",
        ),
        (
            {"continue_final_message": True},
            "continue_final_message",
            "continue_final_message needs add_generation_prompt=False",
        ),
    ],
)
def test_what_does_not_go_together(changes: dict[str, Any], field: str, text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        rendered([USER], **changes)
    assert (caught.value.field, caught.value.message) == (field, text)
    for name in ("auto", "string", "openai"):
        assert rendered([USER], content_format=name) == ["<user>hi<gen>"]


@pytest.mark.parametrize("name", EXTRAS)
def test_arguments_that_nothing_stands_for(name: str) -> None:
    for empty in (None, False, 0, ""):
        refuse_extras({name: empty})
    if not EXTRAS[name]:
        refuse_extras({name: True})
        return
    with pytest.raises(InvalidRequest) as caught:
        refuse_extras({name: True})
    assert (caught.value.field, caught.value.message) == (name, f"{name} is not supported: {EXTRAS[name]}")


def test_an_argument_that_vllm_has_not_either() -> None:
    with pytest.raises(TypeError, match="unexpected argument 'temprature'"):
        refuse_extras({"temprature": None})
