"""Embeddings for programs: what LLM.embed and AsyncLLM.embed give, in vLLM's shape, and how they get it."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from pagoda.llm.memory_calls import MemoryCalls
from pagoda.llm.prompts import PromptInput, as_prompt_list, read_prompts
from pagoda.llm.refusals import refuse_extras
from pagoda_common.errors import Code, InvalidRequest, PagodaError
from pagoda_common.params.pooling_params import POOLED, PoolingParams

if TYPE_CHECKING:
    from pagoda.llm.async_llm import AsyncLLM
    from pagoda.llm.loop_thread import LoopThread
    from pagoda.llm.prompts import Prompt

MAX_OPEN_REQUESTS = 2048
"""Prompts submitted at a time; the others wait here rather than in the engine's queue."""


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


def read_for_embedding(llm: "AsyncLLM", prompts: PromptInput | Sequence[PromptInput]) -> list["Prompt"]:
    """Prompts in token ids; each may fill the context.

    Raises:
        InvalidRequest: one is empty, too long or not a prompt.
    """
    return read_prompts(
        as_prompt_list(prompts), tokenizer=llm.tokenizer, model_info=llm.model_info, num_output_tokens=0
    )


async def embed_prompt(
    llm: "AsyncLLM", prompt: "Prompt", params: PoolingParams | None, *, request_id: str | None = None, priority: int = 0
) -> EmbeddingRequestOutput:
    """The embedding of one prompt; a cancelled call aborts its request.

    Raises:
        PagodaError: the engine refused or failed it.
    """
    request = llm.make_request(prompt, POOLED, request_id=request_id, priority=priority)
    request.pooling = params or PoolingParams()
    stream = llm.engine.submit(request)
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
        prompt_token_ids=prompt.token_ids,
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


class EmbedCalls(MemoryCalls):
    """For a class that has an AsyncLLM and the loop on which it runs."""

    _async_llm: "AsyncLLM"
    _loop: "LoopThread"

    def embed(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        *,
        pooling_params: PoolingParams | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        **extras: Any,
    ) -> list[EmbeddingRequestOutput]:
        """The embedding of each prompt, in their order: the final hidden state of its last token, normalised.

        Args:
            prompts, use_tqdm, extras: as of `generate`.
            pooling_params: whether to normalise.

        Raises:
            InvalidRequest: a prompt or parameter is wrong; nothing was submitted then.
            PagodaError: the engine refused or failed a prompt, or is gone.
        """
        check_pooling_params(pooling_params, extras)
        self._check_awake()
        read = read_for_embedding(self._async_llm, prompts)
        make_bar = use_tqdm if callable(use_tqdm) else tqdm
        with make_bar(total=len(read), desc="Processed prompts", disable=not use_tqdm, dynamic_ncols=True) as bar:
            return self._loop.run(_embed_all(self._async_llm, read, pooling_params, bar))


async def _embed_all(
    llm: "AsyncLLM", prompts: "list[Prompt]", params: PoolingParams | None, bar: Any
) -> list[EmbeddingRequestOutput]:
    places = asyncio.Semaphore(MAX_OPEN_REQUESTS)

    async def embed(prompt: "Prompt") -> EmbeddingRequestOutput:
        async with places:
            output = await embed_prompt(llm, prompt, params)
        bar.update()
        return output

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(embed(prompt)) for prompt in prompts]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]
