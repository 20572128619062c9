"""Log probabilities (or the logits themselves) of sampled and of prompt tokens."""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pagoda_kernels.sampling.top_logprobs import top_logprobs
from pagoda_worker.memory.transfers import HostCopies, to_device
from pagoda_worker.sampling.sampler import masked
from pagoda_worker.sampling.sampling_columns import NO_LOGPROBS
from pagoda_worker.sampling.structured import TokenMask
from pagoda_worker.steps.step import IntArray, LogprobColumns


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchedLogprobs:
    """Log probabilities of rows that are being copied to the host."""

    rows: IntArray
    """[m] rows that request log probabilities."""
    num_entries: IntArray
    """[m] number of entries of each row, without its own token."""
    copies: HostCopies
    """[m, 1 + maximum entries] token ids and values, the row's own token first, and [m] its rank."""

    def columns(self, is_kept: npt.NDArray[np.bool_] | None = None) -> LogprobColumns | None:
        """Wait for the result. `is_kept`: [all rows] rows to keep; the others are dropped, and rows are renumbered.
        None if none is left."""
        all_ids, all_entries, all_ranks = self.copies.wait()
        rows, counts = self.rows, self.num_entries + 1
        is_asked = np.arange(all_ids.shape[1]) < counts[:, None]
        if is_kept is not None and not is_kept.all():
            is_left = is_kept[rows]
            is_asked &= is_left[:, None]
            rows, counts, all_ranks = (np.cumsum(is_kept) - 1)[rows[is_left]], counts[is_left], all_ranks[is_left]
        if not rows.size:
            return None
        return LogprobColumns(
            rows=rows,
            counts=counts,
            token_ids=all_ids[is_asked],
            logprobs=all_entries[is_asked],
            sampled_ranks=all_ranks,
        )


def logprob_columns(
    logits: Tensor,
    token_ids: IntArray,
    num_top: IntArray,
    *,
    chosen: tuple[IntArray, IntArray] | None = None,
    is_normalised: bool = True,
    token_mask: TokenMask | None = None,
) -> LogprobColumns | None:
    """Wait for the result of `launch_logprobs`. `token_ids`: [n] on the host."""
    if (num_top == NO_LOGPROBS).all():
        return None
    launched = launch_logprobs(
        logits,
        to_device(token_ids, logits.device),
        num_top,
        chosen=chosen,
        is_normalised=is_normalised,
        token_mask=token_mask,
    )
    return None if launched is None else launched.columns()


def launch_logprobs(
    logits: Tensor,
    token_ids: Tensor,
    num_top: IntArray,
    *,
    chosen: tuple[IntArray, IntArray] | None = None,
    is_normalised: bool = True,
    token_mask: TokenMask | None = None,
) -> LaunchedLogprobs | None:
    """Launch log probabilities for the rows that request them, without waiting; None if none does.

    Args:
        logits: [n, vocab_size] float32.
        token_ids: [n] int64 on the device: the row's own token.
        num_top: [n] number of top entries besides it; -1 is the vocabulary, NO_LOGPROBS skips the row.
        chosen: [n, k] token ids and [n] their number: if not 0, they replace the top entries.
        is_normalised: False returns raw logits.
        token_mask: rows whose log probabilities are -inf outside of the mask, without renormalising. All of these
        request log probabilities.
    """
    rows = np.flatnonzero(num_top != NO_LOGPROBS)
    if not rows.size:
        return None
    device, vocab_size = logits.device, logits.shape[1]
    num_entries = np.where(num_top[rows] < 0, vocab_size, np.minimum(num_top[rows], vocab_size))
    own = token_ids[:, None]
    if rows.size != logits.shape[0]:
        asking = to_device(rows, device)
        logits, own = logits[asking], own[asking]
    width = int(num_entries.max())
    has_chosen = chosen is not None and bool(chosen[1][rows].any())
    if is_normalised and token_mask is None and not has_chosen:
        own_values, ranks, top_values, top_ids = top_logprobs(logits, own.squeeze(1), width)
        ids, entries = torch.cat((own, top_ids), dim=1), torch.cat((own_values[:, None], top_values), dim=1)
        return LaunchedLogprobs(rows=rows, num_entries=num_entries, copies=HostCopies(ids, entries, ranks))
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
    return LaunchedLogprobs(rows=rows, num_entries=num_entries, copies=HostCopies(ids, entries, ranks))
