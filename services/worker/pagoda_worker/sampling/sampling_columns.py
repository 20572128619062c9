"""SamplingColumns: the sampling parameters of all slots, one array per parameter, so that steps need no loops."""

import numpy as np

from pagoda_common.params.sampling_params import SAMPLING_FIELDS, SamplingParams
from pagoda_worker.sampling.columns import RaggedColumn, grown
from pagoda_worker.steps.step import FloatArray, IntArray

NO_LOGPROBS = -2
"""Value of the logprobs columns for none requested (-1 is the vocabulary)."""
ANY_TOKEN = -1
"""Padding on the left of bad words, which matches every token."""
PLAIN_COLUMNS = [row for row in SAMPLING_FIELDS.values() if row.column is not None]
PLAIN_NAMES = [row.name for row in PLAIN_COLUMNS]


class SamplingColumns:
    """Slot-indexed columns; every field has max_num_seqs entries.

    The table of sampling fields says which parameters have a column of their name with unchanged values."""

    temperature: FloatArray
    """0 is greedy."""
    presence_penalty: FloatArray
    frequency_penalty: FloatArray
    repetition_penalty: FloatArray
    min_tokens: IntArray

    def __init__(self, *, max_num_seqs: int, vocab_size: int) -> None:
        n = max_num_seqs
        self._vocab_size = vocab_size
        for row in PLAIN_COLUMNS:
            setattr(self, row.name, np.full(n, row.default, dtype=row.column))
        self.temperature[:] = 0  # greedy, until a sequence says otherwise
        self.seed = np.zeros(n, dtype=np.uint64)
        self.has_penalties = np.zeros(n, dtype=np.bool_)
        self.logprobs = np.full(n, NO_LOGPROBS, dtype=np.int64)
        self.prompt_logprobs = np.full(n, NO_LOGPROBS, dtype=np.int64)
        self.end_token_ids = RaggedColumn(dtype=np.int64)
        """Tokens that are masked until min_tokens are reached."""
        self.bias_token_ids = RaggedColumn(dtype=np.int64)
        self.biases = RaggedColumn(dtype=np.float32)
        self.allowed_token_ids = RaggedColumn(dtype=np.int64)
        self.num_bad_words = np.zeros(n, dtype=np.int64)
        self.bad_words = np.full((0, 0, 0), ANY_TOKEN, dtype=np.int64)
        """[slots, words, longest word], padded on the left."""
        self.has_biases = np.zeros(n, dtype=np.bool_)
        """Whether the slot has logit_bias or allowed_token_ids."""
        self.has_rules = np.zeros(n, dtype=np.bool_)
        """Whether anything changes the logits: biases, bad words, min_tokens, penalties."""
        self.is_greedy = np.ones(n, dtype=np.bool_)
        """Whether the likeliest token of the unchanged logits is sampled, without log probabilities."""
        self.needs_log = np.zeros(n, dtype=np.bool_)
        """Whether sampling needs the token log on the host, not only its length (bad words of several tokens,
        structured outputs, logits processors)."""
        self.logprob_token_ids = RaggedColumn(dtype=np.int64)
        """Log probabilities of these instead of the likeliest tokens."""
        self.generations = np.zeros(n, dtype=np.int64)
        """Increases with each sequence that enters or leaves the slot, so that derived state becomes stale."""

    def __getitem__(self, name: str) -> FloatArray | IntArray:
        """The column of a plain parameter."""
        column: FloatArray | IntArray = getattr(self, name)
        return column

    def set(self, slot: int, params: SamplingParams, eos_token_ids: tuple[int, ...]) -> None:
        """Store a sequence's parameters; token ids outside of the vocabulary are left out."""
        self.generations[slot] += 1
        for name in PLAIN_NAMES:
            getattr(self, name)[slot] = getattr(params, name)
        self.seed[slot] = np.uint64(params.seed or 0)
        self.has_penalties[slot] = (
            params.presence_penalty != 0 or params.frequency_penalty != 0 or params.repetition_penalty != 1
        )
        self.logprobs[slot] = NO_LOGPROBS if params.logprobs is None else params.logprobs
        self.prompt_logprobs[slot] = NO_LOGPROBS if params.prompt_logprobs is None else params.prompt_logprobs
        self.logprob_token_ids.set(slot, self._known(params.logprob_token_ids or ()))
        self._set_masks(slot, params, eos_token_ids)
        self.is_greedy[slot] = params.temperature == 0 and params.logprobs is None and not self.has_rules[slot]
        self.needs_log[slot] = (
            any(len(word) > 1 for word in params.bad_words_token_ids) or params.structured_outputs is not None
        )

    def _set_masks(self, slot: int, params: SamplingParams, eos_token_ids: tuple[int, ...]) -> None:
        ends = self._known([*eos_token_ids, *(params.stop_token_ids or ())]) if params.min_tokens else self._known([])
        bias = {token_id: value for token_id, value in (params.logit_bias or {}).items() if token_id < self._vocab_size}
        allowed = self._known(params.allowed_token_ids or ())
        words = [word for word in params.bad_words_token_ids if word and max(word) < self._vocab_size]
        self.end_token_ids.set(slot, np.unique(ends))
        self.bias_token_ids.set(slot, np.array(list(bias), dtype=np.int64))
        self.biases.set(slot, np.array(list(bias.values()), dtype=np.float32))
        self.allowed_token_ids.set(slot, allowed)
        self.num_bad_words[slot] = len(words)
        if words:
            longest = max(len(word) for word in words)
            self._reserve_bad_words(slot, len(words), longest)
            for index, word in enumerate(words):
                self.bad_words[slot, index, -len(word) :] = word
        self.has_biases[slot] = bool(bias or allowed.size)
        self.has_rules[slot] = bool(self.has_biases[slot] or ends.size or words or self.has_penalties[slot])

    def logprob_token_ids_of(self, slots: IntArray) -> tuple[IntArray, IntArray] | None:
        """[n, longest] token ids and [n] their number; None if there are none."""
        lengths = self.logprob_token_ids.lengths_of(slots)
        if not lengths.any():
            return None
        ids = np.zeros((slots.size, int(lengths.max())), dtype=np.int64)
        rows = np.flatnonzero(lengths)
        ids[rows] = self.logprob_token_ids.values[slots[rows], : ids.shape[1]]
        return ids, lengths

    def _known(self, token_ids: object) -> IntArray:
        ids = np.array(token_ids, dtype=np.int64)
        return ids[ids < self._vocab_size]

    def _reserve_bad_words(self, slot: int, num_words: int, longest: int) -> None:
        have = self.bad_words.shape
        if longest > have[2]:  # padding is on the left: shift what is there to the right
            wider = np.full((*have[:2], longest), ANY_TOKEN, dtype=np.int64)
            wider[:, :, longest - have[2] :] = self.bad_words
            self.bad_words = wider
        self.bad_words = grown(self.bad_words, (slot + 1, num_words, self.bad_words.shape[2]), fill=ANY_TOKEN)
        self.bad_words[slot] = ANY_TOKEN

    def clear(self, slot: int) -> None:
        """Drop a sequence: rare parameters cost nothing when no sequence has them."""
        self.generations[slot] += 1
        self.temperature[slot] = 0
        self.logprobs[slot] = self.prompt_logprobs[slot] = NO_LOGPROBS
        self.has_penalties[slot] = self.has_biases[slot] = self.has_rules[slot] = False
        self.num_bad_words[slot] = self.min_tokens[slot] = 0
