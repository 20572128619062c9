"""LogitsRules: applies masks, biases and penalties to logits, only in rows whose parameters ask for them."""

import numpy as np
import torch
from torch import Tensor

from pagoda_kernels.sampling.apply_penalties import apply_token_penalties
from pagoda_worker.memory.transfers import to_device
from pagoda_worker.sampling.logits_state import NEVER, BiasRows, LogitsBatch, TokenCounts, padded_ids
from pagoda_worker.sampling.sampling_columns import ANY_TOKEN, SamplingColumns
from pagoda_worker.steps.step import IntArray


class LogitsRules:
    """The rules of all slots, with state on the logits' device."""

    def __init__(self, *, columns: SamplingColumns, vocab_size: int, device: torch.device) -> None:
        self._columns = columns
        self._device = device
        self._biases = BiasRows(columns=columns, vocab_size=vocab_size, device=device)
        self._counts = TokenCounts(generations=columns.generations, vocab_size=vocab_size, device=device)

    def apply(self, logits: Tensor, batch: LogitsBatch) -> Tensor:
        """allowed_token_ids and logit_bias, bad words, min_tokens, then penalties.

        Args:
            logits: [n, vocab_size]; not changed.
        """
        columns, slots = self._columns, batch.slots
        rows = np.flatnonzero(columns.has_biases[slots])
        if rows.size:
            logits = logits.index_add(0, self._on(rows), self._biases.of(slots[rows]))
        rows = np.flatnonzero(columns.num_bad_words[slots])
        if rows.size:
            logits = self._mask_bad_words(logits, rows, batch.rows(rows))
        is_short = batch.num_tokens - batch.num_prompt_tokens < columns.min_tokens[slots]
        rows = np.flatnonzero(is_short & (columns.end_token_ids.lengths_of(slots) > 0))
        if rows.size:
            ids = padded_ids(columns.end_token_ids, slots[rows])
            never = torch.full((), NEVER, dtype=logits.dtype, device=self._device)
            logits = logits.index_put((self._on(rows)[:, None], self._on(ids)), never)
        rows = np.flatnonzero(columns.has_penalties[slots])
        if rows.size:
            logits = self._penalise(logits, rows, batch.rows(rows))
        return logits

    def _on(self, array: IntArray) -> Tensor:
        return to_device(array, self._device)

    def _mask_bad_words(self, logits: Tensor, rows: IntArray, batch: LogitsBatch) -> Tensor:
        """Mask the last token of each bad word whose other tokens end the output."""
        columns, slots = self._columns, batch.slots
        words = columns.bad_words[slots, : int(columns.num_bad_words[slots].max())]  # [n, W, L]
        offsets = np.arange(words.shape[2] - 1) - (words.shape[2] - 1)  # -(L - 1) … -1
        places = batch.num_tokens[:, None] + offsets
        is_output = places >= batch.num_prompt_tokens[:, None]
        ends = np.where(is_output, batch.tokens[slots[:, None], np.maximum(places, 0)], ANY_TOKEN - 1)  # [n, L - 1]
        is_matched = ((words[:, :, :-1] == ends[:, None]) | (words[:, :, :-1] == ANY_TOKEN)).all(axis=-1)
        is_matched &= words[:, :, -1] != ANY_TOKEN
        row, word = np.nonzero(is_matched)
        if not row.size:
            return logits
        never = torch.full((), NEVER, dtype=logits.dtype, device=self._device)
        return logits.index_put((self._on(rows[row]), self._on(words[row, word, -1])), never)

    def _penalise(self, logits: Tensor, rows: IntArray, batch: LogitsBatch) -> Tensor:
        columns, slots, place = self._columns, batch.slots, self._on(rows)
        in_prompt, counts = self._counts.of(batch)
        penalised = apply_token_penalties(
            logits[place],
            in_prompt,
            counts,
            presence=to_device(columns.presence_penalty[slots], self._device),
            frequency=to_device(columns.frequency_penalty[slots], self._device),
            repetition=to_device(columns.repetition_penalty[slots], self._device),
        )
        return penalised if rows.size == logits.shape[0] else logits.index_copy(0, place, penalised)
