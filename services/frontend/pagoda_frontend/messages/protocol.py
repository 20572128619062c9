"""Bodies of /v1/messages: Anthropic's Messages API with vLLM's additions. Shapes only, no engine."""

from typing import Any, Literal

from pagoda_common.params.fields import names_as_in_chat, names_by_chat_name
from pagoda_common.params.sampling_params import SAMPLING_FIELDS
from pagoda_frontend.openai.protocol import Bool, Integer, Items, Number, ReasoningEffort, RequestBody, Text


class Block(RequestBody):
    """One block of a message's content. Which fields it has depends on its type."""

    type: Text
    text: Text | None = None
    thinking: Text | None = None
    id: Text | None = None
    """Id of a tool's use."""
    name: Text | None = None
    input: dict[str, Any] | None = None
    tool_use_id: Text | None = None
    """The use that a result belongs to."""
    content: "Text | Items[Block] | None" = None
    """Content of a tool's result."""
    is_error: Bool | None = None


class AnthropicMessage(RequestBody):
    """One turn."""

    role: Literal["user", "assistant", "system"]
    content: Text | Items[Block]


class AnthropicTool(RequestBody):
    """A tool that the client runs; those that Anthropic's servers run are not understood."""

    name: Text
    type: Text | None = None
    description: Text | None = None
    input_schema: dict[str, Any] | None = None
    strict: Bool | None = None


class AnthropicToolChoice(RequestBody):
    """Whether and which tools are used."""

    type: Literal["auto", "any", "tool", "none"]
    name: Text | None = None
    disable_parallel_tool_use: Bool | None = None


class Thinking(RequestBody):
    """Whether the model is to think before it answers."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Integer | None = None


class OutputConfig(RequestBody):
    """Format of the answer."""

    format: dict[str, Any] | None = None
    effort: ReasoningEffort | None = None


class CountTokensBody(RequestBody):
    """POST /v1/messages/count_tokens."""

    messages: Items[AnthropicMessage]
    model: Text | None = None
    system: Text | Items[Block] | None = None
    tools: Items[AnthropicTool] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None


class MessagesBody(CountTokensBody):
    """POST /v1/messages."""

    max_tokens: Integer
    stream: Bool | None = None
    stop_sequences: Items[Text] | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: Integer | None = None
    metadata: dict[str, Any] | None = None
    service_tier: Text | None = None
    thinking_token_budget: Integer | None = None
    """vLLM's field: overrides thinking.budget_tokens, and is refused where it cannot be enforced."""


BUDGET = "thinking_token_budget"

PASSED_ON = (
    *names_as_in_chat(SAMPLING_FIELDS, "messages"),
    "model",
    "priority",
    "timeout",
    "cache_salt",
    "chat_template_kwargs",
    BUDGET,
)
"""Fields that have the same name in a conversation; those that are not in Anthropic's API are vLLM's."""

CHAT_NAMES = {
    **names_by_chat_name(SAMPLING_FIELDS, "messages"),
    "max_completion_tokens": "max_tokens",
    "response_format": "output_config.format",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "reasoning_effort": "output_config.effort",
    BUDGET: "thinking.budget_tokens",
}
"""Fields of a conversation, and the fields of this body that give their values."""
