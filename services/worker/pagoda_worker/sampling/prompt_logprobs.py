"""Log probabilities of prompt tokens, after the step that computed them."""

from collections.abc import Callable

import numpy as np
from torch import Tensor

from pagoda_worker.sampling.logprobs import logprob_columns
from pagoda_worker.sampling.sampling_columns import NO_LOGPROBS
from pagoda_worker.steps.input_batch import ForwardInputs, InputBatch
from pagoda_worker.steps.step import IntArray, LogprobColumns, PromptLogprobs

MAX_PROMPT_LOGPROB_ROWS = 256
"""Number of prompt positions whose logits are held at once."""


def describes_prompts(inputs: ForwardInputs, batch: InputBatch) -> bool:
    """Whether the step computes prompt tokens whose log probabilities are requested."""
    asks = batch.sampling.prompt_logprobs[inputs.slots] != NO_LOGPROBS
    if not asks.any():
        return False
    starts = inputs.seq_lens - inputs.num_scheduled_tokens
    return bool((asks & (starts + 1 < batch.num_prompt_tokens[inputs.slots])).any())


def prompt_logprobs(
    inputs: ForwardInputs,
    batch: InputBatch,
    logits_of: Callable[[IntArray], Tensor],
    *,
    is_normalised: bool,
    is_leader: bool,
) -> list[PromptLogprobs]:
    """Log probabilities of the prompt tokens after those of this step.

    Args:
        logits_of: computes [n, vocab_size] float32 for n of the step's tokens; all ranks compute them together.
        is_leader: False computes the logits and returns nothing.
    """
    asked = batch.sampling.prompt_logprobs[inputs.slots]
    if (asked == NO_LOGPROBS).all():
        return []
    starts = np.cumsum(inputs.num_scheduled_tokens) - inputs.num_scheduled_tokens
    result = []
    for row in np.flatnonzero(asked != NO_LOGPROBS):
        slot, num_rows = int(inputs.slots[row]), int(inputs.num_scheduled_tokens[row])
        first = int(inputs.seq_lens[row]) - num_rows + 1  # the token that the chunk's first row predicts
        num_rows = min(num_rows, int(batch.num_prompt_tokens[slot]) - first)
        if num_rows <= 0:
            continue
        parts = []
        for begin in range(0, num_rows, MAX_PROMPT_LOGPROB_ROWS):
            size = min(MAX_PROMPT_LOGPROB_ROWS, num_rows - begin)
            logits = logits_of(np.arange(starts[row] + begin, starts[row] + begin + size))
            if not is_leader:
                continue
            targets = batch.tokens[slot, first + begin : first + begin + size].astype(np.int64)
            part = logprob_columns(logits, targets, np.full(size, asked[row]), is_normalised=is_normalised)
            assert part is not None
            parts.append(part)
        if parts:
            result.append(PromptLogprobs(slot=slot, start=first, logprobs=_joined(parts)))
    return result


def _joined(parts: list[LogprobColumns]) -> LogprobColumns:
    def column(get: Callable[[LogprobColumns], np.ndarray]) -> np.ndarray:
        return np.concatenate([get(part) for part in parts])

    counts = column(lambda part: part.counts)
    return LogprobColumns(
        rows=np.arange(counts.size),
        counts=counts,
        token_ids=column(lambda part: part.token_ids),
        logprobs=column(lambda part: part.logprobs),
        sampled_ranks=column(lambda part: part.sampled_ranks),
    )
