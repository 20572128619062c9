"""How many of a sequence's tokens a step takes. Knows the configuration; no blocks."""

from pagoda_common.config.engine_config import SchedulerConfig
from pagoda_scheduler.core.request import Request
from pagoda_scheduler.kv.recurrent_states import RecurrentStates


class Chunks:
    """Cuts prompts into chunks."""

    def __init__(self, *, config: SchedulerConfig, states: RecurrentStates | None = None) -> None:
        """`states`: chunks end where some are to be kept."""
        self._states = states
        self._is_chunked = config.enable_chunked_prefill
        self._max_tokens = config.max_num_batched_tokens
        self._threshold = config.long_prefill_token_threshold

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
