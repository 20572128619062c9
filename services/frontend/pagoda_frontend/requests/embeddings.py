"""Inputs of an embedding request, and what the engine has made of them."""

from collections.abc import Sequence

from pagoda_common.errors import Code, InvalidRequest, PagodaError
from pagoda_common.params.outputs import Embedding
from pagoda_common.params.truncation import Truncation
from pagoda_frontend.requests.run import CollectedSequence
from pagoda_frontend.requests.served_model import ServedModel

MAX_INPUTS = 2048
"""As OpenAI has it."""


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
        PagodaError: CANCELLED, somebody has aborted it.
    """
    if sequence.embedding is None:
        raise PagodaError("the request was aborted", code=Code.CANCELLED)
    return sequence.embedding
