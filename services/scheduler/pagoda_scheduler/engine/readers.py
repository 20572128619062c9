"""Readers: the sinks of frontends and clients, what each receives, and which are too slow. Knows no request table."""

import asyncio
import logging
from collections.abc import Callable, Iterable

from pagoda_common.errors import PagodaError
from pagoda_scheduler.core.request import Request
from pagoda_scheduler.core.step_result import StepResult
from pagoda_scheduler.engine.engine_core import EngineCore
from pagoda_scheduler.engine.sink import Sink

logger = logging.getLogger(__name__)

ANNOUNCE_DELAY_S = 0.01
"""Changes of load within that time make one announcement."""


class Readers:
    """Every sink that is open, and those that are slow: their sequences are parked until they have caught up."""

    def __init__(self, *, sequences_of: Callable[[Sink], Iterable[tuple[EngineCore, Request]]]) -> None:
        """`sequences_of`: the unfinished sequences of a sink that some group has, with the group."""
        self.sinks: set[Sink] = set()
        self._slow: set[Sink] = set()
        self._sequences_of = sequences_of
        self._announcement: asyncio.TimerHandle | None = None

    def deliver(self, result: StepResult, *, has_orphans: bool) -> None:
        """Hand one step's news to the sinks that wait for them.

        Args:
            has_orphans: some of the news may belong to no one.
        """
        is_whole = len(self.sinks) == 1 and not has_orphans
        parts: dict[object, StepResult] = {next(iter(self.sinks)): result} if is_whole else result.by_sink()
        for sink in [sink for sink in self.sinks if sink in parts]:
            try:
                sink.push(parts[sink])
            except Exception as error:  # a bug, but the other streams' tokens are not lost for it
                logger.exception("a step's tokens could not be sent")
                sink.close(PagodaError(f"internal error: {type(error).__name__}"))
            if sink.is_behind and sink not in self._slow:
                self._park(sink)

    def is_slow(self, request: Request) -> bool:
        """Whether the reader of a sequence does not keep up."""
        return request.sink in self._slow

    def _park(self, sink: Sink) -> None:
        """Nothing more is made for a sink; its sequences leave their blocks and slots to others."""
        self._slow.add(sink)
        sequences = list(self._sequences_of(sink))
        logger.warning("a reader does not keep up: %d sequences wait for it", len(sequences))
        for core, request in sequences:
            core.park(request)

    def unpark(self, sink: Sink) -> None:
        """The reader keeps up again: what was parked for it resumes."""
        if sink in self._slow:
            self._slow.discard(sink)
            for core, request in reversed(list(self._sequences_of(sink))):
                core.unpark(request)

    def announce(self) -> None:
        """Tell every sink soon that load or readiness have changed outside of a step."""
        if self._announcement is None:
            self._announcement = asyncio.get_running_loop().call_later(ANNOUNCE_DELAY_S, self.announce_now)

    def announce_now(self) -> None:
        """Tell every sink."""
        self._announcement = None
        for sink in list(self.sinks):
            sink.announce()

    def close_all(self, error: PagodaError) -> None:
        """End every stream with `error`."""
        for sink in list(self.sinks):
            sink.close(error)
