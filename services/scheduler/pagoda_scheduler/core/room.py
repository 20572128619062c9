"""Room: chooses running sequences to preempt for waiting ones. Knows requests and the queue; no blocks."""

from collections.abc import Callable
from typing import Protocol

from pagoda_common.config.engine_config import SchedulerConfig
from pagoda_scheduler.core.request import Request
from pagoda_scheduler.core.running_calls import RunningCalls
from pagoda_scheduler.core.turns import TURN
from pagoda_scheduler.core.waiting_queue import WaitingQueue


class Preempt(Protocol):
    """Sends a running sequence back to the queue."""

    def __call__(self, request: Request, *, at_front: bool = True) -> None:
        """`at_front`: it is admitted next; else it waits for its turn."""


class Room:
    """Makes room for the next waiting sequence before a step is decided."""

    def __init__(
        self,
        *,
        config: SchedulerConfig,
        waiting: WaitingQueue,
        running: list[Request],
        has_place: Callable[[Request], bool],
        is_prepared: Callable[[Request], bool],
        preempt: Preempt,
        num_blocks: int,
    ) -> None:
        """`has_place`: a slot and blocks are free for a sequence; `is_prepared`: constraint and adapter are ready."""
        self._waiting = waiting
        self._running = running
        self._has_place = has_place
        self._is_prepared = is_prepared
        self._preempt = preempt
        self._num_slots = config.max_num_seqs
        self._num_blocks = num_blocks
        self._by_priority = config.policy == "priority"

    @property
    def victim(self) -> Request:
        """The running sequence to preempt when blocks run out: the least urgent; else the last one of a call that
        exceeds its share and would keep out other calls; else the last admitted."""
        if self._by_priority:
            return max(self._running, key=lambda request: (request.priority, request.arrival_ns))
        return self._calls.borrower or self._running[-1]

    def make(self) -> None:
        """Preempt less urgent sequences, or sequences beyond the share of their call."""
        if self._by_priority:
            self._make_for_urgent()
        elif self._waiting.num_late:
            self._make_for_turns()

    def _make_for_urgent(self) -> None:
        if not self._waiting.has_next:
            return
        urgent = self._waiting.peek()
        if urgent.num_pending or not self._is_prepared(urgent):
            return
        while self._running and not self._has_place(urgent):
            victim = self.victim
            if victim.priority <= urgent.priority:
                return
            self._preempt(victim)

    def _make_for_turns(self) -> None:
        for _ in range(TURN):
            if not self._waiting.has_next:
                return
            first = self._waiting.peek()
            if first.num_pending or not self._is_prepared(first) or self._has_place(first):
                return
            if not self._calls.has_its_share(first):
                self._take_back_for(first)
                return
            if not self._waiting.pass_turn(first):  # its call already uses its share, so others go first
                return

    def _take_back_for(self, first: Request) -> None:
        while not self._has_place(first):
            borrower = self._calls.borrower
            if borrower is None:
                return
            self._preempt(borrower, at_front=False)

    @property
    def _calls(self) -> RunningCalls:
        return RunningCalls(self._running, num_slots=self._num_slots, num_blocks=self._num_blocks)
