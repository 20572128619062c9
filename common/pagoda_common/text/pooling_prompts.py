"""Turns texts, pairs and token ids into pooling prompts: templates, truncation, pieces. Knows no engine."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from pagoda_common.errors import InvalidRequest, RequestTooLong
from pagoda_common.params.outputs import Embedding
from pagoda_common.params.truncation import Truncation
from pagoda_common.text.chat_template import render_chat_template
from pagoda_common.text.tokenizer import Tokenizer

Given: TypeAlias = str | list[int] | tuple[str, str]
"""A text, token ids, or a pair of texts."""
UNIT_TOLERANCE = 1e-3
"""Tolerance for the length of a normalised vector."""


@dataclass(frozen=True, slots=True)
class PoolingPrompt:
    """One text as the engine takes it."""

    token_ids: list[int]
    second_text_start: int = 0
    """First token of the second text of a pair, where the tokenizer tells them apart."""
    rest: tuple[list[int], ...] = ()
    """Further pieces of a text that is longer than the model takes."""

    @property
    def pieces(self) -> list[list[int]]:
        """All of them; mostly one."""
        return [self.token_ids, *self.rest]


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptMaker:
    """How the texts of one call become prompts."""

    tokenizer: Tokenizer
    max_model_len: int
    vocab_size: int
    field: str
    """Field of the call, for messages."""
    add_special_tokens: bool = True
    truncation: Truncation | None = None
    """Truncation of each whole prompt; special tokens are kept."""
    prefix: str = ""
    """Goes before each text that is no pair: a prompt of the checkpoint's files."""
    template: str | None = None
    """Writes a query and a document as one text (`score_template`); None: the tokenizer puts them together."""
    max_query_tokens: int = 0
    """Tokens that are kept of the first text of a pair; 0: all."""
    max_document_tokens: int = 0
    """Tokens that are kept of the second text of a pair; 0: all."""
    splits_long: bool = False
    """Texts that are longer than the model takes come in pieces, unless they are truncated."""
    check_length: Callable[[int, bool], None] | None = None
    """Raises for a text of so many characters, which is cut or not, before it is tokenized."""

    def make(self, one: Given) -> PoolingPrompt:
        """
        Raises:
            InvalidRequest, RequestTooLong: it is empty, has a wrong token or does not fit the context.
        """
        if isinstance(one, list):
            self._check_ids(one)
            prompt = PoolingPrompt(one if self.truncation is None else self.truncation.apply(one))
        elif isinstance(one, tuple):
            prompt = self._of_pair(*one)
        else:
            prompt = self._of_text(one)
        if not prompt.token_ids:
            raise InvalidRequest(f"{self.field} is empty: it must have at least one token", field=self.field)
        if len(prompt.token_ids) > self.max_model_len:
            bound = f"This model's maximum context length is {self.max_model_len} tokens"
            told = f"{bound}, but an input has {len(prompt.token_ids)} tokens."
            advice = "Please reduce the length of the input prompt, or give truncate_prompt_tokens."
            raise RequestTooLong(f"{told} {advice}", field=self.field)
        return prompt

    def make_all(self, given: Sequence[Given]) -> list[PoolingPrompt]:
        """The prompts of several, on all cores; errors as in `make`."""
        plain = [one for one in given if isinstance(one, str)] if self.truncation is None else []
        if not plain:
            return [self.make(one) for one in given]
        for text in plain:
            self._check(len(text), is_cut=self.splits_long)
        texts = [self.prefix + text if text else "" for text in plain]
        encoded = iter(self.tokenizer.encode_batch(texts, add_special_tokens=self.add_special_tokens))
        prompts = []
        for one in given:
            ids = next(encoded) if isinstance(one, str) else None
            fits = ids is not None and 0 < len(ids) <= self.max_model_len
            prompts.append(PoolingPrompt(ids) if ids is not None and fits else self.make(one))
        return prompts

    def _of_text(self, text: str) -> PoolingPrompt:
        splits = self.splits_long and self.truncation is None
        self._check(len(text), is_cut=splits)
        if text:
            text = self.prefix + text
        ids, second = self._encode(text, None, self.add_special_tokens)
        if len(ids) <= self.max_model_len or not splits:
            return PoolingPrompt(ids, second)
        first, *rest = self.tokenizer.encode_pieces(
            text, max_tokens=self.max_model_len, add_special_tokens=self.add_special_tokens
        )
        return PoolingPrompt(first, rest=tuple(rest))

    @property
    def cuts_pairs(self) -> bool:
        """Whether `cut_pair` may change a pair."""
        return bool(self.max_query_tokens or self.max_document_tokens)

    def cut_pair(self, text: str, pair: str) -> tuple[str, str]:
        """The texts of a pair, as far as they are kept."""
        if self.max_query_tokens:
            text = self.tokenizer.cut(text, self.max_query_tokens)
        if self.max_document_tokens:
            pair = self.tokenizer.cut(pair, self.max_document_tokens)
        return text, pair

    def _of_pair(self, text: str, pair: str) -> PoolingPrompt:
        self._check(len(text) + len(pair), is_cut=self.cuts_pairs)
        text, pair = self.cut_pair(text, pair)
        if self.template is None:
            return PoolingPrompt(*self._encode(text, pair, self.add_special_tokens))
        roles = [{"role": "query", "content": text}, {"role": "document", "content": pair}]
        text = render_chat_template(self.template, messages=roles, add_generation_prompt=True)
        return PoolingPrompt(*self._encode(text, None, False))

    def _encode(self, text: str, pair: str | None, add_special_tokens: bool) -> tuple[list[int], int]:
        cut = self.truncation
        return self.tokenizer.encode_within(
            text,
            pair=pair,
            max_tokens=None if cut is None else cut.num_tokens,
            side="right" if cut is None else cut.side,
            add_special_tokens=add_special_tokens,
        )

    def _check(self, num_chars: int, *, is_cut: bool) -> None:
        if self.check_length is not None:
            self.check_length(num_chars, is_cut or self.truncation is not None)

    def _check_ids(self, ids: Sequence[int]) -> None:
        if ids and not (min(ids) >= 0 and max(ids) < self.vocab_size):
            wrong = next(one for one in ids if not 0 <= one < self.vocab_size)
            bound = f"must be below {self.vocab_size}" if wrong >= 0 else "must be at least 0"
            raise InvalidRequest(f"{self.field}: token id {wrong} is out of vocabulary, {bound}", field=self.field)


def score_template(source: str | None) -> str | None:
    """A chat template that writes a query and a document as one text, or None: `source` writes no such roles."""
    text = source or ""
    return text if all(f"'{role}'" in text or f'"{role}"' in text for role in ("query", "document")) else None


def mean_of(vectors: Sequence[Embedding], lengths: Sequence[int]) -> Embedding:
    """The mean of vectors, weighted by the tokens after them; of vectors of length 1 it has that length again."""
    if len(vectors) == 1:
        return vectors[0]
    mean = np.average(np.stack(vectors).astype(np.float64), axis=0, weights=lengths)
    if all(abs(float(np.linalg.norm(one)) - 1) < UNIT_TOLERANCE for one in vectors):
        mean /= np.linalg.norm(mean) or 1.0
    return mean.astype(np.float32)


def pairs_of(first: Sequence[str], second: Sequence[str], *, field: str, other: str) -> list[tuple[str, str]]:
    """One text against several, or as many against as many.

    Raises:
        InvalidRequest: there are none, or their numbers do not fit.
    """
    for name, texts in ((field, first), (other, second)):
        if not texts:
            raise InvalidRequest(f"{name} is empty: it must have at least one text", field=name)
    if len(first) not in (1, len(second)):
        text = f"{field} has {len(first)} texts, must have 1 or as many as {other}, {len(second)}"
        raise InvalidRequest(text, field=field)
    return list(zip(list(first) * len(second) if len(first) == 1 else first, second, strict=True))
