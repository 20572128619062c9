"""What becomes of prompts that are pooled, in vLLM's shapes, and how programs get it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from pagoda.llm.prompts import Prompt, PromptInput, as_prompt_list, read_prompts
from pagoda.options.refusals import refuse_extras
from pagoda.v1 import types_pb2
from pagoda_common.engine.client import EngineClient, EngineRequest
from pagoda_common.engine.convert import pooling_task_of
from pagoda_common.errors import Code, InvalidRequest, PagodaError
from pagoda_common.params.outputs import Embedding
from pagoda_common.params.pooling_params import PoolingParams, PoolingTask
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
class PoolingOutput:
    """Whatever was made of a prompt."""

    data: Embedding
    """[size], or [num_tokens, size] of tasks that have a value for each token."""


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
    finished: bool = True


EmbeddingRequestOutput: TypeAlias = PoolingRequestOutput
"""vLLM's names, for calls whose outputs are of one kind."""
ClassificationRequestOutput: TypeAlias = PoolingRequestOutput
ScoringRequestOutput: TypeAlias = PoolingRequestOutput


def read_for_embedding(
    prompts: PromptInput | Sequence[PromptInput], *, tokenizer: Tokenizer, model_info: types_pb2.ModelInfo
) -> list[Prompt]:
    """Prompts in token ids; each may fill the context.

    Raises:
        InvalidRequest: one is empty, too long or not a prompt.
    """
    return read_prompts(as_prompt_list(prompts), tokenizer=tokenizer, model_info=model_info, num_output_tokens=0)


def pooling_tasks(model_info: types_pb2.ModelInfo) -> tuple[PoolingTask, ...]:
    """What a model makes of prompts, the default first."""
    known = tuple(task for number in model_info.pooling_tasks if (task := pooling_task_of(number)) is not None)
    return known or (("embed",) if model_info.embedding_size else ())


def check_pooling_task(model_info: types_pb2.ModelInfo, task: PoolingTask) -> None:
    """
    Raises:
        InvalidRequest: the model does nothing of the kind.
    """
    tasks = pooling_tasks(model_info)
    if task not in tasks:
        raise InvalidRequest(f"the model does not {task}: it can {', '.join(tasks) or 'only generate'}", field="task")


async def pool_prompt(engine: EngineClient, request: EngineRequest, params: PoolingParams) -> PoolingRequestOutput:
    """What is made of one prompt; a cancelled call aborts its request.

    Args:
        request: made with POOLED; it has not been submitted.

    Raises:
        PagodaError: the engine refused or failed it.
    """
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
    return PoolingRequestOutput(
        request_id=request.request_id,
        outputs=PoolingOutput(output.embedding),
        prompt_token_ids=list(request.prompt_token_ids),
        num_cached_tokens=output.num_cached_tokens,
    )


def by_token(output: PoolingRequestOutput) -> Embedding:
    """[num_tokens, size] of an output with values for each token; some poolings leave out the first."""
    values: Embedding = np.asarray(output.outputs.data)
    for num_rows in (len(output.prompt_token_ids), len(output.prompt_token_ids) - 1):
        if num_rows and values.size % num_rows == 0:
            return values.reshape(num_rows, -1)
    return values.reshape(-1, 1)


async def embed_prompt(
    engine: EngineClient, request: EngineRequest, params: PoolingParams | None
) -> EmbeddingRequestOutput:
    """The embedding of one prompt; as `pool_prompt`."""
    output = await pool_prompt(engine, request, with_task(params, "embed"))
    output.outputs = EmbeddingOutput(output.outputs.data.tolist())
    return output


def with_task(params: PoolingParams | None, task: PoolingTask) -> PoolingParams:
    """`params` for a task."""
    given = params or PoolingParams()
    return PoolingParams(
        task=task,
        normalize=given.normalize,
        dimensions=given.dimensions,
        use_activation=given.use_activation,
        second_text_start=given.second_text_start,
    )


def check_pooling_params(params: Any, extras: dict[str, Any]) -> None:
    """Refuse what vLLM's call takes and this one does not.

    Raises:
        InvalidRequest: `field` names it.
    """
    refuse_extras(extras)
    if params is not None and not isinstance(params, PoolingParams):
        raise InvalidRequest(f"pooling_params must be PoolingParams, got {params!r}"[:300], field="pooling_params")
