"""LoadingBar: what the log says while a worker reads weights. Knows bytes and time; no worker."""

import time
from collections.abc import Callable

STEPS = 10
"""Lines of one load, at most."""


class LoadingBar:
    """One load of one worker."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: seconds."""
        self._clock = clock
        self._started = clock()
        """When the worker was last known to read nothing yet: it may have had kernels to compile before."""
        self._steps = 0

    def advance(self, loaded: int, total: int) -> str | None:
        """A line for the log, or None: there is nothing new to say.

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
