"""The request bodies of OpenAI's HTTP API with vLLM's additions. Shapes only, no engine."""

from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Strict, create_model

from pagoda_common.params.fields import Kind
from pagoda_common.params.sampling_params import SAMPLING_FIELDS

# Numbers and booleans are taken as pydantic's lax mode takes them, as vLLM does: "5" and 5.0 are the integer 5.
Integer = int
Number = Annotated[float, Field(allow_inf_nan=False)]
Bool = bool
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
"""Values of OpenAI's API, Anthropic's API and vLLM; none turns thinking off."""
Text = Annotated[str, Strict()]
Item = TypeVar("Item")
Items: TypeAlias = Annotated[list[Item], Field(fail_fast=True)]
"""A list that stops validation at its first wrong item, instead of making an error for each."""
TokenIds = Items[Annotated[int, Strict()]]


SAMPLING_TYPES: dict[Kind, Any] = {
    "number": Number,
    "integer": Integer,
    "flag": Bool,
    "token_ids": Items[Integer],
    "texts": Items[Text],
}
"""Types in bodies by kind of sampling field; a field of kind "other" stands in its body."""


class RequestBody(BaseModel):
    """A body that tolerates fields it does not know, as vLLM does."""

    model_config = ConfigDict(extra="allow")


Body = TypeVar("Body", bound=RequestBody)


def with_sampling_fields(body: type[Body]) -> type[Body]:
    """Add to `body` every sampling field that chat completions and completions share and that it does not define.

    It defines fields with a special type, and fields that code reads by name.
    """
    missing: dict[str, Any] = {
        row.name: (SAMPLING_TYPES[row.kind] | None, None)
        for row in SAMPLING_FIELDS.values()
        if row.name_in("chat") == row.name_in("completions") == row.name and row.name not in body.model_fields
    }
    return create_model(body.__name__, __base__=body, __module__=body.__module__, __doc__=body.__doc__, **missing)


class StreamOptions(RequestBody):
    """What a stream contains besides text."""

    include_usage: Bool | None = None
    """Send a last chunk with the usage of the whole request."""
    continuous_usage_stats: Bool | None = None
    """Add the usage so far to every chunk."""


@with_sampling_fields
class GenerationBody(RequestBody):
    """Fields that completions and chat completions share."""

    model: Text | None = None
    n: Integer | None = None
    stream: Bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Integer | None = None
    stop: Text | Items[Text] | None = None
    logit_bias: dict[str, Number] | None = None
    add_special_tokens: Bool | None = None
    truncate_prompt_tokens: Integer | None = None
    """Keep this many tokens of the prompt; -1: as many as max_tokens leaves in the context."""
    truncation_side: Literal["left", "right"] | None = None
    """The side where tokens are dropped; None is left."""
    prompt_logprobs: Integer | None = None
    """Top log probabilities per prompt token; -1: the whole vocabulary."""
    logprob_token_ids: Items[Integer] | None = None
    """Show the log probabilities of these tokens instead of the likeliest ones."""
    response_format: dict[str, Any] | None = None
    """OpenAI's field: text, json_object, json_schema or structural_tag."""
    structured_outputs: dict[str, Any] | None = None
    """vLLM's field: exactly one of json, regex, choice, grammar, json_object and structural_tag."""
    vllm_xargs: dict[str, Any] | None = None
    """Arguments of logits processors."""
    return_token_ids: Bool | None = None
    return_tokens_as_token_ids: Bool | None = None
    echo: Bool | None = None
    use_beam_search: Bool | None = None
    length_penalty: Number | None = None
    early_stopping: Bool | Literal["never"] | None = None
    priority: Integer | None = None
    timeout: Number | None = None
    """Seconds after which the request fails with 504 (Pagoda's own)."""
    cache_salt: Text | None = Field(None, max_length=128)
    request_id: Text | None = None
    user: Text | None = None


def _given(prompt: Any) -> Any:
    """`prompt`, which must not be null. The sentence is vLLM's, whose clients know it."""
    if prompt is None:
        raise ValueError("Either prompt or prompt_embeds must be provided and non-empty. Here it is prompt, a text")
    return prompt


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: Annotated[Text | Items[Text] | TokenIds | Items[TokenIds], BeforeValidator(_given)]
    logprobs: Integer | None = None
    best_of: Integer | None = None
    thinking_token_budget: Integer | None = None
    """Maximum number of reasoning tokens before the end of reasoning is forced; -1 for no bound. All prompts must be in
    the same state of reasoning."""


class ContentPart(RequestBody):
    """One part of a message's content; only text is understood."""

    type: Text = "text"
    """text, or the equal input_text and output_text of Responses; a refusal has the field of that name."""
    text: Text | None = None
    refusal: Text | None = None


class CalledFunction(RequestBody):
    """The function that is called, and its arguments."""

    name: Text
    arguments: Text | dict[str, Any] | None = None
    """JSON text, or the object itself."""


class MessageToolCall(RequestBody):
    """One tool call of the assistant."""

    id: Text | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(RequestBody):
    """One message of a conversation. Other fields go to the chat template as they are."""

    role: Text
    """system, developer, user, assistant, tool, or another role that the chat template names."""
    content: Text | Items[Text | ContentPart] | None = None
    tool_calls: Items[MessageToolCall] | None = None
    """Tool calls of the assistant."""
    tool_call_id: Text | None = None
    """The call that a tool message answers."""
    reasoning: Text | None = None
    """The assistant's reasoning; `reasoning_content` is its older name."""


class EmbeddingBody(RequestBody):
    """POST /v1/embeddings."""

    model: Text | None = None
    input: Text | Items[Text] | TokenIds | Items[TokenIds] | None = None
    messages: Items[ChatMessage] | None = None
    """A conversation instead of `input`, rendered by the chat template (vLLM's)."""
    add_generation_prompt: Bool | None = None
    continue_final_message: Bool | None = None
    chat_template: Text | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    encoding_format: Literal["float", "base64", "bytes", "bytes_only"] | None = None
    """How each embedding is written; base64 and bytes use `embed_dtype`. bytes: the body has only the values, and the
    header `metadata` says where each embedding is; bytes_only: without the header."""
    embed_dtype: Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"] | None = None
    """Data type for base64 and bytes; None is float32."""
    endianness: Literal["native", "big", "little"] | None = None
    """Byte order for base64 and bytes; None is little."""
    dimensions: Integer | None = None
    """Length of an embedding: one that the model supports."""
    use_activation: Bool | None = None
    """False: embeddings are not normalised."""
    normalize: Bool | None = None
    """Older name of use_activation."""
    prompt_name: Text | None = None
    """Name of a prompt in the checkpoint's files, which is put before each text."""
    add_special_tokens: Bool | None = None
    truncate_prompt_tokens: Integer | None = None
    """Keep this many tokens of each input; -1: as many as fit the context."""
    truncation_side: Literal["left", "right"] | None = None
    """The side where tokens are dropped; None is right for models that only pool, else left."""
    priority: Integer | None = None
    timeout: Number | None = None
    """Seconds after which the request fails with 504 (Pagoda's own)."""
    cache_salt: Text | None = Field(None, max_length=128)
    request_id: Text | None = None
    user: Text | None = None


class Function(RequestBody):
    """A function that the model may call."""

    name: Text
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments, an object; None for a function without arguments."""
    strict: Bool | None = None
    """Make the arguments match the schema even where the model is free to call or not."""


class Tool(RequestBody):
    """One entry of `tools`."""

    type: Literal["function"]
    function: Function


class FunctionName(RequestBody):
    """The function of a named tool choice."""

    name: Text


class NamedToolChoice(RequestBody):
    """The model must call this tool."""

    type: Literal["function"] = "function"
    function: FunctionName


class AllowedTools(RequestBody):
    """Some of the tools, and whether one of them must be called."""

    mode: Literal["auto", "required"]
    tools: Items[NamedToolChoice]


class AllowedToolsChoice(RequestBody):
    """The model may call only these tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class ConversationBody(GenerationBody):
    """Fields of a chat completion besides its messages."""

    max_completion_tokens: Integer | None = None
    logprobs: Bool | None = None
    top_logprobs: Integer | None = None
    add_generation_prompt: Bool | None = None
    continue_final_message: Bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: Text | None = None
    """Jinja text; needs --trust-request-chat-template."""
    documents: Items[dict[str, Any]] | None = None
    """For chat templates that show documents."""
    tools: Items[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | AllowedToolsChoice | None = None
    """None means auto if there are tools."""
    parallel_tool_calls: Bool | None = None
    """False: at most one call in a message."""
    reasoning_effort: ReasoningEffort | None = None
    """A variable of the chat template; the value none also turns thinking off."""
    include_reasoning: Bool | None = None
    """False: the model reasons, but the reasoning is not shown."""
    thinking_token_budget: Integer | None = None
    """Maximum number of reasoning tokens before the end of reasoning is forced; -1 for no bound."""


class ChatBody(ConversationBody):
    """POST /v1/chat/completions."""

    messages: Items[ChatMessage]


class ChatBatchBody(ConversationBody):
    """POST /v1/chat/completions/batch."""

    messages: Items[Items[ChatMessage]]
    """Conversations, each of which is answered separately."""


class TokenizeBody(RequestBody):
    """POST /tokenize: a prompt, or a conversation."""

    model: Text | None = None
    prompt: Text | None = None
    messages: Items[ChatMessage] | None = None
    add_special_tokens: Bool | None = None
    add_generation_prompt: Bool | None = None
    continue_final_message: Bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: Text | None = None
    tools: Items[Tool] | None = None
    return_token_strs: Bool | None = None


class ReloadWeightsBody(RequestBody):
    """POST /reload_weights."""

    model: Text
    """Directory or hub id that the workers can reach."""
    revision: Text | None = None
    group: Annotated[int, Field(strict=True, ge=0, lt=2**32)] | None = None
    """Number of a worker group; None is all."""


class LoadLoraAdapterBody(RequestBody):
    """POST /v1/load_lora_adapter."""

    lora_name: Text
    """Name by which requests ask for the adapter, as for a model."""
    lora_path: Text
    """Directory or hub id that the workers can reach."""
    base_model_name: Text | None = None
    """Model that the adapter was made for; shown as its parent."""
    load_inplace: Bool | None = None
    """Replace the weights of an adapter of the same name."""


class UnloadLoraAdapterBody(RequestBody):
    """POST /v1/unload_lora_adapter."""

    lora_name: Text
    lora_int_id: Integer | None = None
    """vLLM's field; the name decides."""


class DetokenizeBody(RequestBody):
    """POST /detokenize."""

    model: Text | None = None
    tokens: TokenIds
