"""RunningCalls: who gives way when one call has more running than its share. Knows requests; no queue, no pool."""

from collections import Counter
from collections.abc import Sequence

from pagoda_scheduler.core.request import Request
from pagoda_scheduler.core.turns import TURN


class RunningCalls:
    """The running sequences by the calls that they belong to.

    What a call uses is the larger one of its parts of the slots and of the blocks. A call of several sequences is large
    when more than TURN of them run, or when it uses more than half. Each large call has an equal share, and so have all
    others together; what a large call uses beyond that is borrowed.
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
        """Whether the call of a sequence that waits is large, and uses as much as is its own."""
        return self._large.get(request.group, 0.0) >= self._share

    @property
    def borrower(self) -> Request | None:
        """The sequence that gives way: the last one of the call that has borrowed most; None when none has."""
        if not self._large:
            return None
        group = max(self._large, key=self._large.__getitem__)
        if self._large[group] <= self._share:
            return None
        return next(request for request in reversed(self._running) if request.group == group)
