"""Embeddings for programs: what LLM.embed and AsyncLLM.embed give, in vLLM's shape, and how they get it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pagoda.llm.prompts import Prompt, PromptInput, as_prompt_list, read_prompts
from pagoda.options.refusals import refuse_extras
from pagoda.v1 import types_pb2
from pagoda_common.engine.client import EngineClient, EngineRequest
from pagoda_common.errors import Code, InvalidRequest, PagodaError
from pagoda_common.params.pooling_params import PoolingParams
from pagoda_common.text.tokenizer import Tokenizer


@dataclass(slots=True)
class EmbeddingOutput:
    """One embedding."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """Its values."""
        return len(self.embedding)


@dataclass(slots=True)
class EmbeddingRequestOutput:
    """A prompt and its embedding."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
    finished: bool = True


def read_for_embedding(
    prompts: PromptInput | Sequence[PromptInput], *, tokenizer: Tokenizer, model_info: types_pb2.ModelInfo
) -> list[Prompt]:
    """Prompts in token ids; each may fill the context.

    Raises:
        InvalidRequest: one is empty, too long or not a prompt.
    """
    return read_prompts(as_prompt_list(prompts), tokenizer=tokenizer, model_info=model_info, num_output_tokens=0)


async def embed_prompt(
    engine: EngineClient, request: EngineRequest, params: PoolingParams | None
) -> EmbeddingRequestOutput:
    """The embedding of one prompt; a cancelled call aborts its request.

    Args:
        request: made with POOLED; it has not been submitted.

    Raises:
        PagodaError: the engine refused or failed it.
    """
    request.pooling = params or PoolingParams()
    stream = engine.submit(request)
    try:
        (output,) = await stream.get()
    finally:
        stream.abort()  # nothing, unless the wait for it was cancelled
    if output.error is not None:
        raise output.error
    if output.embedding is None:
        raise PagodaError("the request was aborted", code=Code.CANCELLED)
    return EmbeddingRequestOutput(
        request_id=request.request_id,
        outputs=EmbeddingOutput(output.embedding.tolist()),
        prompt_token_ids=list(request.prompt_token_ids),
        num_cached_tokens=output.num_cached_tokens,
    )


def check_pooling_params(params: Any, extras: dict[str, Any]) -> None:
    """Refuse what vLLM's call takes and this one does not.

    Raises:
        InvalidRequest: `field` names it.
    """
    refuse_extras(extras)
    if params is not None and not isinstance(params, PoolingParams):
        raise InvalidRequest(f"pooling_params must be PoolingParams, got {params!r}"[:300], field="pooling_params")
