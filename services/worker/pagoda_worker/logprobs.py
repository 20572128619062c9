"""Log probabilities (or the logits themselves) of sampled and of prompt tokens."""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from pagoda_kernels.top_logprobs import top_logprobs
from pagoda_worker.batch import IntArray, LogprobColumns
from pagoda_worker.sampler import masked
from pagoda_worker.sampling_columns import NO_LOGPROBS
from pagoda_worker.structured import TokenMask
from pagoda_worker.transfers import to_device, to_host


def logprob_columns(
    logits: Tensor,
    token_ids: IntArray,
    num_top: IntArray,
    *,
    chosen: tuple[IntArray, IntArray] | None = None,
    is_normalised: bool = True,
    token_mask: TokenMask | None = None,
) -> LogprobColumns | None:
    """Columns for the rows that ask for log probabilities; None when none does.

    Args:
        logits: [n, vocab_size] float32.
        token_ids: [n] the token that each row is about.
        num_top: [n] top entries besides it; -1 is the vocabulary, NO_LOGPROBS leaves the row out.
        chosen: [n, k] token ids and [n] how many of them a row has: where there are some, they are its entries instead
            of the top ones.
        is_normalised: False gives the logits as they are.
        token_mask: rows whose log probabilities are -inf outside of it; they are not normalised anew. All of them ask.
    """
    rows = np.flatnonzero(num_top != NO_LOGPROBS)
    if not rows.size:
        return None
    device, vocab_size = logits.device, logits.shape[1]
    num_entries = np.where(num_top[rows] < 0, vocab_size, np.minimum(num_top[rows], vocab_size))
    if rows.size != logits.shape[0]:
        logits = logits[to_device(rows, device)]
    own = to_device(token_ids[rows], device)[:, None]
    width = int(num_entries.max())
    has_chosen = chosen is not None and bool(chosen[1][rows].any())
    if is_normalised and token_mask is None and not has_chosen:
        own_values, ranks, top_values, top_ids = top_logprobs(logits, own.squeeze(1), width)
        ids, entries = torch.cat((own, top_ids), dim=1), torch.cat((own_values[:, None], top_values), dim=1)
        return _columns(rows, num_entries, ids, entries, ranks)
    values = logits.log_softmax(dim=-1) if is_normalised else logits
    if token_mask is not None:
        values = masked(values, replace(token_mask, rows=np.searchsorted(rows, token_mask.rows)))
    own_values = values.gather(1, own)
    ranks = (values > own_values).sum(dim=-1) + 1
    top_values, top_ids = values.topk(width, dim=-1)
    ids, entries = torch.cat((own, top_ids), dim=1), torch.cat((own_values, top_values), dim=1)
    if chosen is not None and has_chosen:
        num_chosen = chosen[1][rows]
        most = int(num_chosen.max())
        wider = most + 1 - ids.shape[1]
        if wider > 0:
            ids, entries = (torch.nn.functional.pad(part, (0, wider)) for part in (ids, entries))
        picked = np.flatnonzero(num_chosen)
        place = to_device(picked, device)
        picked_ids = to_device(chosen[0][rows[picked], :most], device)
        columns = slice(1, 1 + most)
        ids[place, columns] = picked_ids
        entries[place, columns] = values[place].gather(1, picked_ids)
        num_entries = np.where(num_chosen > 0, num_chosen, num_entries)
    return _columns(rows, num_entries, ids, entries, ranks)


def _columns(rows: IntArray, num_entries: IntArray, ids: Tensor, entries: Tensor, ranks: Tensor) -> LogprobColumns:
    """`ids`, `entries`: [n, 1 + most entries], the row's own token first; what a row did not ask for is left out."""
    is_asked = np.arange(ids.shape[1]) <= num_entries[:, None]
    all_ids, all_entries, all_ranks = to_host(ids, entries, ranks)
    return LogprobColumns(
        rows=rows,
        counts=num_entries + 1,
        token_ids=all_ids[is_asked],
        logprobs=all_entries[is_asked],
        sampled_ranks=all_ranks,
    )
