"""Drafter: drafts the next tokens of sequences by prompt lookup, fewer if drafts fail. Knows logs; no tensors."""

import numpy as np

from pagoda_common.config.speculative_config import SpeculativeConfig
from pagoda_worker.sampling.ngram_index import NgramIndex
from pagoda_worker.steps.step import IntArray, TokenArray

FIRST_PAUSE = 8
"""Number of tokens without a draft after a single-token draft was wrong; doubles with every such failure in a row."""
MAX_PAUSE = 128


class Drafter:
    """Makes drafts for all slots, and adapts their length per slot.

    A draft copies the tokens that followed an earlier occurrence of the last tokens (in a loop the draft continues
    itself). A sequence begins with drafts of num_speculative_tokens. A draft whose first token is wrong halves the next
    one; after a wrong draft of a single token there are no drafts for FIRST_PAUSE tokens, then for twice as many, up to
    MAX_PAUSE. A draft with `a` accepted tokens makes the next at least 2 `a` long, and resets the pause. Source: prompt
    lookup decoding, Saxena 2023 (github.com/apoorvumang/prompt-lookup-decoding).
    """

    def __init__(self, *, config: SpeculativeConfig, max_num_seqs: int) -> None:
        self._most = config.num_speculative_tokens
        self._index = NgramIndex(min_n=config.prompt_lookup_min, max_n=config.prompt_lookup_max)
        self._limit = np.full(max_num_seqs, self._most, dtype=np.int64)
        """[slots] tokens of the next draft."""
        self._pause = np.full(max_num_seqs, FIRST_PAUSE, dtype=np.int64)
        """[slots] length of the next pause."""
        self._resume_at = np.zeros(max_num_seqs, dtype=np.int64)
        """[slots] num_tokens from which drafts are made."""

    def forget(self, slot: int) -> None:
        """Reset a slot for another sequence."""
        self._index.forget(slot)
        self._limit[slot] = self._most
        self._pause[slot] = FIRST_PAUSE
        self._resume_at[slot] = 0

    def propose(
        self, slots: IntArray, tokens: TokenArray, num_tokens: IntArray, most: IntArray
    ) -> tuple[IntArray, TokenArray]:
        """[n] tokens of each draft, and [n, longest] the drafts.

        Args:
            slots: [n], without duplicates.
            tokens: [slots, tokens] the logs.
            num_tokens: [n] tokens of each.
            most: [n] maximum draft tokens.
        """
        lengths = np.minimum(most, self._limit[slots])
        lengths[num_tokens < self._resume_at[slots]] = 0
        rows = np.flatnonzero(lengths > 0)
        if rows.size:
            entries = self._index.find(slots[rows], tokens, num_tokens[rows])
            lengths[rows[entries == 0]] = 0
            rows, entries = rows[entries > 0], entries[entries > 0]
        if not rows.size:
            return np.zeros_like(lengths), np.zeros((slots.size, 0), dtype=np.int32)
        ahead = np.arange(int(lengths.max()))
        known = num_tokens[rows] - entries
        drafts = np.zeros((slots.size, ahead.size), dtype=np.int32)
        drafts[rows] = tokens[slots[rows, None], entries[:, None] + ahead % known[:, None]]
        return lengths, drafts

    def judge(self, slots: IntArray, num_draft: IntArray, num_accepted: IntArray, num_tokens: IntArray) -> None:
        """Adapt to results of drafts. [n] each: slots, draft tokens, accepted tokens, and the log's current number of
        tokens."""
        is_wrong = num_accepted == 0
        right, wrong = slots[~is_wrong], slots[is_wrong]
        grown = np.maximum(self._limit[right], 2 * num_accepted[~is_wrong])
        self._limit[right] = np.minimum(grown, self._most)
        self._pause[right] = FIRST_PAUSE
        was_single = num_draft[is_wrong] == 1
        self._limit[wrong] = np.maximum(num_draft[is_wrong] // 2, 1)
        tired = wrong[was_single]
        self._resume_at[tired] = num_tokens[is_wrong][was_single] + self._pause[tired]
        self._pause[tired] = np.minimum(2 * self._pause[tired], MAX_PAUSE)
