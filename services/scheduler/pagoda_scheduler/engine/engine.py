"""Engine: the interface for servicers and worker groups, over its three parts. No gRPC, no messages."""

import asyncio
import logging
import time
from collections.abc import Iterable

from pagoda_common.config.engine_config import EngineConfig
from pagoda_common.errors import DeadlineExceeded, NotReady, PagodaError
from pagoda_common.params.outputs import FinishReason
from pagoda_scheduler.core.request import Request
from pagoda_scheduler.core.step_result import StepResult
from pagoda_scheduler.engine.engine_core import EngineCore
from pagoda_scheduler.engine.load import Load
from pagoda_scheduler.engine.open_requests import OpenRequest, OpenRequests, Origin
from pagoda_scheduler.engine.placement import Placement
from pagoda_scheduler.engine.readers import Readers
from pagoda_scheduler.engine.sink import Sink
from pagoda_scheduler.kv.kv_events import KVEventLog
from pagoda_scheduler.observability.traces import Traces

logger = logging.getLogger(__name__)


class Engine:
    """Open requests over the worker groups that serve now.

    A request without a group waits for one; the requests of a lost group continue in another, with their token log.
    """

    def __init__(self, *, config: EngineConfig) -> None:
        self.config = config
        self.traces: Traces | None = None
        """Traces of sampled requests, if a collector is configured."""
        self.num_submitted = 0
        """Counter: accepted requests."""
        self.kv_events: KVEventLog | None = None
        """Log to which groups report their cached blocks; set before the first group serves."""
        self.is_draining = False
        self.not_ready_reason = "no worker has registered yet"
        self._open = OpenRequests(
            lease_s=config.scheduler.orphan_lease_s, expire=self._expire, end_lease=self._end_lease
        )
        self._readers = Readers(sequences_of=self._sequences_of)
        self._placement = Placement(
            config=config.scheduler,
            requests=self._open.by_id,
            finish=lambda request: self.deliver(StepResult(step=0, finished=[request])),
            is_slow=self._readers.is_slow,
        )
        self.requests = self._open.by_id
        """Open requests by id."""
        self.sinks = self._readers.sinks
        """Readers that get load and readiness; each is added before its first request."""
        self.cores = self._placement.cores
        """Groups that take requests."""

    # Requests.

    def submit(self, sequences: list[Request], *, timeout_s: float = 0.0, origin: Origin | None = None) -> None:
        """Accept the sequences of one request; with an `origin` it is kept until `release` or the end of its lease.

        Raises:
            RequestTooLong, QueueFull: the request cannot be admitted.
            NotReady: the engine is draining.
            Superseded: a newer attempt of the request is open.
        """
        request_id, attempt = sequences[0].request_id, sequences[0].attempt
        if self._open.is_known(request_id, attempt):
            return
        if request_id in self.requests:
            self._drop(request_id)  # an older attempt
        if self.is_draining:
            raise NotReady("the engine is draining", retry_after_s=1)
        core = self._placement.choose(sequences, is_new=attempt <= 1)
        open_request = OpenRequest(attempt, sequences, core, origin)
        self._open.add(open_request, timeout_s=timeout_s)
        self.num_submitted += 1
        is_resumed = any(sequence.output_token_ids for sequence in sequences)
        self._placement.start(open_request.unfinished, core, at_front=is_resumed)

    def abort(self, request_ids: Iterable[str]) -> None:
        """End every sequence of the requests, and report that in one message; unknown ids are ignored."""
        known = [request_id for request_id in dict.fromkeys(request_ids) if request_id in self.requests]
        if not known:
            return
        self._end([sequence for request_id in known for sequence in self.requests[request_id].unfinished], "abort")
        for request_id in known:
            self.release(request_id)

    def stop(self, sequences: Iterable[Request]) -> None:
        """End sequences in which a frontend found a stop string."""
        self._end([request for request in dict.fromkeys(sequences) if not request.is_finished], "stop")

    def release(self, request_id: str) -> None:
        """The client has everything: drop ended requests that were kept; unknown ids are ignored."""
        open_request = self.requests.get(request_id)
        if open_request is not None and open_request.has_ended:
            self._open.forget(request_id)

    def adopt(self, key: str) -> list[OpenRequest]:
        """The requests with this key; renews the lease of those whose frontend is lost."""
        return self._open.adopt(key)

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests and wait until the open ones have ended, at most `timeout_s` seconds."""
        self.is_draining = True
        self.announce()
        deadline = time.monotonic() + timeout_s
        while self._open.is_busy and time.monotonic() < deadline:  # noqa: ASYNC110 (a poll is enough, once in a life)
            await asyncio.sleep(0.02)

    def compact(self) -> None:
        """Free memory that a burst has left fragmented or in empty tables; only while no request is open."""
        if not self.requests:
            self._open.compact()
            self._placement.compact()

    def forget_constraints(self) -> bool:
        """Let workers drop constraints without requests; whether there were any. Only while no request is open."""
        return not self.requests and self._placement.forget_constraints()

    # Worker groups.

    @property
    def is_ready(self) -> bool:
        """Whether at least one group serves."""
        return bool(self.cores) and not self.is_draining

    def load(self) -> Load:
        """The current load."""
        return self._placement.load()

    def add_core(self, core: EngineCore) -> None:
        """A group starts serving."""
        core.scheduler.kv.tell(self.kv_events)
        self.not_ready_reason = ""
        self._placement.add(core)
        self.announce()

    def retire_core(self, core: EngineCore, reason: str) -> None:
        """Retire a group: its waiting sequences move to other groups, its running ones end there."""
        core.scheduler.kv.tell(None)
        self._placement.retire(core)
        if not self.cores:
            self.not_ready_reason = reason
        self.announce()

    def remove_core(self, core: EngineCore, reason: str, *, is_fault: bool = True) -> None:
        """A group no longer serves: its sequences continue in other groups, with their token log, before waiting ones.

        Args:
            is_fault: the group failed, and a sequence in flight may be the cause.
        """
        removed = self._placement.remove(core, is_fault=is_fault)
        if removed is None:
            return
        core.scheduler.kv.tell(None)
        orphans, poisonous = removed
        if not self.cores:
            self.not_ready_reason = reason
        if self.traces:
            self.traces.lose(orphans)
        if orphans:
            what = "worker group lost" if is_fault else "worker group stopped serving"
            logger.warning("%s (%s): %d sequences will be recomputed", what, reason, len(orphans))
        self._placement.fail(poisonous, reason)
        self._placement.place(request for request in orphans if not request.is_finished)
        self.announce()

    # Readers.

    def deliver(self, result: StepResult) -> None:
        """Pass one step's tokens to the sinks of their requests."""
        if self.traces:
            self.traces.end(result.finished)
        for request in result.finished:
            self._open.note_end(request)
        self._readers.deliver(result, has_orphans=self._open.has_orphans)

    def unpark(self, sink: Sink) -> None:
        """The reader has caught up: its parked sequences resume."""
        self._readers.unpark(sink)

    def announce(self) -> None:
        """Announce to every sink soon that load or readiness changed outside of a step."""
        self._readers.announce()

    def close_sink(self, sink: Sink) -> None:
        """Remove a sink and abort its requests, except those that another frontend may resume."""
        self.unpark(sink)  # kept requests continue to run
        self.sinks.discard(sink)
        for request_id in self._open.orphan(sink):
            self._drop(request_id)

    def hand_over(self) -> None:
        """End every stream: frontends resume their open requests at the next scheduler."""
        self._readers.close_all(NotReady("the scheduler is shutting down", retry_after_s=1))

    # Parts.

    def _sequences_of(self, sink: Sink) -> list[tuple[EngineCore, Request]]:
        """Unfinished sequences of a sink, with their groups."""
        return [
            (open_request.core, request)
            for open_request in self.requests.values()
            if open_request.core is not None and open_request.sink is sink
            for request in open_request.unfinished
            if not self._placement.is_homeless(request)
        ]

    def _end(self, sequences: list[Request], reason: FinishReason, error: PagodaError | None = None) -> None:
        """End sequences outside of a step, and report that to their sinks."""
        for request in sequences:
            request.finish_reason, request.error = reason, error
            self._placement.take_out(request)
        self.deliver(StepResult(step=0, finished=list(sequences)))
        self.announce()

    def _drop(self, request_id: str) -> None:
        """End a request without reporting it."""
        if self.traces:
            self.traces.end(self.requests[request_id].sequences)
        for request in self.requests[request_id].unfinished:
            self._placement.take_out(request)
        self._open.forget(request_id)
        self.announce()

    def _expire(self, request_id: str, timeout_s: float) -> None:
        if request_id in self.requests:
            error = DeadlineExceeded(f"request was not finished within its {timeout_s:g} s")
            self._end(self.requests[request_id].unfinished, "error", error)

    def _end_lease(self, request_id: str, lease_s: float) -> None:
        text = "request %s: aborted: no frontend resumed it within %g s"
        logger.warning(text, request_id, lease_s, extra={"request_id": request_id})
        self._drop(request_id)
