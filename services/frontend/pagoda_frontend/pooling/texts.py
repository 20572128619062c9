"""From texts, pairs and token ids to prompts, many at a time on the work pool. Knows no endpoint."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from pagoda_common.errors import InvalidRequest, RequestTooLong
from pagoda_common.params.truncation import Side, Truncation, truncation_of
from pagoda_common.text.chat_template import render_chat_template
from pagoda_frontend.budget.work_pool import LIGHT_BYTES
from pagoda_frontend.requests.embeddings import MAX_INPUTS
from pagoda_frontend.requests.params import check_token_ids
from pagoda_frontend.requests.served_model import ServedModel
from pagoda_frontend.requests.serving import Serving

Given: TypeAlias = str | list[int] | tuple[str, str]
"""A text, token ids, or a pair of texts."""


@dataclass(frozen=True, slots=True)
class PoolingPrompt:
    """One text as the engine takes it."""

    token_ids: list[int]
    second_text_start: int = 0
    """First token of the second text of a pair, where the tokenizer tells them apart."""
    rest: tuple[list[int], ...] = ()
    """Further pieces of a text that is longer than the model takes."""


async def pooling_prompts(
    given: Sequence[Given],
    *,
    serving: Serving,
    model: ServedModel,
    field: str,
    add_special_tokens: bool = True,
    truncation: Truncation | None = None,
    splits_long: bool = False,
) -> list[PoolingPrompt]:
    """The prompt of each.

    Args:
        truncation: of each whole prompt; special tokens are kept.
        splits_long: texts that are longer than the model takes come in pieces.

    Raises:
        InvalidRequest, RequestTooLong: one is empty or does not fit the context, or they are too many or none.
    """
    if not given:
        raise InvalidRequest(f"{field} is empty: there must be at least one", field=field)
    if len(given) > MAX_INPUTS:
        raise InvalidRequest(f"there may be at most {MAX_INPUTS} inputs, got {len(given)}", field=field)
    maker = _Maker(model, field, add_special_tokens, truncation, splits_long and truncation is None)
    prompts: list[PoolingPrompt] = []
    for part in _parts(given):
        size = sum(map(_num_chars, part))
        prompts += await serving.work.run(lambda part=part: [maker.make(one) for one in part], num_bytes=size)  # type: ignore[misc]
    return prompts


def _parts(given: Sequence[Given]) -> list[list[Given]]:
    """Runs of inputs that a thread takes at a time."""
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


class _Maker:
    """Makes prompts on a thread."""

    def __init__(
        self,
        model: ServedModel,
        field: str,
        add_special_tokens: bool,
        truncation: Truncation | None,
        splits_long: bool,
    ) -> None:
        self._splits_long = splits_long
        self._model = model
        self._field = field
        self._adds = add_special_tokens
        self._truncation = truncation
        self._template = model.prompts.score_template
        """Writes a query and a document as one text."""

    def make(self, one: Given) -> PoolingPrompt:
        """
        Raises:
            InvalidRequest, RequestTooLong: as of `pooling_prompts`.
        """
        if isinstance(one, list):
            check_token_ids(one, vocab_size=self._model.vocab_size, field=self._field)
            prompt = PoolingPrompt(one if self._truncation is None else self._truncation.apply(one))
        else:
            prompt = self._of_text(one)
        if not prompt.token_ids:
            raise InvalidRequest(f"{self._field} is empty: it must have at least one token", field=self._field)
        if len(prompt.token_ids) > self._model.max_model_len:
            bound = f"This model's maximum context length is {self._model.max_model_len} tokens"
            raise RequestTooLong(f"{bound}, but an input has {len(prompt.token_ids)} tokens.", field=self._field)
        return prompt

    def _of_text(self, one: str | tuple[str, str]) -> PoolingPrompt:
        self._model.prompts.check_length(
            _num_chars(one), field=self._field, is_cut=self._truncation is not None or self._splits_long
        )
        text, pair = one if isinstance(one, tuple) else (one, None)
        adds = self._adds
        if pair is not None and self._template is not None:
            roles = [{"role": "query", "content": text}, {"role": "document", "content": pair}]
            text = render_chat_template(self._template, messages=roles, add_generation_prompt=True)
            pair, adds = None, False
        side = self._truncation.side if self._truncation is not None else "right"
        most = None if self._truncation is None else self._truncation.num_tokens
        ids, second = self._model.tokenizer.encode_within(
            text, pair=pair, max_tokens=most, side=side, add_special_tokens=adds
        )
        if len(ids) > self._model.max_model_len and self._splits_long and pair is None:
            first, *rest = self._model.tokenizer.encode_pieces(
                text, max_tokens=self._model.max_model_len, add_special_tokens=adds
            )
            return PoolingPrompt(first, rest=tuple(rest))
        return PoolingPrompt(ids, second)


def truncation_for(body: Any, model: ServedModel) -> Truncation | None:
    """How inputs are cut: models that only pool keep the beginning, with the special tokens around it.

    Raises:
        InvalidRequest: a bound is broken; `field` names the field.
    """
    side: Side | None = body.truncation_side or ("right" if model.only_pools else None)
    return truncation_of(body.truncate_prompt_tokens, side, max_tokens=0, max_model_len=model.max_model_len)
