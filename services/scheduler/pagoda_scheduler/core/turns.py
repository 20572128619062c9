"""Turns: first come first served, but for the many sequences of one call. Knows requests; no steps, no clock."""

from itertools import count

from pagoda_scheduler.core.request import Request

TURN = 16
"""Sequences of one call that wait in the order of their arrival; each later one waits for turns."""
ADMISSIONS_A_TURN = 64
"""Sequences of others that are admitted for one turn of such a call."""

Place = tuple[float, int]
"""Of a sequence in an order: the smallest is first."""


class Turns:
    """Places in a queue. The first TURN sequences of a call have come when they come; the others count as coming later,
    TURN of them at a time.

    Time advances with admissions: to the time of a late one that is admitted, and by a turn for every ADMISSIONS_A_TURN
    others. So what comes after a large call is admitted before its rest, the rest has its share while others come, and
    where no others are it waits for nothing. Calls of up to TURN sequences are served first come first served.
    Source: start-time fair queueing, Goyal, Vin and Cheng 1996.
    """

    def __init__(self) -> None:
        self.now = 0.0
        """Time in turns."""
        self._arrivals = count()
        self._groups: dict[str, tuple[int, int]] = {}
        """Sequences of a call that wait, and that have come since it last had none."""

    @property
    def num_calls(self) -> int:
        """Calls of which some sequence waits."""
        return len(self._groups)

    def last(self, request: Request) -> Place:
        """The place of a sequence that has just come."""
        num_waiting, number = self._groups.get(request.group, (0, 0))
        self._groups[request.group] = (num_waiting + 1, number + 1)
        return (self.now + (number / TURN if number >= TURN else 0.0), next(self._arrivals))

    def late(self, request: Request) -> Place:
        """The place of a sequence whose call has had its turn."""
        num_waiting, number = self._groups.get(request.group, (0, 0))
        self._groups[request.group] = (num_waiting + 1, max(number, TURN))
        return (self.now + 1.0, next(self._arrivals))

    def first(self, request: Request) -> Place:
        """A place ahead of all others."""
        num_waiting, number = self._groups.get(request.group, (0, 0))
        self._groups[request.group] = (num_waiting + 1, number)
        return (-1.0, -next(self._arrivals))

    def leave(self, request: Request) -> None:
        """A sequence does not wait any more."""
        num_waiting, number = self._groups[request.group]
        if num_waiting > 1:
            self._groups[request.group] = (num_waiting - 1, number)
        else:
            del self._groups[request.group]

    def admit(self, place: Place) -> None:
        """A sequence with this place is admitted."""
        time = place[0]
        if time > self.now:
            self.now = time
        elif time >= 0:
            self.now += 1 / ADMISSIONS_A_TURN
