"""Turns texts, pairs and token ids into prompts, many at a time on the work pool. Knows no endpoint."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from pagoda_common.errors import InvalidRequest
from pagoda_common.params.truncation import Side, Truncation, truncation_of
from pagoda_common.text.pooling_prompts import Given, PoolingPrompt, PromptMaker
from pagoda_frontend.budget.work_pool import LIGHT_BYTES
from pagoda_frontend.requests.embeddings import MAX_INPUTS
from pagoda_frontend.serving.served_model import ServedModel
from pagoda_frontend.serving.serving import Serving


async def pooling_prompts(given: Sequence[Given], maker: PromptMaker, *, serving: Serving) -> list[PoolingPrompt]:
    """The prompt of each text.

    Raises:
        InvalidRequest, RequestTooLong: a text is empty or does not fit the context, or there are none or too many.
    """
    field = maker.field
    if not given:
        raise InvalidRequest(f"{field} is empty: it must have at least one entry", field=field)
    if len(given) > MAX_INPUTS:
        raise InvalidRequest(f"there may be at most {MAX_INPUTS} inputs, got {len(given)}", field=field)
    for place, one in enumerate(given):
        if not one:
            name = field if len(given) == 1 else f"{field}.{place}"
            raise InvalidRequest(f"{name} is empty: it must have at least one token", field=field)
    prompts: list[PoolingPrompt] = []
    for part in _parts(given):
        size = sum(map(_num_chars, part))
        prompts += await serving.work.run(partial(maker.make_all, part), num_bytes=size)
    num_pieces = sum(len(one.pieces) for one in prompts)
    if num_pieces > MAX_INPUTS:
        told = f"{field} makes {num_pieces} pieces of the model's length, there may be at most {MAX_INPUTS}"
        raise InvalidRequest(told, field=field)
    return prompts


def maker_of(
    model: ServedModel,
    *,
    field: str,
    add_special_tokens: bool = True,
    truncation: Truncation | None = None,
    prefix: str = "",
    max_query_tokens: int = 0,
    max_document_tokens: int = 0,
    splits_long: bool = False,
) -> PromptMaker:
    """Makes a model's prompts; arguments as in PromptMaker."""
    prompts = model.prompts
    return PromptMaker(
        tokenizer=model.tokenizer,
        max_model_len=model.max_model_len,
        vocab_size=model.vocab_size,
        field=field,
        add_special_tokens=add_special_tokens,
        truncation=truncation,
        prefix=prefix,
        template=prompts.score_template,
        max_query_tokens=max_query_tokens,
        max_document_tokens=max_document_tokens,
        splits_long=splits_long,
        check_length=lambda num_chars, is_cut: prompts.check_length(num_chars, field=field, is_cut=is_cut),
    )


def _parts(given: Sequence[Given]) -> list[list[Given]]:
    """Batches of inputs, each for one turn of a thread."""
    parts: list[list[Given]] = []
    room = 0
    for one in given:
        size = max(64, _num_chars(one))
        if not parts or room < size:
            parts.append([])
            room = LIGHT_BYTES
        parts[-1].append(one)
        room -= size
    return parts


def _num_chars(one: Given) -> int:
    if isinstance(one, tuple):
        return len(one[0]) + len(one[1])
    return len(one)


def truncation_for(body: Any, model: ServedModel) -> Truncation | None:
    """How inputs are truncated: models that only pool keep the beginning, with the special tokens around it.

    Raises:
        InvalidRequest: a value is out of its bounds; `field` names the field.
    """
    side: Side | None = body.truncation_side or ("right" if model.only_pools else None)
    return truncation_of(body.truncate_prompt_tokens, side, max_tokens=0, max_model_len=model.max_model_len)
