"""Readers: delivers tokens to the sinks of frontends and clients, and pauses slow ones. Knows no request table."""

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
"""Seconds in which changes of load are combined into one announcement."""


class Readers:
    """All open sinks. Sequences of slow sinks are parked until the sinks have caught up."""

    def __init__(self, *, sequences_of: Callable[[Sink], Iterable[tuple[EngineCore, Request]]]) -> None:
        """`sequences_of`: returns the unfinished sequences of a sink, with their groups."""
        self.sinks: set[Sink] = set()
        self._slow: set[Sink] = set()
        self._sequences_of = sequences_of
        self._announcement: asyncio.TimerHandle | None = None

    def deliver(self, result: StepResult, *, has_orphans: bool) -> None:
        """Pass one step's tokens to the sinks of their requests.

        Args:
            has_orphans: some of the requests may have no sink.
        """
        is_whole = len(self.sinks) == 1 and not has_orphans
        parts: dict[object, StepResult] = {next(iter(self.sinks)): result} if is_whole else result.by_sink()
        for sink in [sink for sink in self.sinks if sink in parts]:
            try:
                sink.push(parts[sink])
            except Exception as error:  # a bug, which must not lose the other streams' tokens
                logger.exception("a step's tokens could not be sent")
                sink.close(PagodaError(f"internal error: {type(error).__name__}"))
            if sink.is_behind and sink not in self._slow:
                self._park(sink)

    def is_slow(self, request: Request) -> bool:
        """Whether the reader of a sequence is too slow."""
        return request.sink in self._slow

    def _park(self, sink: Sink) -> None:
        """Park a sink's sequences, which frees their blocks and slots."""
        self._slow.add(sink)
        sequences = list(self._sequences_of(sink))
        logger.warning("a client reads its stream too slowly: paused %d sequences", len(sequences))
        for core, request in sequences:
            core.park(request)

    def unpark(self, sink: Sink) -> None:
        """The reader has caught up: its parked sequences resume."""
        if sink in self._slow:
            self._slow.discard(sink)
            for core, request in reversed(list(self._sequences_of(sink))):
                core.unpark(request)

    def announce(self) -> None:
        """Announce to every sink soon that load or readiness changed outside of a step."""
        if self._announcement is None:
            self._announcement = asyncio.get_running_loop().call_later(ANNOUNCE_DELAY_S, self.announce_now)

    def announce_now(self) -> None:
        """Announce to every sink now."""
        self._announcement = None
        for sink in list(self.sinks):
            sink.announce()

    def close_all(self, error: PagodaError) -> None:
        """End every stream with `error`."""
        for sink in list(self.sinks):
            sink.close(error)
