"""Bodies of /v1/responses: OpenAI's Responses API with vLLM's additions. Shapes only, no engine."""

from typing import Any, Literal

from pydantic import Field

from pagoda_common.params.fields import names_as_in_chat, names_by_chat_name
from pagoda_common.params.sampling_params import SAMPLING_FIELDS
from pagoda_frontend.openai.protocol import Bool, Integer, Items, Number, ReasoningEffort, RequestBody, Text


class ResponsePart(RequestBody):
    """One part of an item's content; only text is understood."""

    type: Text = "input_text"
    text: Text | None = None
    refusal: Text | None = None


class ResponseItem(RequestBody):
    """One item of the input: a message, a function call, its output, reasoning, or a reference to one of these."""

    type: Text | None = None
    """If absent: a message, or a reference if the item has only an id."""
    id: Text | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: Text | Items[ResponsePart] | None = None
    summary: Items[ResponsePart] | None = None
    """Summary of reasoning."""
    call_id: Text | None = None
    name: Text | None = None
    arguments: Text | None = None
    """JSON text."""
    output: Text | Items[ResponsePart] | None = None
    """Output of a function call."""


class ResponseTool(RequestBody):
    """A tool; only functions are understood."""

    type: Text
    name: Text | None = None
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: Bool | None = None


class ResponseToolChoice(RequestBody):
    """A function that must be called, or the tools that may be."""

    type: Text
    name: Text | None = None
    mode: Literal["auto", "required"] | None = None
    tools: Items[ResponseTool] | None = None


class ResponseFormat(RequestBody):
    """The format of the answer's text."""

    type: Text
    name: Text | None = None
    description: Text | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: Bool | None = None


class ResponseText(RequestBody):
    """Format of the answer's text."""

    format: ResponseFormat | None = None
    verbosity: Text | None = None


class ResponseReasoning(RequestBody):
    """How much the model is to think."""

    effort: ReasoningEffort | None = None
    summary: Text | None = None


class ResponsesBody(RequestBody):
    """POST /v1/responses."""

    input: Text | Items[ResponseItem]
    model: Text | None = None
    instructions: Text | None = None
    previous_response_id: Text | None = None
    stream: Bool | None = None
    store: Bool | None = None
    background: Bool | None = None
    tools: Items[ResponseTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponseToolChoice | None = None
    parallel_tool_calls: Bool | None = None
    text: ResponseText | None = None
    reasoning: ResponseReasoning | None = None
    max_output_tokens: Integer | None = None
    max_tool_calls: Integer | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_logprobs: Integer | None = None
    include: Items[Text] | None = None
    metadata: dict[str, Text] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    user: Text | None = None
    thinking_token_budget: Integer | None = None
    """Maximum number of reasoning tokens before the end of reasoning is forced; -1 for no bound (vLLM's)."""
    service_tier: Text | None = None
    prompt_cache_key: Text | None = None
    safety_identifier: Text | None = None
    enable_response_messages: Bool | None = None
    """Return prompt and output as the model sees them, special tokens included (vLLM's)."""


LOGPROBS = "top_logprobs"
"""Value that a conversation takes together with a separate flag."""

PASSED_ON = (
    *(name for name in names_as_in_chat(SAMPLING_FIELDS, "responses") if name != LOGPROBS),
    "model",
    "priority",
    "timeout",
    "cache_salt",
    "include_reasoning",
    "thinking_token_budget",
    "chat_template_kwargs",
    "parallel_tool_calls",
    "user",
)
"""Fields that have the same name in a conversation; those that are not in OpenAI's API are vLLM's."""

CHAT_NAMES = {
    **names_by_chat_name(SAMPLING_FIELDS, "responses"),
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
"""Fields of a conversation, and the fields of this body that give their values."""
