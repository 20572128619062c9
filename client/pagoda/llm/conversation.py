"""Conversations of LLM.chat, rendered by the chat template. Knows no engine."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pagoda_common.errors import InvalidRequest
from pagoda_common.text.tokenizer import Tokenizer

Message = Mapping[str, Any]
FORMATS = ("auto", "string", "openai")
"""Values of chat_template_content_format; texts are the same in all of them."""


def render(
    messages: Any,
    tokenizer: Tokenizer,
    *,
    chat_template: str | None,
    content_format: str,
    add_generation_prompt: bool,
    continue_final_message: bool,
    tools: list[dict[str, Any]] | None,
    variables: Mapping[str, Any],
) -> list[str]:
    """The prompt of each conversation, as the chat template writes it; the arguments are LLM.chat's.

    Raises:
        InvalidRequest: an argument is wrong, there is no template, or it refuses the messages.
    """
    if content_format not in FORMATS:
        message = f"chat_template_content_format is {content_format!r}, must be one of {', '.join(FORMATS)}"
        raise InvalidRequest(message, field="chat_template_content_format")
    if continue_final_message and add_generation_prompt:
        message = "continue_final_message needs add_generation_prompt=False"
        raise InvalidRequest(message, field="continue_final_message")
    rendered = []
    for conversation in map(template_messages, as_conversations(messages)):
        text = tokenizer.apply_chat_template(
            conversation,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template=chat_template,
            tools=tools,
            **variables,
        )
        rendered.append(text)
    return rendered


def as_conversations(messages: Any) -> list[list[Message]]:
    """One conversation, or several, as a list.

    Raises:
        InvalidRequest: it is neither.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise InvalidRequest(f"messages must be a list of messages, got {messages!r}", field="messages")
    if not messages:
        return []
    conversations = [messages] if isinstance(messages[0], Mapping) else messages
    for place, conversation in enumerate(conversations):
        is_list = isinstance(conversation, Sequence) and not isinstance(conversation, str)
        if not is_list or not conversation:
            message = f"messages.{place}: a conversation must be a list of at least one message, got {conversation!r}"
            raise InvalidRequest(message, field="messages")
    return [list(conversation) for conversation in conversations]


def template_messages(conversation: Sequence[Message]) -> list[dict[str, Any]]:
    """`conversation` with content parts joined to one text, and the arguments of tool calls as objects.

    Raises:
        InvalidRequest: a message is no message, or is not text; `field` is messages.
    """
    return [_template_message(message, number) for number, message in enumerate(conversation)]


def _template_message(message: Any, number: int) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidRequest(f"messages.{number} must be an object with a role, got {message!r}", field="messages")
    shown = {name: value for name, value in message.items() if value is not None}
    shown["content"] = _text(message.get("content"), message["role"], number)
    if calls := message.get("tool_calls"):
        shown["tool_calls"] = [_template_call(call, number) for call in calls]
    reasoning = message.get("reasoning") or message.get("reasoning_content")
    if isinstance(reasoning, str):
        shown["reasoning"] = shown["reasoning_content"] = reasoning  # templates know either name
    return shown


def _text(content: Any, role: str, number: int) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        if role != "assistant":
            raise InvalidRequest(f"messages.{number}.content: a {role} message needs content", field="messages")
        return ""
    texts = []
    for place, part in enumerate(content if isinstance(content, Sequence) else [content]):
        text = part if isinstance(part, str) else part.get("text") if isinstance(part, Mapping) else None
        if not isinstance(text, str):
            name = f"messages.{number}.content.{place}"
            raise InvalidRequest(f"{name}: models take text only, got {str(part)[:100]}", field="messages")
        texts.append(text)
    return "\n".join(texts)


def _template_call(call: Any, number: int) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise InvalidRequest(f"messages.{number}.tool_calls must be calls of functions, got {call!r}", field="messages")
    arguments: Any = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = function["arguments"]
    return {**call, "function": {**function, "arguments": arguments}}
