"""Turns: first come, first served, except for the many sequences of one call. Knows requests; no steps, no clock."""

from itertools import count

from pagoda_scheduler.core.request import Request

TURN = 16
"""Number of sequences of one call that keep their order of arrival; later ones wait for turns."""
ADMISSIONS_A_TURN = 64
"""Number of other calls' sequences that are admitted per turn of such a call."""
CLIENT_TURN = 64
"""Number of waiting sequences of one client (without the late ones of large calls) that keep their order of arrival; a
client with more takes turns with other clients."""
MAX_CLIENTS = 4096
"""Number of clients that are remembered."""

Place = tuple[float, int]
"""Sort key of a sequence; the smallest is first."""


class Turns:
    """Keys of sequences in a queue.

    The first TURN sequences of a call count as arriving when they arrive; the others count as arriving later, TURN of
    them at a time. Virtual time advances with admissions: to the time of an admitted late sequence, and by a turn for
    every ADMISSIONS_A_TURN others. So calls that arrive after a large call are admitted before its rest, the rest gets
    its share while others arrive, and without others it does not wait. Calls of up to TURN sequences are served first
    come, first served, except those of a client that has sent CLIENT_TURN sequences more than were admitted: its
    further ones count as arriving later too, as many per turn as of others. Source: start-time fair queueing, Goyal,
    Vin and Cheng 1996.
    """

    def __init__(self) -> None:
        self.now = 0.0
        """Virtual time, in turns."""
        self._arrivals = count()
        self._groups: dict[str, tuple[int, int]] = {}
        """By call: number of waiting sequences, and of sequences that have arrived since it last had none waiting."""
        self._clients: dict[str, tuple[float, bool]] = {}
        """By client: the time at which all its sequences would be admitted if it were alone, and whether it takes turns
        until then."""

    @property
    def num_calls(self) -> int:
        """Number of calls with a waiting sequence."""
        return len(self._groups)

    def last(self, request: Request) -> Place:
        """The key of a sequence that has just arrived."""
        num_waiting, number = self._groups.get(request.group, (0, 0))
        self._groups[request.group] = (num_waiting + 1, number + 1)
        time = self.now + number / TURN if number >= TURN else self._time_of(request.client)
        return (time, next(self._arrivals))

    def is_large(self, request: Request) -> bool:
        """Whether more sequences of its call have arrived than keep their order of arrival."""
        return self._groups[request.group][1] > TURN

    def _time_of(self, client: str) -> float:
        """The time at which a sequence of `client` counts as arriving."""
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
        """Keep clients that have sent more than was admitted, at most the latest MAX_CLIENTS."""
        ahead = [(client, state) for client, state in self._clients.items() if state[0] > self.now]
        self._clients = dict(ahead[-MAX_CLIENTS:])

    def late(self, request: Request) -> Place:
        """The key of a sequence whose call has had its turn."""
        num_waiting, number = self._groups.get(request.group, (0, 0))
        self._groups[request.group] = (num_waiting + 1, max(number, TURN))
        return (self.now + 1.0, next(self._arrivals))

    def first(self, request: Request) -> Place:
        """A key ahead of all others."""
        num_waiting, number = self._groups.get(request.group, (0, 0))
        self._groups[request.group] = (num_waiting + 1, number)
        return (-1.0, -next(self._arrivals))

    def leave(self, request: Request) -> None:
        """A sequence no longer waits."""
        num_waiting, number = self._groups[request.group]
        if num_waiting > 1:
            self._groups[request.group] = (num_waiting - 1, number)
        else:
            del self._groups[request.group]

    def admit(self, place: Place) -> None:
        """A sequence with this key is admitted."""
        time = place[0]
        if time > self.now:
            self.now = time
        elif time >= 0:
            self.now += 1 / ADMISSIONS_A_TURN
