"""Changes of the logits that parameters ask for: masks, biases, penalties. Only rows that ask for one are touched."""

import numpy as np
import torch
from torch import Tensor

from pagoda_kernels.apply_penalties import apply_token_penalties
from pagoda_worker.batch import IntArray, TokenArray
from pagoda_worker.columns import RaggedColumn
from pagoda_worker.sampling_columns import ANY_TOKEN, SamplingColumns

NEVER = float("-inf")
"""Logit of a token that may not be sampled."""


def apply_masks(
    logits: Tensor,
    columns: SamplingColumns,
    slots: IntArray,
    tokens: TokenArray,
    num_prompt_tokens: IntArray,
    num_tokens: IntArray,
) -> Tensor:
    """allowed_token_ids, bad words, min_tokens and logit_bias, in this order. `logits` is overwritten.

    Args:
        logits: [n, vocab_size].
        slots, num_prompt_tokens, num_tokens: [n].
        tokens: [slots, tokens] the token log.
    """
    rows = np.flatnonzero(columns.allowed_token_ids.lengths_of(slots))
    if rows.size:
        kept = _on(logits, rows)
        ids = _padded_ids(columns.allowed_token_ids, slots[rows], logits)
        masked = torch.full_like(logits[kept], NEVER)
        logits[kept] = masked.scatter_(1, ids, logits[kept].gather(1, ids))
    rows = np.flatnonzero(columns.has_masks[slots] & (columns.num_bad_words[slots] > 0))
    if rows.size:
        _mask_bad_words(logits, columns, rows, slots[rows], tokens, num_prompt_tokens[rows], num_tokens[rows])
    is_short = num_tokens - num_prompt_tokens < columns.min_tokens[slots]
    rows = np.flatnonzero(is_short & (columns.end_token_ids.lengths_of(slots) > 0))
    if rows.size:
        masked = logits[_on(logits, rows)]
        ids = _padded_ids(columns.end_token_ids, slots[rows], logits)
        logits[_on(logits, rows)] = masked.scatter_(1, ids, NEVER)
    lengths = columns.bias_token_ids.lengths_of(slots)
    rows = np.flatnonzero(lengths)
    if rows.size:
        biased, width = _on(logits, rows), int(lengths.max())
        ids = torch.from_numpy(columns.bias_token_ids.values[slots[rows], :width]).to(logits.device)
        values = torch.from_numpy(columns.biases.values[slots[rows], :width]).to(logits.device)  # padded with 0
        logits[biased] = logits[biased].scatter_add_(1, ids, values)
    return logits


def _on(logits: Tensor, rows: IntArray) -> Tensor:
    return torch.from_numpy(rows).to(logits.device)


def _padded_ids(column: RaggedColumn, slots: IntArray, logits: Tensor) -> Tensor:
    """[n, longest] token ids; short lists repeat their first id, which changes nothing for a mask."""
    lengths = column.lengths[slots]
    ids = column.values[slots, : int(lengths.max())]
    ids = np.where(np.arange(ids.shape[1]) < lengths[:, None], ids, ids[:, :1])
    return torch.from_numpy(ids).to(logits.device)


def _mask_bad_words(
    logits: Tensor,
    columns: SamplingColumns,
    rows: IntArray,
    slots: IntArray,
    tokens: TokenArray,
    num_prompt_tokens: IntArray,
    num_tokens: IntArray,
) -> None:
    """Mask the last token of each word whose other tokens are the end of the output."""
    words = columns.bad_words[slots, : int(columns.num_bad_words[slots].max())]  # [n, W, L]
    behind = np.arange(words.shape[2] - 1) - (words.shape[2] - 1)  # -(L - 1) … -1
    places = num_tokens[:, None] + behind
    is_output = places >= num_prompt_tokens[:, None]
    ends = np.where(is_output, tokens[slots[:, None], np.maximum(places, 0)], ANY_TOKEN - 1)  # [n, L - 1]
    is_matched = ((words[:, :, :-1] == ends[:, None]) | (words[:, :, :-1] == ANY_TOKEN)).all(axis=-1)
    is_matched &= words[:, :, -1] != ANY_TOKEN
    row, word = np.nonzero(is_matched)
    logits[_on(logits, rows[row]), _on(logits, words[row, word, -1])] = NEVER


def apply_penalties(
    logits: Tensor,
    columns: SamplingColumns,
    slots: IntArray,
    tokens: TokenArray,
    num_prompt_tokens: IntArray,
    num_tokens: IntArray,
) -> Tensor:
    """Presence, frequency and repetition penalties, counted anew from the token log. `logits` is overwritten."""
    rows = np.flatnonzero(columns.has_penalties[slots])
    slots, num_prompt_tokens, num_tokens = slots[rows], num_prompt_tokens[rows], num_tokens[rows]
    log = tokens[slots, : int(num_tokens.max())]
    device, penalised = logits.device, _on(logits, rows)
    logits[penalised] = apply_token_penalties(
        logits[penalised],
        torch.from_numpy(log.astype(np.int64)).to(device),
        torch.from_numpy(num_prompt_tokens).to(device),
        torch.from_numpy(num_tokens).to(device),
        presence=torch.from_numpy(columns.presence_penalty[slots]).to(device),
        frequency=torch.from_numpy(columns.frequency_penalty[slots]).to(device),
        repetition=torch.from_numpy(columns.repetition_penalty[slots]).to(device),
    )
    return logits
