"""LoadingBar: log lines for the progress of loading weights. Knows bytes and time; no worker."""

import time
from collections.abc import Callable

STEPS = 10
"""Maximum number of lines for one load."""


class LoadingBar:
    """The progress of one load by one worker."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: seconds."""
        self._clock = clock
        self._started = clock()
        """Time at which the worker was last known to have read nothing: it may compile kernels first."""
        self._steps = 0

    def advance(self, loaded: int, total: int) -> str | None:
        """A line for the log, or None if there is nothing new.

        Args:
            loaded, total: bytes of the files; total is 0 until they are known.
        """
        now = self._clock()
        if not total or (not loaded and not self._steps):
            self._started = now
            return None
        steps = STEPS * loaded // total
        if steps <= self._steps:
            return None
        self._steps = steps
        bar = "#" * steps + "." * (STEPS - steps)
        rate = loaded / 1e9 / max(now - self._started, 1e-3)
        return f"[{bar}] {100 * steps // STEPS:3d} %, {loaded / 1e9:.2f} of {total / 1e9:.2f} GB, {rate:.2f} GB/s"
