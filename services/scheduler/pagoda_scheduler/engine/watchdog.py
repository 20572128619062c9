"""StepWatchdog: detects a hung worker group by a time bound on steps, derived from past steps."""

from collections import deque

from pagoda_scheduler.kv.swap_cost import MIN_PREFILL_TOKENS

FIRST_STEP_S = 300.0
"""Minimum bound in seconds on the first step, in which kernels may be compiled."""
PATIENCE = 20.0
"""Factor of the bound over the expected step time."""
MAX_TICK_S = 0.5
"""Maximum time that counts between two checks. This process may itself have been stopped or starved: then a result may
be in its socket, and the worker is not to blame."""


class StepWatchdog:
    """Follows the steps in flight of one group.

    The bound of a step is the largest of `min_s`, twenty smoothed step times, and twenty times what its tokens cost.
    Until a large step was seen, a prompt token counts as much as a decode step, so the bound is never too low.
    """

    def __init__(self, *, min_s: float) -> None:
        """`min_s`: minimum bound on a step, in seconds."""
        self._min_s = min_s
        self._in_flight: deque[int] = deque()
        self._age_s = 0.0
        """Age of the oldest step in flight in seconds, since it was sent or since the answer of the step before."""
        self._step_s = 0.0
        self._token_s = 0.0
        self._has_prefill_cost = False

    def sent(self, num_tokens: int) -> None:
        """A step with `num_tokens` tokens was sent."""
        if not self._in_flight:
            self._age_s = 0.0
        self._in_flight.append(num_tokens)

    def answered(self, seconds: float) -> None:
        """The oldest step was answered, `seconds` after it became the oldest."""
        num_tokens = self._in_flight.popleft()
        self._age_s = 0.0
        if not num_tokens:  # it only carried messages to the worker
            return
        self._step_s += (seconds - self._step_s) / 8 if self._step_s else seconds
        if num_tokens >= MIN_PREFILL_TOKENS:
            per_token_s = seconds / num_tokens
            self._token_s = per_token_s if not self._has_prefill_cost else (7 * self._token_s + per_token_s) / 8
            self._has_prefill_cost = True
        elif not self._has_prefill_cost:
            self._token_s = max(self._token_s, seconds / num_tokens)

    def tick(self, seconds: float) -> None:
        """`seconds` have passed since the last tick."""
        if self._in_flight:
            self._age_s += min(seconds, MAX_TICK_S)

    @property
    def bound_s(self) -> float:
        """Seconds that the oldest step in flight may take."""
        if not self._step_s:
            return max(FIRST_STEP_S, self._min_s)
        num_tokens = self._in_flight[0] if self._in_flight else 0
        return max(self._min_s, PATIENCE * self._step_s, PATIENCE * self._token_s * num_tokens)

    @property
    def is_overdue(self) -> bool:
        """Whether the oldest step in flight is overdue."""
        return bool(self._in_flight) and self._age_s > self.bound_s
