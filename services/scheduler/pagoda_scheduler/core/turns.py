"""Turns: first come first served, but for the many sequences of one call. Knows requests; no steps, no clock."""

from itertools import count

from pagoda_scheduler.core.request import Request

TURN = 16
"""Sequences of one call that wait in the order of their arrival; each later one waits for turns."""
ADMISSIONS_A_TURN = 64
"""Sequences of others that are admitted for one turn of such a call."""
CLIENT_TURN = 64
"""Sequences of one client, none of them late ones of a large call, that wait in the order of their arrival; while more
wait, it takes turns with other clients."""
MAX_CLIENTS = 4096
"""How many clients are remembered."""

Place = tuple[float, int]
"""Place of a sequence in an order; the smallest is first."""


class Turns:
    """Places in a queue. The first TURN sequences of a call have come when they come; the others count as coming later,
    TURN of them at a time.

    Time advances with admissions: to the time of a late one that is admitted, and by a turn for every ADMISSIONS_A_TURN
    others. So what comes after a large call is admitted before its rest, the rest has its share while others come, and
    where no others are it waits for nothing. Calls of up to TURN sequences are served first come first served, but for
    those of a client that has sent CLIENT_TURN more than were admitted: its further ones count as coming later, too, as
    many of them for each turn as of others.
    Source: start-time fair queueing, Goyal, Vin and Cheng 1996.
    """

    def __init__(self) -> None:
        self.now = 0.0
        """Time in turns."""
        self._arrivals = count()
        self._groups: dict[str, tuple[int, int]] = {}
        """Sequences of a call that wait, and that have come since it last had none."""
        self._clients: dict[str, tuple[float, bool]] = {}
        """When all that a client has sent would be admitted, were it alone, and whether it takes turns until then."""

    @property
    def num_calls(self) -> int:
        """Calls with a waiting sequence."""
        return len(self._groups)

    def last(self, request: Request) -> Place:
        """The place of a sequence that has just come."""
        num_waiting, number = self._groups.get(request.group, (0, 0))
        self._groups[request.group] = (num_waiting + 1, number + 1)
        time = self.now + number / TURN if number >= TURN else self._time_of(request.client)
        return (time, next(self._arrivals))

    def is_large(self, request: Request) -> bool:
        """Whether more of its call have come than wait in the order of their arrival."""
        return self._groups[request.group][1] > TURN

    def _time_of(self, client: str) -> float:
        """When a sequence of `client` counts as coming."""
        if not client:
            return self.now
        until, takes_turns = self._clients.get(client, (0.0, False))
        if until <= self.now:
            until, takes_turns = self.now, False
        until += 1 / ADMISSIONS_A_TURN
        takes_turns = takes_turns or until - self.now > CLIENT_TURN / ADMISSIONS_A_TURN
        self._clients[client] = (until, takes_turns)
        if len(self._clients) > 2 * MAX_CLIENTS:
            self._forget_clients()
        return until if takes_turns else self.now

    def _forget_clients(self) -> None:
        """Keep those that have sent more than was admitted; of these, what has come last."""
        ahead = [(client, state) for client, state in self._clients.items() if state[0] > self.now]
        self._clients = dict(ahead[-MAX_CLIENTS:])

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
