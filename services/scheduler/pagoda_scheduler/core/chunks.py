"""Decides how many tokens a step takes, and how many of each sequence. Knows the configuration; no blocks, no clock."""

from collections.abc import Iterable

from pagoda_common.config.engine_config import SchedulerConfig
from pagoda_scheduler.core.request import Request
from pagoda_scheduler.kv.recurrent_states import RecurrentStates

TARGET_NS = 250_000_000
"""Target time of a step that computes prompts together with decoding sequences."""
MIN_TOKENS = 512
"""Tokens that such a step may always have: smaller chunks slow prompts down, and hardly shorten steps."""
FASTER_SHARE = 0.2
SLOWER_SHARE = 0.5
"""Weight of the newest step in the smoothed time per token."""


class Chunks:
    """Cuts prompts into chunks.

    Where a full step takes longer than TARGET_NS (on slow or busy devices), steps are smaller while sequences decode,
    so that they do not wait for other prompts. The time per token is measured in past steps.
    """

    def __init__(self, *, config: SchedulerConfig, states: RecurrentStates | None = None) -> None:
        """`states`: chunks end where states are saved."""
        self._states = states
        self._is_chunked = config.enable_chunked_prefill
        self._max_tokens = config.max_num_batched_tokens
        self._threshold = config.long_prefill_token_threshold
        self._ns_per_token = 0.0
        self._limit = self._max_tokens
        """Maximum tokens of a step while sequences decode."""

    def took(self, num_tokens: int, compute_ns: int) -> None:
        """Note the time of a step of `num_tokens` tokens. Small steps say nothing about prompts and are ignored."""
        if num_tokens < MIN_TOKENS // 2 or compute_ns <= 0 or not self._is_chunked:
            return
        found, known = compute_ns / num_tokens, self._ns_per_token
        share = 1.0 if not known else FASTER_SHARE if found < known else SLOWER_SHARE
        self._ns_per_token = known + (found - known) * share
        self._limit = min(self._max_tokens, max(MIN_TOKENS, int(TARGET_NS / self._ns_per_token)))

    def budget(self, running: Iterable[Request]) -> int:
        """Maximum tokens of the next step."""
        if self._limit == self._max_tokens:
            return self._max_tokens
        num_decoding = sum(map(_decodes, running))
        return min(self._max_tokens, num_decoding + self._limit) if num_decoding else self._max_tokens

    def size(self, request: Request, start: int, budget: int) -> int:
        """How many of a sequence's tokens, from position `start`, the step takes with room for `budget`; 0 when the
        sequence must wait."""
        num_new = request.num_tokens - start
        if not self._is_chunked and num_new <= self._max_tokens:
            return num_new if num_new <= budget else 0  # longer sequences are recomputed in chunks
        if 0 < self._threshold < num_new:
            num_new = self._threshold
        num_new = min(num_new, budget)
        return num_new if self._states is None else self._states.cut(request, start, num_new)


def _decodes(request: Request) -> bool:
    """Whether a running sequence decodes and has not reached its last token."""
    is_behind = request.num_tokens - request.num_computed_tokens > 1
    return not is_behind and request.pooling is None and request.num_tokens < request.max_num_tokens
