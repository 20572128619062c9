"""Converts prompts, conversations and answers of pagoda.v1.Inference. Pure functions, except for the tokenizer."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ValidationError

from pagoda.v1 import inference_pb2, types_pb2
from pagoda_common.engine.convert import plain_values, structured_outputs_from_proto
from pagoda_common.errors import InvalidRequest
from pagoda_common.params.outputs import HypothesisLogprobs
from pagoda_common.params.sampling_params import SAMPLING_FIELDS
from pagoda_common.text import exact_json
from pagoda_frontend.conversation.message import CollectedMessage, MessageDelta
from pagoda_frontend.grpc.convert import finish_number, logprobs_to_proto
from pagoda_frontend.openai.protocol import ChatBody, TokenizeBody
from pagoda_frontend.requests.errors import validation_message
from pagoda_frontend.requests.prompts import Prompts

Body = TypeVar("Body", bound=BaseModel)

TOOL_CHOICES: dict[inference_pb2.ToolChoice, str] = {
    inference_pb2.TOOL_CHOICE_NONE: "none",
    inference_pb2.TOOL_CHOICE_AUTO: "auto",
    inference_pb2.TOOL_CHOICE_REQUIRED: "required",
}
CHAT_FIELDS = {name: row for row in SAMPLING_FIELDS.values() if (name := row.name_in("chat")) is not None}
"""Sampling fields by their names in a conversation."""
BUDGET = "thinking_token_budget"
PROTO_NAMES = {
    **{name: row.proto for name, row in CHAT_FIELDS.items() if row.proto not in (None, name)},
    "response_format": "response_format_json",
    "chat_template_kwargs": "chat_template_kwargs_json",
}
"""Fields of a body, and the message fields that give their values."""


async def prompt_of(request: inference_pb2.GenerateRequest, prompts: Prompts) -> tuple[list[int], str]:
    """The prompt's token ids, and the field that it was given in.

    Raises:
        InvalidRequest: there is none, or it is wrong.
    """
    field = request.WhichOneof("prompt")
    if field == "text":
        return await prompts.from_text(request.text, add_special_tokens=True, field=field), field
    if field == "token_ids":
        return prompts.from_token_ids(request.token_ids.ids, field=field), field
    if field == "chat":
        body = _validated(ChatBody, {"messages": messages_from_proto(request.chat.messages)})
        return await prompts.from_messages(body.messages), "messages"
    raise InvalidRequest("one of text, token_ids and chat must be given", field="prompt")


def chat_body_from_proto(request: inference_pb2.ChatRequest) -> ChatBody:
    """`request` as the body that /v1/chat/completions would get.

    Raises:
        InvalidRequest: a value is of no use; `field` names it.
    """
    fields = _sampling(request.sampling_params)
    fields["messages"] = messages_from_proto(request.messages)
    for name in ("stop", "bad_words"):
        if values := list(getattr(request, name)):
            fields[name] = values
    for name in ("skip_special_tokens", "parallel_tool_calls", "include_reasoning", "add_generation_prompt", BUDGET):
        if request.HasField(name):
            fields[name] = getattr(request, name)
    for name in ("model", "priority", "cache_salt", "reasoning_effort", "continue_final_message"):
        if value := getattr(request, name):
            fields[name] = value
    if request.include_stop_str_in_output:
        fields["include_stop_str_in_output"] = True
    if request.tools:
        fields["tools"] = tools_from_proto(request.tools)
    if request.HasField("tool_choice_function"):
        fields["tool_choice"] = {"type": "function", "function": {"name": request.tool_choice_function}}
    elif request.tool_choice != inference_pb2.TOOL_CHOICE_UNSPECIFIED:
        if request.tool_choice not in TOOL_CHOICES:
            message = f"tool_choice {request.tool_choice} is not known, must be at most {max(TOOL_CHOICES)}"
            raise InvalidRequest(message, field="tool_choice")
        fields["tool_choice"] = TOOL_CHOICES[request.tool_choice]
    if request.response_format_json:
        fields["response_format"] = json_object(request.response_format_json, "response_format_json")
    if request.chat_template_kwargs_json:
        kwargs = json_object(request.chat_template_kwargs_json, "chat_template_kwargs_json")
        fields["chat_template_kwargs"] = kwargs
    return _validated(ChatBody, fields)


def tokenize_body_from_proto(request: inference_pb2.TokenizeRequest) -> TokenizeBody:
    """`request` as the body that /tokenize would get.

    Raises:
        InvalidRequest: a value is of no use; `field` names it.
    """
    fields: dict[str, Any] = {"model": request.model or None, "return_token_strs": request.return_token_strs}
    if request.messages:
        if request.text:
            raise InvalidRequest("text must be empty where there are messages", field="text")
        fields |= {"messages": messages_from_proto(request.messages), "tools": tools_from_proto(request.tools) or None}
    else:
        fields["prompt"] = request.text
    for name in ("add_special_tokens", "add_generation_prompt"):
        if request.HasField(name):
            fields[name] = getattr(request, name)
    if request.chat_template_kwargs_json:
        kwargs = json_object(request.chat_template_kwargs_json, "chat_template_kwargs_json")
        fields["chat_template_kwargs"] = kwargs
    return _validated(TokenizeBody, fields)


def messages_from_proto(messages: Iterable[inference_pb2.ChatMessage]) -> list[dict[str, Any]]:
    """Messages as JSON of the HTTP API."""
    shown = []
    for message in messages:
        fields: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.tool_calls:
            fields["content"] = message.content or None
            fields["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in message.tool_calls
            ]
        for name in ("tool_call_id", "reasoning", "name"):
            if value := getattr(message, name):
                fields[name] = value
        shown.append(fields)
    return shown


def tools_from_proto(tools: Iterable[inference_pb2.Tool]) -> list[dict[str, Any]]:
    """Tools as JSON of the HTTP API; raises InvalidRequest when parameters are not a JSON object."""
    shown = []
    for number, tool in enumerate(tools):
        function: dict[str, Any] = {"name": tool.name}
        if tool.description:
            function["description"] = tool.description
        if tool.parameters_json:
            function["parameters"] = json_object(tool.parameters_json, f"tools.{number}.parameters_json", "tools")
        if tool.HasField("strict"):
            function["strict"] = tool.strict
        shown.append({"type": "function", "function": function})
    return shown


def json_object(text: str, name: str, field: str | None = None) -> dict[str, Any]:
    """The JSON object in `text`.

    Raises:
        InvalidRequest: it is not a JSON object; `field` (or else `name`) names it.
    """
    try:
        value = exact_json.loads(text)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"{name} is not valid JSON: {error}", field=field or name) from None
    if not isinstance(value, dict):
        raise InvalidRequest(f"{name} must be a JSON object, got {type(value).__name__}", field=field or name)
    return value


def message_delta_to_proto(
    delta: MessageDelta, *, request_id: str, offset: int, usage: inference_pb2.Usage
) -> inference_pb2.ChatResponse:
    """One response of the stream; `offset`: of its first token; `usage` is sent with the message's last response."""
    response = inference_pb2.ChatResponse(
        request_id=request_id,
        index=delta.index,
        reasoning=delta.reasoning,
        content=delta.content,
        token_ids=delta.token_ids,
        offset=offset,
        finish_reason=finish_number(delta.finish_reason),
    )
    for call in delta.tool_calls:
        response.tool_calls.add(index=call.index, id=call.id or "", name=call.name or "", arguments=call.arguments)
    response.logprobs.extend(map(logprobs_to_proto, delta.logprobs or ()))
    if delta.finish_reason is not None:
        _set_end(response, delta.stop_reason, usage, delta.source.hypothesis if delta.source is not None else None)
    return response


def message_to_proto(
    message: CollectedMessage, *, request_id: str, usage: inference_pb2.Usage
) -> inference_pb2.ChatResponse:
    """A whole message."""
    response = inference_pb2.ChatResponse(
        request_id=request_id,
        index=message.index,
        reasoning=message.reasoning or "",
        content=message.content or "",
        token_ids=message.token_ids,
        finish_reason=finish_number(message.finish_reason),
    )
    for index, call in enumerate(message.tool_calls):
        response.tool_calls.add(index=index, id=call.id, name=call.name, arguments=call.arguments)
    response.logprobs.extend(map(logprobs_to_proto, message.logprobs))
    _set_end(response, message.stop_reason, usage, message.hypothesis)
    return response


def _set_end(
    response: inference_pb2.ChatResponse,
    stop_reason: int | str | None,
    usage: inference_pb2.Usage,
    hypothesis: HypothesisLogprobs | None,
) -> None:
    if hypothesis is not None:
        response.cumulative_logprob = hypothesis.cumulative_logprob
    if isinstance(stop_reason, str):
        response.stop_string = stop_reason
    elif stop_reason is not None:
        response.stop_token_id = stop_reason
    response.usage.CopyFrom(usage)


def _sampling(params: types_pb2.SamplingParams) -> dict[str, Any]:
    if params.bad_words_token_ids:
        raise InvalidRequest("a conversation takes bad_words, not bad_words_token_ids", field="bad_words_token_ids")
    given = plain_values(params)
    fields = {name: given[row.name] for name, row in CHAT_FIELDS.items() if row.name in given}
    if "top_logprobs" in fields:
        fields["logprobs"] = True
    if params.logit_bias:
        fields["logit_bias"] = {str(token_id): bias for token_id, bias in params.logit_bias.items()}
    if params.extra_args_json:
        fields["vllm_xargs"] = json_object(params.extra_args_json, "extra_args_json")
    if params.HasField("structured_output"):
        constraint = asdict(structured_outputs_from_proto(params.structured_output))
        constraint.pop("start_after_token_ids", None)
        fields["structured_outputs"] = {name: value for name, value in constraint.items() if value is not None}
    return fields


def _validated(body_type: type[Body], fields: dict[str, Any]) -> Body:
    try:
        return body_type.model_validate(fields)
    except ValidationError as error:
        errors: Sequence[Any] = error.errors(include_url=False, include_context=False)
        raise InvalidRequest(validation_message(errors), field=str(errors[0]["loc"][0])) from None
