"""Turns a Messages body into the conversation that answers it. Pure functions."""

from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from pagoda_common.errors import InvalidRequest
from pagoda_common.text import exact_json
from pagoda_frontend.messages.protocol import (
    BUDGET,
    CHAT_NAMES,
    PASSED_ON,
    AnthropicMessage,
    AnthropicTool,
    Block,
    CountTokensBody,
    MessagesBody,
)
from pagoda_frontend.openai.protocol import ChatBody
from pagoda_frontend.requests.errors import validation_message

Message = dict[str, Any]
BILLING_HEADER = "x-anthropic-billing-header"
"""Prefix of a block that is left out of the system prompt."""


def chat_body_of(body: CountTokensBody) -> ChatBody:
    """The conversation that answers `body`.

    Raises:
        InvalidRequest: a field asks for something that is not supported; `field` names it.
    """
    fields: dict[str, Any] = {}
    for name in PASSED_ON:
        value = getattr(body, name, None)
        if value is not None:
            fields[name] = value
    messages: list[Message] = []
    if (system := _system(body.system)) is not None:
        messages.append({"role": "system", "content": system})
    for number, message in enumerate(body.messages):
        messages += _messages(message, f"messages.{number}")
    fields["messages"] = messages
    last = messages[-1] if messages else {}
    if last.get("role") == "assistant" and last["content"] and "tool_calls" not in last:
        # In this API a last turn of the assistant is the beginning of the answer.
        fields |= {"continue_final_message": True, "add_generation_prompt": False}
    if isinstance(body, MessagesBody) and body.stop_sequences is not None:
        fields["stop"] = body.stop_sequences
    fields |= _tools(body) | _thinking(body, fields.get("chat_template_kwargs") or {})
    output = body.output_config
    if output is not None and output.effort is not None:
        fields["reasoning_effort"] = output.effort
    if output is not None and output.format is not None:
        kind, schema = output.format.get("type"), output.format.get("schema")
        if kind != "json_schema":
            fault = f"output_config.format.type must be json_schema, got {str(kind)[:100]!r}"
            raise InvalidRequest(fault, field="output_config.format")
        fields["response_format"] = {"type": kind, "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    try:
        return ChatBody.model_validate(fields)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False)
        field = str(errors[0]["loc"][0])
        raise InvalidRequest(validation_message(errors), field=CHAT_NAMES.get(field, field)) from None


def _system(system: str | Sequence[Block] | None) -> str | None:
    """The system prompt without Claude Code's billing block, which differs in every call and would prevent prefix-cache
    hits."""
    if system is None or isinstance(system, str):
        return system
    blocks = [block for block in system if not (block.text or "").startswith(BILLING_HEADER)]
    return _text(blocks, "system") if blocks or not system else None


def _messages(message: AnthropicMessage, place: str) -> list[Message]:
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    if message.role == "assistant":
        return [_assistant(message.content, place)]
    # Results of tools are messages of their own, and come before what the user says to them.
    results: list[Message] = []
    texts: list[Block] = []
    for number, block in enumerate(message.content):
        if block.type != "tool_result":
            texts.append(block)
            continue
        if block.tool_use_id is None:
            raise InvalidRequest(f"{place}.content.{number}.tool_use_id: field required", field="messages")
        content = _text(block.content or "", f"{place}.content.{number}.content")
        results.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": content})
    if texts or not results:
        results.append({"role": message.role, "content": _text(texts, f"{place}.content")})
    return results


def _assistant(blocks: Sequence[Block], place: str) -> Message:
    message: Message = {"role": "assistant", "content": None}
    thoughts: list[str] = []
    texts: list[Block] = []
    calls: list[dict[str, Any]] = []
    for number, block in enumerate(blocks):
        if block.type == "thinking":
            thoughts.append(block.thinking or "")
        elif block.type == "tool_use":
            if block.id is None or block.name is None:
                missing = "id" if block.id is None else "name"
                raise InvalidRequest(f"{place}.content.{number}.{missing}: field required", field="messages")
            function = {"name": block.name, "arguments": exact_json.dumps(block.input or {}).decode()}
            calls.append({"id": block.id, "type": "function", "function": function})
        elif block.type != "redacted_thinking":
            texts.append(block)
    if texts or not calls:
        message["content"] = _text(texts, f"{place}.content")
    if thoughts:
        message["reasoning"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _text(content: str | Sequence[Block], place: str) -> str:
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for number, block in enumerate(content):
        name = place.partition(".")[0]
        if block.type != "text":
            message = f"{place}.{number}: blocks of type {block.type[:100]!r} are not supported here"
            raise InvalidRequest(message, field=name)
        if block.text is None:
            raise InvalidRequest(f"{place}.{number}.text: field required", field=name)
        texts.append(block.text)
    return "\n".join(texts)


def _tools(body: CountTokensBody) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if body.tools:
        fields["tools"] = [_tool(tool, f"tools.{number}") for number, tool in enumerate(body.tools)]
    choice = body.tool_choice
    if choice is None:
        return fields
    if choice.type == "tool":
        if choice.name is None:
            raise InvalidRequest("tool_choice.name: field required", field="tool_choice")
        fields["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    elif body.tools or choice.type == "any":
        fields["tool_choice"] = {"auto": "auto", "any": "required", "none": "none"}[choice.type]
    if choice.disable_parallel_tool_use:
        fields["parallel_tool_calls"] = False
    return fields


def _tool(tool: AnthropicTool, place: str) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        raise InvalidRequest(f"{place}.type: tools of type {tool.type[:100]!r} are not supported", field="tools")
    function: dict[str, Any] = {"name": tool.name, "description": tool.description}
    function |= {"parameters": tool.input_schema, "strict": tool.strict}
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def _thinking(body: CountTokensBody, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The template variables for `thinking`: chat templates switch it by enable_thinking."""
    if body.thinking is None or body.thinking.type == "adaptive":
        return {}
    is_enabled = body.thinking.type == "enabled"
    fields: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": is_enabled, **kwargs}}
    if not is_enabled:
        fields["include_reasoning"] = False
    elif body.thinking.budget_tokens is not None and not has_budget(body):
        fields[BUDGET] = body.thinking.budget_tokens
    return fields


def has_budget(body: CountTokensBody) -> bool:
    """Whether `body` bounds reasoning by vLLM's field, which must be enforced."""
    return getattr(body, BUDGET, None) is not None
