"""NgramIndex: finds earlier occurrences of the last tokens of each slot's log. Arrays over slots, no loop over logs."""

import numpy as np
import numpy.typing as npt

from pagoda_worker.sampling.columns import grown
from pagoda_worker.steps.step import IntArray, TokenArray

FEW_SLOTS = 4
"""Number of logs up to which a full search is used: it takes a few short operations per log, and table look-ups are
cheaper only for several logs together."""
MAX_STEPPED = 8
"""Number of new tokens of a slot up to which they are entered together with other slots' tokens; more are entered slot
by slot."""
_MULTIPLIER = 0x9E3779B97F4A7C15
_WORD = 64


class NgramIndex:
    """For every n: a hash table of the n-grams in each slot's log, with chained entries, latest first.

    An entry is the position after the n-gram. A look-up follows the chain until the tokens are equal, so it finds the
    latest occurrence, and no false one. The cost of entering and looking up does not depend on the log's length: tables
    have two buckets per column of the log. Memory is 12 bytes per token and n.
    """

    def __init__(self, *, min_n: int, max_n: int) -> None:
        self._n = np.arange(min_n, max_n + 1)  # [N]
        self._back = np.arange(1, max_n + 1)
        self._is_behind = self._back > self._n[:, None]  # [N, max_n] tokens that are no part of the n-gram
        self._powers = np.array([pow(_MULTIPLIER, n, 1 << _WORD) for n in range(1, max_n + 1)], dtype=np.uint64)
        self._num_bits = 0
        self._heads = np.zeros((0, self._n.size, 0), dtype=np.int32)
        """[slots, N, buckets] latest entry; 0: none, because no n-gram ends before the first token."""
        self._links = np.zeros((0, self._n.size, 0), dtype=np.int32)
        """[slots, N, tokens + 1] the previous entry in the bucket, for each entry."""
        self._num_entered = np.zeros(0, dtype=np.int64)
        """[slots] position up to which entries exist."""

    def forget(self, slot: int) -> None:
        """Reset a slot for another sequence."""
        if slot < self._num_entered.size and self._num_entered[slot]:
            self._num_entered[slot] = 0
            self._heads[slot] = 0

    def find(self, slots: IntArray, tokens: TokenArray, num_tokens: IntArray) -> IntArray:
        """[n] the position after the latest earlier occurrence of the longest n-gram that ends each log. 0 if even the
        shortest n-gram has none.

        Args:
            slots: [n], without duplicates.
            tokens: [slots, tokens] the logs.
            num_tokens: [n] tokens of each.
        """
        if slots.size <= FEW_SLOTS:
            logs = (tokens[slot, :count] for slot, count in zip(slots.tolist(), num_tokens.tolist(), strict=True))
            return np.array([self._search(log) for log in logs], dtype=np.int64)
        self._reserve(tokens.shape)
        for slot in slots[self._num_entered[slots] >= num_tokens].tolist():
            self.forget(slot)  # the log is shorter than it was
        self._catch_up(slots, tokens, num_tokens - 1)
        last = self._last_tokens(slots, tokens, num_tokens)
        entries = self._enter(slots, num_tokens, self._buckets(last))  # [n, N]
        entries[self._n > num_tokens[:, None]] = 0
        found = np.zeros_like(entries)
        row, place = np.nonzero(entries)
        entry = entries[row, place]
        while row.size:
            before = tokens[slots[row, None], entry[:, None] - self._back]  # [m, max_n]; wraps after the n-gram only
            is_equal = ((before == last[row]) | self._is_behind[place]).all(axis=1)
            found[row[is_equal], place[is_equal]] = entry[is_equal]
            row, place = row[~is_equal], place[~is_equal]  # the entry is of another n-gram in the same bucket
            entry = self._links[slots[row], place, entry[~is_equal]]
            is_open = entry > 0
            row, place, entry = row[is_open], place[is_open], entry[is_open]
        longest = self._n.size - 1 - np.argmax(found[:, ::-1] > 0, axis=1)  # any where there is none
        result: IntArray = found[np.arange(slots.size), longest].astype(np.int64)
        return result

    def _search(self, log: TokenArray) -> int:
        """The same for one log, by a full comparison."""
        found, ends = 0, np.flatnonzero(log[:-1] == log[-1]) + 1
        for n in range(1, int(self._n[-1]) + 1):
            if n > 1:
                ends = ends[ends >= n]
                ends = ends[log[ends - n] == log[-n]] if n <= log.size else ends[:0]
            if not ends.size:
                break
            if n >= self._n[0]:
                found = int(ends[-1])
        return found

    def _last_tokens(self, slots: IntArray, tokens: TokenArray, positions: IntArray) -> TokenArray:
        """[n, max_n] the tokens before `positions`, latest first; arbitrary before the first token."""
        result: TokenArray = tokens[slots[:, None], positions[:, None] - self._back]
        return result

    def _buckets(self, last: TokenArray) -> IntArray:
        """[n, N] buckets of the n-grams in [n, max_n] tokens, latest first."""
        sums = np.cumsum((last.astype(np.uint64) + np.uint64(1)) * self._powers, axis=1)[:, self._n[0] - 1 :]
        mixed = (sums ^ (sums >> np.uint64(29))) * self._powers[0]
        buckets: IntArray = (mixed >> np.uint64(_WORD - self._num_bits)).view(np.int64)
        return buckets

    def _enter(self, slots: IntArray, positions: IntArray, buckets: IntArray) -> npt.NDArray[np.int32]:
        """Make entries at `positions`; returns [n, N] the previous first entries of their buckets."""
        tables = slots[:, None] * self._n.size + np.arange(self._n.size)
        places = tables * self._heads.shape[2] + buckets
        heads, links = self._heads.reshape(-1), self._links.reshape(-1)
        before: npt.NDArray[np.int32] = heads[places]
        links[tables * self._links.shape[2] + positions[:, None]] = before
        if int(positions.min()) >= int(self._n[-1]):
            heads[places] = positions[:, None]
        else:  # an n-gram does not begin before the log
            heads[places] = np.where(self._n <= positions[:, None], positions[:, None], before)
        self._num_entered[slots] = positions
        return before

    def _catch_up(self, slots: IntArray, tokens: TokenArray, positions: IntArray) -> None:
        """Make the entries up to `positions` that are missing."""
        missing = positions - self._num_entered[slots]
        for row in np.flatnonzero(missing > MAX_STEPPED).tolist():
            self._enter_span(int(slots[row]), tokens, int(positions[row]))
            missing[row] = 0
        for ahead in range(int(missing.max(initial=0)) - 1, -1, -1):
            rows = np.flatnonzero(missing > ahead)
            entered = slots[rows], positions[rows] - ahead
            self._enter(*entered, self._buckets(self._last_tokens(entered[0], tokens, entered[1])))

    def _enter_span(self, slot: int, tokens: TokenArray, end: int) -> None:
        """Make all of a slot's missing entries up to `end`."""
        start = int(self._num_entered[slot]) + 1
        positions = np.arange(start, end + 1)
        buckets = self._buckets(self._last_tokens(np.full(positions.size, slot), tokens, positions))
        for place, n in enumerate(self._n.tolist()):
            first = max(n - start, 0)
            order = first + np.argsort(buckets[first:, place], kind="stable")
            ranked, at, heads = buckets[order, place], positions[order], self._heads[slot, place]
            is_first = np.ones(at.size, dtype=np.bool_)
            is_first[1:] = ranked[1:] != ranked[:-1]
            before = np.zeros_like(at)
            before[1:] = at[:-1]
            self._links[slot, place, at] = np.where(is_first, heads[ranked], before)
            is_last = np.roll(is_first, -1)
            heads[ranked[is_last]] = at[is_last]
        self._num_entered[slot] = end

    def _reserve(self, shape: tuple[int, ...]) -> None:
        """Grow with the logs; with more buckets all entries are made again."""
        num_slots, num_columns = shape
        self._num_entered = grown(self._num_entered, (num_slots,))
        num_bits = max(4, (num_columns - 1).bit_length() + 1)
        if num_bits > self._num_bits:
            self._num_bits = num_bits
            self._heads = np.zeros((num_slots, self._n.size, 1 << num_bits), dtype=np.int32)
            self._links = np.zeros((num_slots, self._n.size, num_columns + 1), dtype=np.int32)
            self._num_entered[:] = 0
        self._heads = grown(self._heads, (num_slots, self._n.size, 1 << self._num_bits))
        self._links = grown(self._links, (num_slots, self._n.size, num_columns + 1))
