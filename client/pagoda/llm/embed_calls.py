"""LLM.embed, encode, classify, reward and score: many prompts, for programs without an event loop."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from tqdm import tqdm

from pagoda.llm.async_llm import AsyncLLM
from pagoda.llm.embedding import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingInput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
    as_embedding,
    by_token,
    check_pooling_params,
    check_pooling_task,
    pooling_tasks,
    read_for_pooling,
    refusal_of,
    with_task,
)
from pagoda.llm.memory_calls import MemoryCalls
from pagoda.llm.prompts import PromptInput, tokenization_options
from pagoda_common.engine.similarity import SIMILARITIES, late_interaction
from pagoda_common.errors import InvalidRequest
from pagoda_common.params.pooling_params import PoolingParams, PoolingTask
from pagoda_common.text.pooling_prompts import PromptMaker, pairs_of

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
        """Embed each prompt; outputs are in the order of the prompts.

        Args:
            prompts: as in `generate`.
            use_tqdm: as in `generate`.
            pooling_params: whether to normalise, and how many values to keep.
            extras: prompt_name (a prompt of the checkpoint's files, put before each text; None takes the files'
                default), truncate_prompt_tokens, tokenization_kwargs with add_special_tokens and
                truncate_prompt_tokens, and those of `generate`.

        Raises:
            InvalidRequest: a prompt or parameter is wrong, or the model does not embed. Nothing was submitted then.
            PagodaError: the engine refused or failed a prompt, or is lost.
        """
        outputs = self._pool_all(prompts, pooling_params, "embed", use_tqdm, extras)
        return [as_embedding(output) for output in outputs]

    def encode(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        pooling_task: PoolingTask | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        **extras: Any,
    ) -> list[PoolingRequestOutput]:
        """Run a pooling task on each prompt; results are arrays. Arguments and errors as in `embed`.

        Args:
            pooling_params: one for all prompts, or one per prompt.
            pooling_task: None takes the task of the parameters, or else the model's first task.
        """
        single = pooling_params if isinstance(pooling_params, PoolingParams) else None
        asked = pooling_task or (None if single is None else single.task)
        default: PoolingTask = next(iter(pooling_tasks(self._async_llm.model_info)), "embed")
        task = default if asked is None else asked
        outputs = self._pool_all(prompts, pooling_params, task, use_tqdm, extras)
        is_lexical = task == "token_classify" and not self._async_llm.model_info.labels
        if task in PER_TOKEN and not is_lexical:
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
        """The probability of each label, for each prompt. Arguments and errors as in `embed`."""
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
        """A reward model's values, one row per token. Arguments and errors as in `embed`."""
        outputs = self._pool_all(prompts, pooling_params, "token_classify", use_tqdm, extras)
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
        """Score pairs of texts: one against several, or two lists of equal length.

        A model with one label scores each pair. A model that embeds compares the two vectors.

        Args:
            truncate_prompt_tokens: keep this many tokens of each pair; -1 keeps as many as the model takes.

        Raises:
            InvalidRequest: the lists have different lengths, or the model neither scores nor embeds.
            PagodaError: the engine refused or failed a pair, or is lost.
        """
        check_pooling_params(pooling_params, extras)
        first = [data_1] if isinstance(data_1, str) else list(data_1)
        second = [data_2] if isinstance(data_2, str) else list(data_2)
        pairs = pairs_of(first, second, field="data_1", other="data_2")
        llm, params = self._async_llm, pooling_params or PoolingParams()
        maker = llm.prompt_maker(
            "score",
            truncate_prompt_tokens=truncate_prompt_tokens,
            max_query_tokens=params.max_query_tokens,
            max_document_tokens=params.max_document_tokens,
        )
        tasks = pooling_tasks(llm.model_info)
        if "score" not in tasks:
            if "embed" not in tasks and "token_embed" not in tasks:
                raise refusal_of(llm.model_info, "score")
            return self._alike(pairs, maker, use_tqdm)
        self._check_awake()
        read = [PoolingInput(made) for made in maker.make_all(pairs)]
        outputs = self._pool_inputs(read, [with_task(params, "score")] * len(read), use_tqdm)
        for output in outputs:
            output.outputs = ScoringOutput(float(output.outputs.data[0]))
        return outputs

    def _alike(self, pairs: list[tuple[str, str]], maker: PromptMaker, use_tqdm: Any) -> list[ScoringRequestOutput]:
        self._check_awake()
        pairs = [maker.cut_pair(*pair) for pair in pairs]
        tasks = pooling_tasks(self._async_llm.model_info)
        by_tokens = tasks[:1] == ("token_embed",)
        texts = list(dict.fromkeys(text for pair in pairs for text in pair))
        read = read_for_pooling(list(texts), replace(maker, prefix=""))
        params = PoolingParams(task="token_embed" if by_tokens else "embed")
        found = dict(zip(texts, self._pool_inputs(read, [params] * len(read), use_tqdm), strict=True))
        alike = late_interaction if by_tokens else SIMILARITIES[self._async_llm.tokenizer.prompt_files.similarity]

        def value(text: str) -> Any:
            return by_token(found[text]) if by_tokens else found[text].outputs.data

        return [
            ScoringRequestOutput(
                request_id=found[other].request_id,
                outputs=ScoringOutput(alike(value(one), value(other))),
                prompt_token_ids=[*found[one].prompt_token_ids, *found[other].prompt_token_ids],
            )
            for one, other in pairs
        ]

    def _pool_all(
        self,
        prompts: Any,
        params: PoolingParams | Sequence[PoolingParams] | None,
        task: PoolingTask,
        use_tqdm: bool | Callable[..., Any],
        extras: dict[str, Any],
    ) -> list[PoolingRequestOutput]:
        options: dict[str, Any] = {
            name: extras.pop(name) for name in ("prompt_name", "truncate_prompt_tokens") if name in extras
        }
        options |= tokenization_options(extras.pop("tokenization_kwargs", None))
        check_pooling_params(params, extras)
        self._check_awake()
        check_pooling_task(self._async_llm.model_info, task)
        read = read_for_pooling(prompts, self._async_llm.prompt_maker(task, **options))
        single = params if params is None or isinstance(params, PoolingParams) else None
        given = list(params) if isinstance(params, list | tuple) else [single] * len(read)
        if len(given) != len(read):
            told = f"pooling_params has {len(given)} entries, there are {len(read)} prompts"
            raise InvalidRequest(told, field="pooling_params")
        return self._pool_inputs(read, [with_task(one, task) for one in given], use_tqdm)

    def _pool_inputs(
        self, read: list[PoolingInput], params: list[PoolingParams], use_tqdm: bool | Callable[..., Any]
    ) -> list[PoolingRequestOutput]:
        make_bar = use_tqdm if callable(use_tqdm) else tqdm
        with make_bar(total=len(read), desc="Processed prompts", disable=not use_tqdm, dynamic_ncols=True) as bar:
            return self._loop.run(_pool_all(self._async_llm, read, params, bar))


async def _pool_all(
    llm: AsyncLLM, inputs: list[PoolingInput], params: list[PoolingParams], bar: Any
) -> list[PoolingRequestOutput]:
    places = asyncio.Semaphore(MAX_OPEN_REQUESTS)

    async def pool(given: PoolingInput, one: PoolingParams) -> PoolingRequestOutput:
        async with places:
            output = await llm.pool(given, one)
        bar.update()
        return output

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(pool(given, one)) for given, one in zip(inputs, params, strict=True)]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]
