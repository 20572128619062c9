"""Results of pooling in vLLM's shapes, and the functions that make them."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from pagoda.llm.prompts import Prompt, PromptInput, as_prompt_list, read_prompt
from pagoda.llm.values import Values
from pagoda.options.refusals import refuse_extras
from pagoda.v1 import types_pb2
from pagoda_common.engine.client import EngineClient, EngineRequest
from pagoda_common.engine.convert import pooling_tasks_of
from pagoda_common.errors import Code, InvalidRequest, PagodaError
from pagoda_common.params.outputs import Embedding
from pagoda_common.params.pooling_params import PoolingParams, PoolingTask, task_refusal
from pagoda_common.text.pooling_prompts import Given, PoolingPrompt, PromptMaker, mean_of


@dataclass(slots=True)
class EmbeddingOutput:
    """One embedding."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """Its values."""
        return len(self.embedding)


@dataclass(slots=True)
class PoolingOutput:
    """Whatever was made of a prompt."""

    data: Embedding
    """[size], or [num_tokens, size] of tasks that have a value for each token; functions of torch take it too."""

    def __post_init__(self) -> None:
        self.data = np.asarray(self.data).view(Values)


@dataclass(slots=True)
class ClassificationOutput:
    """Labels of a prompt."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        """Labels that the model tells apart."""
        return len(self.probs)


@dataclass(slots=True)
class ScoringOutput:
    """The score of a pair."""

    score: float


@dataclass(slots=True)
class PoolingRequestOutput:
    """A prompt and what was made of it."""

    request_id: str
    outputs: Any
    """PoolingOutput, or what the call gives in its place."""
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
    num_pieces: int = 1
    """Number of pieces of a text that exceeds the context; the output is the mean of their vectors."""
    finished: bool = True


EmbeddingRequestOutput: TypeAlias = PoolingRequestOutput
"""vLLM's names, for calls whose outputs are of one kind."""
ClassificationRequestOutput: TypeAlias = PoolingRequestOutput
ScoringRequestOutput: TypeAlias = PoolingRequestOutput


@dataclass(frozen=True, slots=True)
class PoolingInput:
    """One prompt ready to be pooled."""

    made: PoolingPrompt
    cache_salt: str = ""

    def prompts(self) -> list[Prompt]:
        """The prompts of the pieces; usually one."""
        return [Prompt(text=None, token_ids=ids, cache_salt=self.cache_salt) for ids in self.made.pieces]


def read_for_pooling(prompts: PromptInput | Sequence[PromptInput], maker: PromptMaker) -> list[PoolingInput]:
    """The inputs that `maker` makes of each prompt, which may fill the context.

    Raises:
        InvalidRequest: one is empty, too long or not a prompt.
    """
    given: list[Given] = []
    salts = []
    for place, prompt in enumerate(as_prompt_list(prompts)):
        text, ids, salt = read_prompt(prompt, f"prompts[{place}]")
        if ids is not None and not ids:
            raise InvalidRequest("prompt is empty: it must have at least one token", field=f"prompts[{place}]")
        for one in ids or ():
            if type(one) is not int:
                raise InvalidRequest(f"prompt has token {one!r}, which is not a token id", field=f"prompts[{place}]")
        given.append(text or "" if ids is None else ids)
        salts.append(salt)
    return [PoolingInput(made, salt) for made, salt in zip(maker.make_all(given), salts, strict=True)]


def pooling_tasks(model_info: types_pb2.ModelInfo) -> tuple[PoolingTask, ...]:
    """The pooling tasks of a model, the default first."""
    return pooling_tasks_of(model_info.pooling_tasks) or (("embed",) if model_info.embedding_size else ())


def check_pooling_task(model_info: types_pb2.ModelInfo, task: PoolingTask) -> None:
    """
    Raises:
        InvalidRequest: the model does not have this task.
    """
    if task not in pooling_tasks(model_info):
        raise refusal_of(model_info, task)


def refusal_of(model_info: types_pb2.ModelInfo, task: str) -> InvalidRequest:
    """Why a model is not asked for a task that it does not have."""
    return task_refusal(task, pooling_tasks(model_info), pooling_tasks_of(model_info.unserved_pooling_tasks))


async def pool_input(
    engine: EngineClient, requests: Sequence[EngineRequest], given: PoolingInput, params: PoolingParams
) -> PoolingRequestOutput:
    """The pooling result of one prompt; for pieces, their mean. A cancelled call aborts its requests.

    Args:
        requests: one a piece, made with POOLED; they have not been submitted.

    Raises:
        PagodaError: the engine refused or failed it.
    """
    if given.made.second_text_start:
        params = replace(params, second_text_start=given.made.second_text_start)
    done = await asyncio.gather(*(_pool_request(engine, request, params) for request in requests))
    values = mean_of([one for one, _ in done], [len(ids) for ids in given.made.pieces])
    return PoolingRequestOutput(
        request_id=requests[0].request_id,
        outputs=PoolingOutput(values),
        prompt_token_ids=[one for ids in given.made.pieces for one in ids],
        num_cached_tokens=sum(cached for _, cached in done),
        num_pieces=len(requests),
    )


async def _pool_request(engine: EngineClient, request: EngineRequest, params: PoolingParams) -> tuple[Embedding, int]:
    request.pooling = params
    stream = engine.submit(request)
    try:
        (output,) = await stream.get()
    finally:
        stream.abort()  # nothing, unless the wait for it was cancelled
    if output.error is not None:
        raise output.error
    if output.embedding is None:
        raise PagodaError("the request was aborted", code=Code.CANCELLED)
    return output.embedding, output.num_cached_tokens


def by_token(output: PoolingRequestOutput) -> Embedding:
    """[num_tokens, size] of an output with values for each token; some poolings leave out the first."""
    values: Embedding = np.asarray(output.outputs.data)
    for num_rows in (len(output.prompt_token_ids), len(output.prompt_token_ids) - 1):
        if num_rows and values.size % num_rows == 0:
            return values.reshape(num_rows, -1)
    return values.reshape(-1, 1)


def as_embedding(output: PoolingRequestOutput) -> EmbeddingRequestOutput:
    """The same as what LLM.embed gives."""
    output.outputs = EmbeddingOutput(output.outputs.data.tolist())
    return output


def with_task(params: PoolingParams | None, task: PoolingTask) -> PoolingParams:
    """`params` for a task."""
    return replace(params or PoolingParams(), task=task)


def check_pooling_params(params: Any, extras: dict[str, Any]) -> None:
    """Refuse what vLLM's call takes and this one does not.

    Raises:
        InvalidRequest: `field` names it.
    """
    refuse_extras(extras)
    each = params if isinstance(params, list | tuple) else [params]
    if any(one is not None and not isinstance(one, PoolingParams) for one in each):
        raise InvalidRequest(f"pooling_params must be PoolingParams, got {params!r}"[:300], field="pooling_params")
