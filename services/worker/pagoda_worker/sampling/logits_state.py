"""Per-sequence state for masks and penalties on the device; a step copies only the changes of the last token."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pagoda_kernels.sampling.apply_penalties import count_tokens
from pagoda_worker.memory.transfers import to_device
from pagoda_worker.sampling.columns import RaggedColumn, grown
from pagoda_worker.sampling.sampling_columns import SamplingColumns
from pagoda_worker.sampling.slot_rows import SlotRows
from pagoda_worker.steps.step import IntArray, TokenArray

NEVER = float("-inf")
"""Logit of a token that must not be sampled."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogitsBatch:
    """The rows of a batch that are sampled."""

    slots: IntArray
    """[n]."""
    tokens: TokenArray
    """[slots, tokens] the token log: prompt, then output."""
    num_prompt_tokens: IntArray
    """[n]."""
    num_tokens: IntArray
    """[n] prompt and output."""
    last_tokens: Tensor | None = None
    """[slots] int64 on the device: the last token of each slot, where the log has only a placeholder for it."""

    def rows(self, rows: IntArray) -> "LogitsBatch":
        """A selection of the rows."""
        return LogitsBatch(
            slots=self.slots[rows],
            tokens=self.tokens,
            num_prompt_tokens=self.num_prompt_tokens[rows],
            num_tokens=self.num_tokens[rows],
            last_tokens=self.last_tokens,
        )


class TokenCounts:
    """Token counts of sequences with penalties; recounted from the log unless only one token is new."""

    def __init__(self, *, generations: IntArray, vocab_size: int, device: torch.device) -> None:
        self._rows = SlotRows(generations)
        self._vocab_size = vocab_size
        self._num_counted: IntArray = np.zeros(0, dtype=np.int64)
        self._in_prompt = torch.zeros((0, vocab_size), dtype=torch.bool, device=device)
        self._counts = torch.zeros((0, vocab_size), dtype=torch.float32, device=device)

    def of(self, batch: LogitsBatch) -> tuple[Tensor, Tensor]:
        """[n, vocab_size] in_prompt and counts, as from `count_tokens`."""
        rows, is_new = self._rows.take(batch.slots)
        self._num_counted = grown(self._num_counted, (self._rows.size,))
        self._in_prompt = _grown(self._in_prompt, self._rows.size)
        self._counts = _grown(self._counts, self._rows.size)
        num_missing = np.where(is_new, batch.num_tokens, batch.num_tokens - self._num_counted[rows])
        is_next = ~is_new & (num_missing == 1)
        if is_next.any():
            slots = batch.slots[is_next]
            if batch.last_tokens is None:
                last = self._on(batch.tokens[slots, batch.num_tokens[is_next] - 1].astype(np.int64))
            else:
                last = batch.last_tokens[self._on(slots)]
            self._counts[self._on(rows[is_next]), last] += 1
        stale = np.flatnonzero(~is_next & (num_missing != 0))
        if stale.size:
            some = batch.rows(stale)
            log = batch.tokens[some.slots, : int(some.num_tokens.max())].astype(np.int64)
            place = self._on(rows[stale])
            self._in_prompt[place], self._counts[place] = count_tokens(
                self._on(log),
                self._on(some.num_prompt_tokens),
                self._on(some.num_tokens),
                vocab_size=self._vocab_size,
            )
        self._num_counted[rows] = batch.num_tokens
        chosen = self._on(rows)
        return self._in_prompt[chosen], self._counts[chosen]

    def _on(self, array: IntArray) -> Tensor:
        return to_device(array, self._counts.device)


class BiasRows:
    """allowed_token_ids and logit_bias of sequences with these, as rows to add to the logits."""

    def __init__(self, *, columns: SamplingColumns, vocab_size: int, device: torch.device) -> None:
        self._columns = columns
        self._rows = SlotRows(columns.generations)
        self._biases = torch.zeros((0, vocab_size), dtype=torch.float32, device=device)

    def of(self, slots: IntArray) -> Tensor:
        """[n, vocab_size] values to add: -inf for tokens that are not allowed."""
        rows, is_new = self._rows.take(slots)
        self._biases = _grown(self._biases, self._rows.size)
        if is_new.any():
            place = to_device(rows[is_new], self._biases.device)
            self._biases[place] = self._made(slots[is_new])
        return self._biases[to_device(rows, self._biases.device)]

    def _made(self, slots: IntArray) -> Tensor:
        columns, device = self._columns, self._biases.device
        result = torch.zeros((slots.size, self._biases.shape[1]), dtype=torch.float32, device=device)
        rows = np.flatnonzero(columns.allowed_token_ids.lengths_of(slots))
        if rows.size:
            masked = torch.full_like(result[: rows.size], NEVER)
            ids = to_device(padded_ids(columns.allowed_token_ids, slots[rows]), device)
            result[to_device(rows, device)] = masked.scatter_(1, ids, 0.0)
        lengths = columns.bias_token_ids.lengths_of(slots)
        rows = np.flatnonzero(lengths)
        if rows.size:
            width, place = int(lengths.max()), to_device(rows, device)
            ids = to_device(columns.bias_token_ids.values[slots[rows], :width], device)
            values = to_device(columns.biases.values[slots[rows], :width], device)  # padded with 0
            result[place] = result[place].scatter_add_(1, ids, values)
        return result


def padded_ids(column: RaggedColumn, slots: IntArray) -> IntArray:
    """[n, longest] token ids; short lists repeat their first id, which changes nothing for a mask."""
    lengths = column.lengths[slots]
    ids: IntArray = column.values[slots, : int(lengths.max())]
    return np.where(np.arange(ids.shape[1]) < lengths[:, None], ids, ids[:, :1])


def _grown(tensor: Tensor, num_rows: int) -> Tensor:
    """`tensor` with at least `num_rows` rows."""
    if tensor.shape[0] >= num_rows:
        return tensor
    larger = tensor.new_zeros((num_rows, *tensor.shape[1:]))
    larger[: tensor.shape[0]] = tensor
    return larger
