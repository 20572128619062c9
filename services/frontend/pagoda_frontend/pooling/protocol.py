"""The bodies for vectors, labels, scores and ranks. Shapes only, no engine."""

from typing import Any, Literal

from pydantic import AliasChoices, Field

from pagoda_frontend.openai.protocol import Bool, ChatMessage, Integer, Items, Number, RequestBody, Text, TokenIds


class PoolingBody(RequestBody):
    """Fields that all pooling bodies share."""

    model: Text | None = None
    add_special_tokens: Bool | None = None
    truncate_prompt_tokens: Integer | None = None
    """Keep this many tokens of each text; -1: as many as the model takes."""
    truncation_side: Literal["left", "right"] | None = None
    """The side where tokens are dropped; None is right for models that only pool, else left."""
    use_activation: Bool | None = None
    """Whether the model's activation is applied to labels and scores, and whether embeddings are normalised."""
    normalize: Bool | None = None
    """Whether embeddings are normalised; overrides use_activation."""
    priority: Integer | None = None
    timeout: Number | None = None
    """Seconds after which the request fails with 504 (Pagoda's own)."""
    cache_salt: Text | None = Field(None, max_length=128)
    request_id: Text | None = None
    user: Text | None = None


class InputBody(PoolingBody):
    """One text or several."""

    input: Text | Items[Text] | TokenIds | Items[TokenIds] | None = None
    messages: Items[ChatMessage] | None = None
    """A conversation instead of `input`, rendered by the chat template."""
    add_generation_prompt: Bool | None = None
    continue_final_message: Bool | None = None
    chat_template: Text | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    prompt_name: Text | None = None
    """Name of a prompt in the checkpoint's files, which is put before each text."""


class PoolBody(InputBody):
    """POST /pooling."""

    task: Literal["embed", "token_embed", "classify", "token_classify", "score", "sparse", "plugin"] | None = None
    """None: the model's first one."""
    dimensions: Integer | None = None
    encoding_format: Literal["float", "base64", "bytes", "bytes_only"] | None = None
    """As in /v1/embeddings."""
    embed_dtype: Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"] | None = None
    endianness: Literal["native", "big", "little"] | None = None


class ClassifyBody(InputBody):
    """POST /classify."""


class PairsBody(PoolingBody):
    """Fields of pairs of texts."""

    max_tokens_per_query: Integer | None = None
    """Maximum number of tokens that are kept of each query; 0 keeps all."""
    max_tokens_per_doc: Integer | None = None
    """Maximum number of tokens that are kept of each document; 0 keeps all."""


class ScoreBody(PairsBody):
    """POST /score: one text against several, or two lists of equal length in pairs."""

    text_1: Text | Items[Text] | None = Field(
        None, validation_alias=AliasChoices("text_1", "queries", "query", "data_1")
    )
    text_2: Text | Items[Text] | None = Field(
        None, validation_alias=AliasChoices("text_2", "documents", "items", "data_2")
    )


class RerankDocument(RequestBody):
    """A document with its text."""

    text: Text


class RerankBody(PairsBody):
    """POST /rerank."""

    query: Text
    documents: Items[Text | RerankDocument]
    top_n: Integer | None = None
    """Return this many of the best documents; None or 0 returns all."""
    return_documents: Bool | None = None


class CohereInput(RequestBody):
    """A text in parts."""

    content: Items[dict[str, Any]]


class CohereEmbedBody(PoolingBody):
    """POST /v2/embed."""

    texts: Items[Text] | None = None
    inputs: Items[CohereInput] | None = None
    input_type: Text | None = None
    """The name of a prompt of the checkpoint's files, or search_document, search_query, classification, clustering."""
    embedding_types: Items[Literal["float", "int8", "uint8", "binary", "ubinary", "base64"]] | None = None
    output_dimension: Integer | None = None
    max_tokens: Integer | None = None
    truncate: Literal["NONE", "START", "END"] | None = None
    """The side where a text that is too long is cut; None is END, as at Cohere."""
