"""Checks the options of embedding requests, and reads the engine's results."""

from pagoda_common.errors import Code, InvalidRequest, PagodaError
from pagoda_common.params.outputs import Embedding
from pagoda_common.params.pooling_params import PoolingTask, task_refusal
from pagoda_frontend.requests.run import CollectedSequence
from pagoda_frontend.serving.served_model import ServedModel

MAX_INPUTS = 2048
"""As OpenAI has it."""


def check_task(model: ServedModel, task: PoolingTask, *, dimensions: int | None = None) -> None:
    """
    Raises:
        InvalidRequest: the model does not embed, or its embeddings cannot be shortened to `dimensions`.
    """
    tasks, size = model.pooling_tasks, model.embedding_size
    if tasks and task not in tasks:
        raise task_refusal(task, tasks, model.unserved_pooling_tasks)
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


def embedding_of(sequence: CollectedSequence) -> Embedding:
    """The engine's result for an input.

    Raises:
        PagodaError: CANCELLED, the request was aborted.
    """
    if sequence.embedding is None:
        raise PagodaError("the request was aborted", code=Code.CANCELLED)
    return sequence.embedding
