"""SampledRows: the sampling rows of a step, several for a sequence with a draft, and which of their tokens count."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from pagoda_worker.sampling.logits_state import LogitsBatch
from pagoda_worker.steps.input_batch import ForwardInputs, InputBatch
from pagoda_worker.steps.step import IntArray


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledRows:
    """One row for the last known token of each sequence that samples, then one for each token of its draft.

    Each row samples with its own offset, as without drafts. So a draft token is accepted exactly if the row before
    sampled it, and the tokens equal those of decoding without drafts, greedy or seeded.
    """

    sequences: IntArray
    """[num_seqs] indexes of the sequences in the step's inputs."""
    slots: IntArray
    """[num_seqs]."""
    num_draft_tokens: IntArray
    """[num_seqs]."""
    starts: IntArray
    """[num_seqs] first row of each."""
    owners: IntArray
    """[n] each row's sequence, an index into `sequences`."""
    ahead: IntArray
    """[n] draft tokens before and in each row."""
    logit_rows: IntArray
    """[n] indexes of the step's tokens."""
    batch: LogitsBatch
    """The rows [n], each with the part of the log that it has seen."""

    @classmethod
    def of(cls, inputs: ForwardInputs, batch: InputBatch, last_tokens: Tensor | None = None) -> "SampledRows":
        """The rows of a step. `last_tokens`: as in LogitsBatch, for a step without drafts."""
        if inputs.is_plain:
            sequences = last = inputs.batch_rows
            slots, num_draft = inputs.slots, inputs.num_draft_tokens
        else:
            sequences = np.flatnonzero(inputs.is_sampled)
            slots, num_draft = inputs.slots[sequences], inputs.num_draft_tokens[sequences]
            last = np.cumsum(inputs.num_scheduled_tokens)[sequences] - 1
        if inputs.is_plain or not num_draft.any():
            each = sequences if inputs.is_plain else np.arange(sequences.size)
            return cls(
                sequences=sequences,
                slots=slots,
                num_draft_tokens=num_draft,
                starts=each,
                owners=each,
                ahead=num_draft,
                logit_rows=last,
                batch=LogitsBatch(
                    slots=slots,
                    tokens=batch.tokens,
                    num_prompt_tokens=batch.num_prompt_tokens[slots],
                    num_tokens=batch.num_tokens[slots],
                    last_tokens=last_tokens,
                ),
            )
        owners = np.repeat(np.arange(sequences.size), 1 + num_draft)
        starts = np.cumsum(1 + num_draft) - 1 - num_draft
        ahead = np.arange(owners.size) - starts[owners]
        return cls(
            sequences=sequences,
            slots=slots,
            num_draft_tokens=num_draft,
            starts=starts,
            owners=owners,
            ahead=ahead,
            logit_rows=(last - num_draft)[owners] + ahead,
            batch=LogitsBatch(
                slots=slots[owners],
                tokens=batch.tokens,
                num_prompt_tokens=batch.num_prompt_tokens[slots][owners],
                num_tokens=batch.num_tokens[slots][owners] + ahead,
            ),
        )

    def num_new(self, token_ids: IntArray, is_bad: npt.NDArray[np.bool_]) -> IntArray:
        """[num_seqs] number of tokens that count: those up to the first wrong draft token, without those of bad rows.

        Args:
            token_ids: [n] sampled.
            is_bad: [n].
        """
        if self.owners.size == self.sequences.size:
            return (~is_bad).astype(np.int64)
        batch = self.batch
        # What stands after a row without a draft token is anything, and may be after the columns.
        guessed = batch.tokens[batch.slots, np.minimum(batch.num_tokens, batch.tokens.shape[1] - 1)]
        is_right = (token_ids == guessed) & ~is_bad & (self.ahead < self.num_draft_tokens[self.owners])
        wrong_at = np.where(is_right, self.ahead.size, self.ahead)
        num_right = np.minimum.reduceat(wrong_at, self.starts)
        result: IntArray = num_right + ~is_bad[self.starts + num_right]
        return result
