"""RunningCalls: chooses the sequence to preempt when one call exceeds its share. Knows requests; no queue, no pool."""

from collections import Counter
from collections.abc import Sequence

from pagoda_scheduler.core.request import Request
from pagoda_scheduler.core.turns import TURN


class RunningCalls:
    """Running sequences by call.

    The usage of a call is the larger of its fractions of the slots and of the blocks. A call of several sequences is
    large when more than TURN of them run, or when its usage is above one half. Each large call has an equal share, and
    so have all other calls together; a large call borrows what it uses beyond its share.
    """

    def __init__(self, running: Sequence[Request], *, num_slots: int, num_blocks: int) -> None:
        self._running = running
        counts: Counter[str] = Counter()
        blocks: Counter[str] = Counter()
        for request in running:
            counts[request.group] += 1
            blocks[request.group] += request.num_blocks
        uses = {
            group: max(number / num_slots, blocks[group] / max(1, num_blocks))
            for group, number in counts.items()
            if number > 1
        }
        self._large = {group: use for group, use in uses.items() if use > 0.5 or counts[group] > TURN}
        self._share = 1 / (1 + len(self._large))

    def has_its_share(self, request: Request) -> bool:
        """Whether the call of a waiting sequence is large and already uses its share."""
        return self._large.get(request.group, 0.0) >= self._share

    @property
    def borrower(self) -> Request | None:
        """The sequence to preempt: the last one of the call that has borrowed most; None if none has."""
        if not self._large:
            return None
        group = max(self._large, key=self._large.__getitem__)
        if self._large[group] <= self._share:
            return None
        return next(request for request in reversed(self._running) if request.group == group)
