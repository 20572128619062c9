"""The response bodies that the OpenAPI document describes. Handlers write these shapes themselves."""

from typing import Any, Literal

from pydantic import BaseModel


class ErrorObject(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    """The field at fault."""
    code: int
    """The HTTP status."""


class ErrorAnswer(BaseModel):
    """Any error, in OpenAI's shape."""

    error: ErrorObject


class AnthropicErrorObject(BaseModel):
    """What went wrong."""

    type: str
    message: str


class AnthropicErrorAnswer(BaseModel):
    """Any error of /v1/messages."""

    type: Literal["error"]
    error: AnthropicErrorObject


class UnauthorizedAnswer(BaseModel):
    """The call has no valid API key."""

    error: Literal["Unauthorized"]


class ReadyAnswer(BaseModel):
    """GET /ready."""

    status: Literal["ready"]


class IsSleepingAnswer(BaseModel):
    """GET /is_sleeping."""

    is_sleeping: bool


class ReloadWeightsAnswer(BaseModel):
    """POST /reload_weights."""

    num_groups: int
    """Worker groups that hold the new weights."""
    seconds: float
    """Total seconds; the old weights served for most of them."""
    pause_s: float
    """Maximum seconds for which one group did not serve."""


class VersionAnswer(BaseModel):
    """GET /version."""

    version: str


class LoadAnswer(BaseModel):
    """GET /load."""

    server_load: int
    """Requests that are being answered."""


class ModelCard(BaseModel):
    """One name of the model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int
    permission: list[dict[str, Any]]


class ModelList(BaseModel):
    """GET /v1/models."""

    object: Literal["list"]
    data: list[ModelCard]


class TokenizeAnswer(BaseModel):
    """POST /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeAnswer(BaseModel):
    """POST /detokenize."""

    prompt: str


class TokenizerInfoAnswer(BaseModel):
    """GET /tokenizer_info: the content of tokenizer_config.json, and more."""

    tokenizer_class: str
    chat_template: str | None


class UsageAnswer(BaseModel):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionChoice(BaseModel):
    """One sequence."""

    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: str | None
    stop_reason: int | str | None


class CompletionAnswer(BaseModel):
    """POST /v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: UsageAnswer


class EmbeddingObject(BaseModel):
    """The embedding of one input."""

    index: int
    object: Literal["embedding"]
    embedding: list[float] | str
    """A text is base64 of little-endian float32."""
    num_pieces: int | None = None
    """Number of pieces of a text that exceeds the context; the embedding is the mean of their vectors."""


class EmbeddingAnswer(BaseModel):
    """POST /v1/embeddings."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[EmbeddingObject]
    """In the order of the inputs."""
    usage: UsageAnswer


class AssistantMessage(BaseModel):
    """The model's message: content, reasoning and tool calls."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    annotations: None
    audio: None
    function_call: None
    tool_calls: list[dict[str, Any]]
    """Empty when the model calls no tool."""
    reasoning: str | None


class ChatChoice(BaseModel):
    """One message."""

    index: int
    message: AssistantMessage
    logprobs: dict[str, Any] | None
    finish_reason: str | None
    stop_reason: int | str | None


class ChatAnswer(BaseModel):
    """POST /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: UsageAnswer


class ResponseAnswer(BaseModel):
    """POST /v1/responses: OpenAI's response object."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    model: str
    output: list[dict[str, Any]]
    error: dict[str, Any] | None
    incomplete_details: dict[str, Any] | None
    usage: dict[str, Any] | None


class ItemPage(BaseModel):
    """GET /v1/responses/{id}/input_items."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedResponse(BaseModel):
    """DELETE /v1/responses/{id}."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class MessagesUsage(BaseModel):
    """Tokens of a request."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int


class MessagesAnswer(BaseModel):
    """POST /v1/messages."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessagesUsage


class CountTokensAnswer(BaseModel):
    """POST /v1/messages/count_tokens."""

    input_tokens: int
