"""Drafter: guesses the next tokens of sequences by prompt lookup, fewer where guesses fail. Knows logs; no tensors."""

import numpy as np

from pagoda_common.config.speculative_config import SpeculativeConfig
from pagoda_worker.sampling.ngram_index import NgramIndex
from pagoda_worker.steps.step import IntArray, TokenArray

FIRST_PAUSE = 8
"""Tokens without a draft after one of a single token was wrong; doubles with every such failure in a row."""
MAX_PAUSE = 128


class Drafter:
    """Drafts for all slots, and how well each slot's drafts do.

    A draft has what followed the last tokens where they stood before (a loop goes round: its own draft is its
    continuation). A sequence begins with drafts of num_speculative_tokens; one that is wrong from its first token on
    halves the next, and after a wrong one of a single token there is none for FIRST_PAUSE tokens, then for twice as
    many, up to MAX_PAUSE. One that is right for a tokens makes the next at least 2 a long, and pauses short again.
    Source: prompt lookup decoding, Saxena 2023 (github.com/apoorvumang/prompt-lookup-decoding).
    """

    def __init__(self, *, config: SpeculativeConfig, max_num_seqs: int) -> None:
        self._most = config.num_speculative_tokens
        self._index = NgramIndex(min_n=config.prompt_lookup_min, max_n=config.prompt_lookup_max)
        self._limit = np.full(max_num_seqs, self._most, dtype=np.int64)
        """[slots] tokens of the next draft."""
        self._pause = np.full(max_num_seqs, FIRST_PAUSE, dtype=np.int64)
        """[slots] length of the next pause."""
        self._resume_at = np.zeros(max_num_seqs, dtype=np.int64)
        """[slots] num_tokens from which on there are drafts."""

    def forget(self, slot: int) -> None:
        """Another sequence has the slot."""
        self._index.forget(slot)
        self._limit[slot] = self._most
        self._pause[slot] = FIRST_PAUSE
        self._resume_at[slot] = 0

    def propose(
        self, slots: IntArray, tokens: TokenArray, num_tokens: IntArray, most: IntArray
    ) -> tuple[IntArray, TokenArray]:
        """[n] tokens of each draft, and [n, longest] the drafts.

        Args:
            slots: [n], each once.
            tokens: [slots, tokens] the logs.
            num_tokens: [n] tokens of each.
            most: [n] bounds.
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
        """Learn from drafts. [n] each: slots with one, its tokens, how many were right, and the log's tokens now."""
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
