"""LLM.embed: the embeddings of many prompts, for programs without an event loop."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from tqdm import tqdm

from pagoda.llm.async_llm import AsyncLLM
from pagoda.llm.embedding import EmbeddingRequestOutput, check_pooling_params, embed_prompt, read_for_embedding
from pagoda.llm.memory_calls import MemoryCalls
from pagoda.llm.prompts import Prompt, PromptInput
from pagoda_common.params.pooling_params import POOLED, PoolingParams

MAX_OPEN_REQUESTS = 2048
"""Prompts submitted at a time; the others wait here rather than in the engine's queue."""


class EmbedCalls(MemoryCalls):
    """For a class that has an AsyncLLM and the loop on which it runs."""

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
        read = read_for_embedding(prompts, tokenizer=self._async_llm.tokenizer, model_info=self._async_llm.model_info)
        make_bar = use_tqdm if callable(use_tqdm) else tqdm
        with make_bar(total=len(read), desc="Processed prompts", disable=not use_tqdm, dynamic_ncols=True) as bar:
            return self._loop.run(_embed_all(self._async_llm, read, pooling_params, bar))


async def _embed_all(
    llm: AsyncLLM, prompts: list[Prompt], params: PoolingParams | None, bar: Any
) -> list[EmbeddingRequestOutput]:
    places = asyncio.Semaphore(MAX_OPEN_REQUESTS)

    async def embed(prompt: Prompt) -> EmbeddingRequestOutput:
        async with places:
            output = await embed_prompt(llm.engine, llm.make_request(prompt, POOLED), params)
        bar.update()
        return output

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(embed(prompt)) for prompt in prompts]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]
