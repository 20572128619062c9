"""Log probabilities of sampled and of prompt tokens, from the logits as the model gave them."""

import numpy as np
import torch
from torch import Tensor

from pagoda_worker.batch import IntArray, LogprobColumns
from pagoda_worker.sampling_columns import NO_LOGPROBS


def logprob_columns(logits: Tensor, token_ids: IntArray, num_top: IntArray) -> LogprobColumns | None:
    """Columns for the rows that ask for log probabilities; None when none does.

    Args:
        logits: [n, vocab_size] float32.
        token_ids: [n] the token that each row is about.
        num_top: [n] top entries besides it; -1 is the vocabulary, NO_LOGPROBS leaves the row out.
    """
    rows = np.flatnonzero(num_top != NO_LOGPROBS)
    if not rows.size:
        return None
    vocab_size = logits.shape[1]
    num_top = np.where(num_top[rows] < 0, vocab_size, np.minimum(num_top[rows], vocab_size))
    if rows.size != logits.shape[0]:
        logits = logits[torch.from_numpy(rows).to(logits.device)]
    own = torch.from_numpy(token_ids[rows]).to(logits.device)[:, None]
    values = logits.log_softmax(dim=-1)
    own_values = values.gather(1, own)
    ranks = (values > own_values).sum(dim=-1) + 1
    width = int(num_top.max())
    ids, entries = own, own_values
    if width:
        top_values, top_ids = values.topk(width, dim=-1)
        ids, entries = torch.cat((own, top_ids), dim=1), torch.cat((own_values, top_values), dim=1)
    is_asked = np.arange(width + 1) <= num_top[:, None]
    return LogprobColumns(
        rows=rows,
        counts=num_top + 1,
        token_ids=ids.cpu().numpy()[is_asked],
        logprobs=entries.cpu().numpy()[is_asked],
        sampled_ranks=ranks.cpu().numpy(),
    )
