"""Turns a Responses body into the conversation that answers it. Pure functions."""

from collections.abc import Callable, Sequence
from typing import Any

from pydantic import ValidationError

from pagoda_common.errors import InvalidRequest
from pagoda_frontend.openai.protocol import ChatBody
from pagoda_frontend.requests.errors import validation_message
from pagoda_frontend.responses.protocol import (
    CHAT_NAMES,
    PASSED_ON,
    ResponseItem,
    ResponsePart,
    ResponsesBody,
    ResponseTool,
    ResponseToolChoice,
)

Message = dict[str, Any]
LOGPROBS = "message.output_text.logprobs"
"""Value of `include` that asks for log probabilities."""
TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
NOT_SUPPORTED = ("conversation", "prompt")


def chat_body_of(body: ResponsesBody, messages: Sequence[Message]) -> ChatBody:
    """The conversation that answers `body`, after `messages`: those of earlier turns and the body's own.

    Raises:
        InvalidRequest: a field asks for something that is not supported; `field` names it.
    """
    extra = body.model_extra or {}
    for name in NOT_SUPPORTED:
        if extra.get(name) is not None:
            raise InvalidRequest(f"{name} is not supported", field=name)
    fields: dict[str, Any] = {}
    for name in PASSED_ON:
        value = getattr(body, name, None)
        if value is not None:
            fields[name] = value
    instructions = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
    fields["messages"] = [*instructions, *messages]
    if body.max_output_tokens is not None:
        fields["max_completion_tokens"] = body.max_output_tokens
    if body.truncation == "auto":
        fields["truncate_prompt_tokens"] = -1
    if body.reasoning is not None and body.reasoning.effort is not None:
        fields["reasoning_effort"] = body.reasoning.effort
    if body.top_logprobs or LOGPROBS in (body.include or ()):
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    fields |= _tools(body) | _response_format(body)
    try:
        return ChatBody.model_validate(fields)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False)
        field = str(errors[0]["loc"][0])
        raise InvalidRequest(validation_message(errors), field=CHAT_NAMES.get(field, field)) from None


def add_input(
    messages: list[Message], given: str | Sequence[ResponseItem], stored_items: Callable[[], dict[str, dict[str, Any]]]
) -> None:
    """Append the items `given` to `messages`, the conversation so far.

    Args:
        stored_items: returns the items that may be referred to, by id.

    Raises:
        InvalidRequest: an item is not supported; the message names its place.
    """
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
        return
    known: dict[str, dict[str, Any]] | None = None
    for number, item in enumerate(given):
        place = f"input.{number}"
        kind = item.type
        if kind is None:
            kind = "item_reference" if item.id is not None and item.role is None else "message"
        if kind == "item_reference":
            known = stored_items() if known is None else known
            if item.id not in known:
                raise InvalidRequest(f"{place}.id: no item {item.id!r} is stored", field="input")
            item = ResponseItem.model_validate(known[item.id])
            kind = item.type or ""
        _add(messages, item, kind, place)


def _add(messages: list[Message], item: ResponseItem, kind: str, place: str) -> None:
    if kind == "message":
        if item.role is None:
            raise InvalidRequest(f"{place}.role: field required", field="input")
        if item.content is None:
            raise InvalidRequest(f"{place}.content: field required", field="input")
        content = _content(item.content, f"{place}.content")
        if item.role == "assistant":
            _assistant(messages, "content")["content"] = content
        else:
            messages.append({"role": item.role, "content": content})
    elif kind == "reasoning":
        parts = item.content if item.content else item.summary or []
        _assistant(messages, "reasoning", "content", "tool_calls")["reasoning"] = _content(parts, f"{place}.content")
    elif kind == "function_call":
        for name in ("call_id", "name", "arguments"):
            if getattr(item, name) is None:
                raise InvalidRequest(f"{place}.{name}: field required", field="input")
        function = {"name": item.name, "arguments": item.arguments}
        message = _assistant(messages)
        message.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})
    elif kind == "function_call_output":
        if item.call_id is None or item.output is None:
            missing = "call_id" if item.call_id is None else "output"
            raise InvalidRequest(f"{place}.{missing}: field required", field="input")
        content = _content(item.output, f"{place}.output")
        messages.append({"role": "tool", "tool_call_id": item.call_id, "content": content})
    else:
        raise InvalidRequest(f"{place}.type: items of type {kind!r} are not supported", field="input")


def _assistant(messages: list[Message], *filled: str) -> Message:
    """The assistant's message to continue; a new one if there is none or if it already has one of the fields `filled`.
    Reasoning, text and calls of one turn are separate items in Responses, but one message in a conversation."""
    last = messages[-1] if messages else None
    if last is None or last["role"] != "assistant" or any(last.get(name) is not None for name in filled):
        last = {"role": "assistant", "content": None}
        messages.append(last)
    return last


def _content(content: str | Sequence[ResponsePart], place: str) -> str:
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for number, part in enumerate(content):
        if part.type == "refusal":
            texts.append(part.refusal or "")
        elif part.type not in TEXT_PARTS:
            message = f"{place}.{number}: parts of type {part.type!r} are not supported yet"
            raise InvalidRequest(message, field="input")
        elif part.text is None:
            raise InvalidRequest(f"{place}.{number}.text: field required", field="input")
        else:
            texts.append(part.text)
    return "\n".join(texts)


def _tools(body: ResponsesBody) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    tools = [_tool(tool, f"tools.{number}") for number, tool in enumerate(body.tools or ())]
    choice = body.tool_choice
    if isinstance(choice, ResponseToolChoice):
        if choice.type == "allowed_tools":
            allowed = {tool.name for tool in choice.tools or ()}
            tools = [tool for tool in tools if tool["function"]["name"] in allowed]
            choice = choice.mode or "auto"
        elif choice.type != "function":
            raise InvalidRequest(f"tool_choice.type {choice.type!r} is not supported", field="tool_choice")
    if tools:
        fields["tools"] = tools
    if isinstance(choice, ResponseToolChoice):
        fields["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    elif choice is not None and (tools or choice == "required"):
        fields["tool_choice"] = choice
    return fields


def _tool(tool: ResponseTool, place: str) -> dict[str, Any]:
    if tool.type != "function":
        raise InvalidRequest(f"{place}.type: tools of type {tool.type!r} are not supported", field="tools")
    if tool.name is None:
        raise InvalidRequest(f"{place}.name: field required", field="tools")
    function: dict[str, Any] = {"name": tool.name, "description": tool.description}
    function |= {"parameters": tool.parameters, "strict": tool.strict}
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def _response_format(body: ResponsesBody) -> dict[str, Any]:
    asked = body.text.format if body.text is not None else None
    if asked is None or asked.type == "text":
        return {}
    if asked.type != "json_schema":
        return {"response_format": {"type": asked.type, **(asked.model_extra or {})}}
    schema: dict[str, Any] = {
        "name": asked.name,
        "description": asked.description,
        "schema": asked.schema_,
        "strict": asked.strict,
    }
    shown = {name: value for name, value in schema.items() if value is not None}
    return {"response_format": {"type": "json_schema", "json_schema": shown}}
