"""Inputs of an embedding request, and what the engine has made of them."""

from collections.abc import Sequence

from pagoda_common.errors import Code, InvalidRequest, PagodaError
from pagoda_common.params.outputs import Embedding
from pagoda_common.params.pooling_params import PoolingTask
from pagoda_common.params.truncation import Truncation
from pagoda_frontend.requests.run import CollectedSequence
from pagoda_frontend.requests.served_model import ServedModel

MAX_INPUTS = 2048
"""As OpenAI has it."""


def check_task(model: ServedModel, task: PoolingTask, *, dimensions: int | None = None) -> None:
    """
    Raises:
        InvalidRequest: the model does nothing of the kind, or its embeddings are not shortened to `dimensions`.
    """
    tasks, size = model.pooling_tasks, model.embedding_size
    if tasks and task not in tasks:
        raise InvalidRequest(f"the model does not {task}: it can {', '.join(tasks)}", field="model")
    if dimensions is None or dimensions == size or not size:
        return
    lengths = model.matryoshka_dimensions
    if not model.has_matryoshka:
        text = f"dimensions must be {size}, the model's embeddings cannot be shortened, got {dimensions}"
    elif lengths and dimensions not in lengths:
        text = f"dimensions must be one of {', '.join(map(str, lengths))}, got {dimensions}"
    elif not 1 <= dimensions <= size:
        text = f"dimensions must be between 1 and {size}, got {dimensions}"
    else:
        return
    raise InvalidRequest(text, field="dimensions")


async def embedding_prompts(
    given: Sequence[str | list[int]],
    *,
    model: ServedModel,
    field: str,
    add_special_tokens: bool = True,
    truncation: Truncation | None = None,
) -> list[list[int]]:
    """Token ids of each input.

    Raises:
        InvalidRequest, RequestTooLong: one is empty or does not fit the context, or they are too many or none.
    """
    if not given:
        raise InvalidRequest(f"{field} is empty: there must be at least one", field=field)
    if len(given) > MAX_INPUTS:
        raise InvalidRequest(f"there may be at most {MAX_INPUTS} inputs, got {len(given)}", field=field)
    prompts = []
    for place, one in enumerate(given):
        if not one:
            name = field if len(given) == 1 else f"{field}.{place}"
            raise InvalidRequest(f"{name} is empty: it must have at least one token", field=field)
        prompts.append(
            await model.prompts.for_embedding(
                one, add_special_tokens=add_special_tokens, field=field, truncation=truncation
            )
        )
    return prompts


def embedding_of(sequence: CollectedSequence) -> Embedding:
    """What the engine has made of an input.

    Raises:
        PagodaError: CANCELLED, someone has aborted it.
    """
    if sequence.embedding is None:
        raise PagodaError("the request was aborted", code=Code.CANCELLED)
    return sequence.embedding
