"""How many tokens a step takes, and how many of a sequence. Knows the configuration; no blocks, no clock."""

from collections.abc import Iterable

from pagoda_common.config.engine_config import SchedulerConfig
from pagoda_scheduler.core.request import Request
from pagoda_scheduler.kv.recurrent_states import RecurrentStates

TARGET_NS = 250_000_000
"""Longest time of a step in which prompts are computed beside decoding sequences."""
MIN_TOKENS = 512
"""Such a step may have so many tokens in any case: smaller chunks make prompts slower, and steps hardly shorter."""
FASTER_SHARE = 0.2
SLOWER_SHARE = 0.5
"""Parts of the way that the estimated time of a token goes towards that of a step."""


class Chunks:
    """Cuts prompts into chunks.

    Where a full step takes longer than TARGET_NS, on slow and on busy devices, steps are smaller while sequences
    decode, which would wait for prompts of others. The time of a token is that of past steps.
    """

    def __init__(self, *, config: SchedulerConfig, states: RecurrentStates | None = None) -> None:
        """`states`: chunks end where states are saved."""
        self._states = states
        self._is_chunked = config.enable_chunked_prefill
        self._max_tokens = config.max_num_batched_tokens
        self._threshold = config.long_prefill_token_threshold
        self._ns_per_token = 0.0
        self._limit = self._max_tokens
        """Tokens of a step beside decoding sequences."""

    def took(self, num_tokens: int, compute_ns: int) -> None:
        """A step of so many tokens has taken so long. Small steps tell nothing of prompts."""
        if num_tokens < MIN_TOKENS // 2 or compute_ns <= 0 or not self._is_chunked:
            return
        found, known = compute_ns / num_tokens, self._ns_per_token
        share = 1.0 if not known else FASTER_SHARE if found < known else SLOWER_SHARE
        self._ns_per_token = known + (found - known) * share
        self._limit = min(self._max_tokens, max(MIN_TOKENS, int(TARGET_NS / self._ns_per_token)))

    def budget(self, running: Iterable[Request]) -> int:
        """Tokens of the next step."""
        if self._limit == self._max_tokens:
            return self._max_tokens
        num_decoding = sum(map(_decodes, running))
        return min(self._max_tokens, num_decoding + self._limit) if num_decoding else self._max_tokens

    def size(self, request: Request, start: int, budget: int) -> int:
        """How many of a sequence's tokens from position `start` on the step takes, which has room for `budget`; 0 when
        the sequence has to wait."""
        num_new = request.num_tokens - start
        if not self._is_chunked and num_new <= self._max_tokens:
            return num_new if num_new <= budget else 0  # one that has outgrown every step is recomputed in chunks
        if 0 < self._threshold < num_new:
            num_new = self._threshold
        num_new = min(num_new, budget)
        return num_new if self._states is None else self._states.cut(request, start, num_new)


def _decodes(request: Request) -> bool:
    """Whether a running sequence gets tokens one by one, and not its last one already."""
    is_behind = request.num_tokens - request.num_computed_tokens > 1
    return not is_behind and request.pooling is None and request.num_tokens < request.max_num_tokens
