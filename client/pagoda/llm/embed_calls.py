"""LLM.embed, encode, classify, reward and score: many prompts, for programs without an event loop."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from tqdm import tqdm

from pagoda.llm.async_llm import AsyncLLM
from pagoda.llm.embedding import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
    by_token,
    check_pooling_params,
    check_pooling_task,
    pool_prompt,
    pooling_tasks,
    read_for_embedding,
    with_task,
)
from pagoda.llm.memory_calls import MemoryCalls
from pagoda.llm.prompts import Prompt, PromptInput
from pagoda_common.engine.similarity import SIMILARITIES, late_interaction
from pagoda_common.errors import InvalidRequest
from pagoda_common.params.pooling_params import POOLED, PoolingParams, PoolingTask

MAX_OPEN_REQUESTS = 2048
"""Prompts submitted at a time; the others wait here rather than in the engine's queue."""
PER_TOKEN = ("token_embed", "token_classify")


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
        """The embedding of each prompt, in their order.

        Args:
            prompts, use_tqdm, extras: as of `generate`.
            pooling_params: whether to normalise, and how many values to keep.

        Raises:
            InvalidRequest: a prompt or parameter is wrong, or the model does not embed; nothing was submitted then.
            PagodaError: the engine refused or failed a prompt, or is gone.
        """
        outputs = self._pool_all(prompts, pooling_params, "embed", use_tqdm, extras)
        for output in outputs:
            output.outputs = EmbeddingOutput(output.outputs.data.tolist())
        return outputs

    def encode(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        pooling_params: PoolingParams | None = None,
        *,
        pooling_task: PoolingTask | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        **extras: Any,
    ) -> list[PoolingRequestOutput]:
        """What a task makes of each prompt, as arrays; arguments and errors as of `embed`.

        Args:
            pooling_task: None takes that of the parameters, else the model's first one.
        """
        check_pooling_params(pooling_params, extras)
        asked = pooling_task or (None if pooling_params is None else pooling_params.task)
        default: PoolingTask = next(iter(pooling_tasks(self._async_llm.model_info)), "embed")
        task = default if asked is None else asked
        outputs = self._pool_all(prompts, pooling_params, task, use_tqdm, extras)
        if task in PER_TOKEN:
            for output in outputs:
                output.outputs = PoolingOutput(by_token(output))
        return outputs

    def classify(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        *,
        pooling_params: PoolingParams | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        **extras: Any,
    ) -> list[ClassificationRequestOutput]:
        """A probability for each label, for each prompt; arguments and errors as of `embed`."""
        outputs = self._pool_all(prompts, pooling_params, "classify", use_tqdm, extras)
        for output in outputs:
            output.outputs = ClassificationOutput(output.outputs.data.tolist())
        return outputs

    def reward(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        *,
        pooling_params: PoolingParams | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        **extras: Any,
    ) -> list[PoolingRequestOutput]:
        """A reward model's values, one row a token, without an activation unless the parameters ask for one."""
        params = pooling_params or PoolingParams(use_activation=False)
        outputs = self._pool_all(prompts, params, "token_classify", use_tqdm, extras)
        for output in outputs:
            output.outputs = PoolingOutput(by_token(output))
        return outputs

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        *,
        pooling_params: PoolingParams | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        truncate_prompt_tokens: int | None = None,
        **extras: Any,
    ) -> list[ScoringRequestOutput]:
        """A score for each pair: one text against several, or as many against as many.

        Of a model with one label it is that of the pair; of one that embeds, how alike the vectors are.

        Args:
            truncate_prompt_tokens: keep this many tokens of each pair; -1 is as many as the model takes.

        Raises:
            InvalidRequest: the texts do not make pairs, or the model neither scores nor embeds.
            PagodaError: the engine refused or failed a pair, or is gone.
        """
        check_pooling_params(pooling_params, extras)
        first = [data_1] if isinstance(data_1, str) else list(data_1)
        second = [data_2] if isinstance(data_2, str) else list(data_2)
        if not first or not second or len(first) not in (1, len(second)):
            text = f"data_1 has {len(first)} texts, must have 1 or as many as data_2, {len(second)}"
            raise InvalidRequest(text, field="data_1")
        first = first * len(second) if len(first) == 1 else first
        info, tokenizer = self._async_llm.model_info, self._async_llm.tokenizer
        most = info.max_model_len if truncate_prompt_tokens == -1 else truncate_prompt_tokens
        if "score" not in pooling_tasks(info):
            return self._alike(first, second, use_tqdm)
        prompts: list[PromptInput] = []
        params: list[PoolingParams] = []
        for one, other in zip(first, second, strict=True):
            ids, start = tokenizer.encode_within(one, pair=other, max_tokens=most)
            prompts.append({"prompt_token_ids": ids})
            given = pooling_params or PoolingParams()
            params.append(PoolingParams(task="score", use_activation=given.use_activation, second_text_start=start))
        outputs = self._pool_all(prompts, params, "score", use_tqdm, {})
        for output in outputs:
            output.outputs = ScoringOutput(float(output.outputs.data[0]))
        return outputs

    def _alike(self, first: list[str], second: list[str], use_tqdm: Any) -> list[ScoringRequestOutput]:
        tasks = pooling_tasks(self._async_llm.model_info)
        by_tokens = tasks[:1] == ("token_embed",)
        texts = list(dict.fromkeys([*first, *second]))
        outputs = self._pool_all(texts, None, "token_embed" if by_tokens else "embed", use_tqdm, {})
        found = dict(zip(texts, outputs, strict=True))
        alike = late_interaction if by_tokens else SIMILARITIES[self._async_llm.tokenizer.prompt_files.similarity]

        def value(text: str) -> Any:
            return by_token(found[text]) if by_tokens else found[text].outputs.data

        return [
            ScoringRequestOutput(
                request_id=found[other].request_id,
                outputs=ScoringOutput(alike(value(one), value(other))),
                prompt_token_ids=[*found[one].prompt_token_ids, *found[other].prompt_token_ids],
            )
            for one, other in zip(first, second, strict=True)
        ]

    def _pool_all(
        self,
        prompts: Any,
        params: PoolingParams | list[PoolingParams] | None,
        task: PoolingTask,
        use_tqdm: bool | Callable[..., Any],
        extras: dict[str, Any],
    ) -> list[PoolingRequestOutput]:
        if not isinstance(params, list):
            check_pooling_params(params, extras)
        self._check_awake()
        check_pooling_task(self._async_llm.model_info, task)
        read = read_for_embedding(prompts, tokenizer=self._async_llm.tokenizer, model_info=self._async_llm.model_info)
        each = params if isinstance(params, list) else [with_task(params, task)] * len(read)
        make_bar = use_tqdm if callable(use_tqdm) else tqdm
        with make_bar(total=len(read), desc="Processed prompts", disable=not use_tqdm, dynamic_ncols=True) as bar:
            return self._loop.run(_pool_all(self._async_llm, read, each, bar))


async def _pool_all(
    llm: AsyncLLM, prompts: list[Prompt], params: list[PoolingParams], bar: Any
) -> list[PoolingRequestOutput]:
    places = asyncio.Semaphore(MAX_OPEN_REQUESTS)

    async def pool(prompt: Prompt, one: PoolingParams) -> PoolingRequestOutput:
        async with places:
            output = await pool_prompt(llm.engine, llm.make_request(prompt, POOLED), one)
        bar.update()
        return output

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(pool(prompt, one)) for prompt, one in zip(prompts, params, strict=True)]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]
