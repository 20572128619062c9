"""The engine: open requests, and the worker groups that serve them. No gRPC, no messages."""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from pagoda_common.config.engine_config import EngineConfig
from pagoda_common.errors import DeadlineExceeded, NotReady, PagodaError, RequestFailed, Superseded
from pagoda_common.params.outputs import FinishReason
from pagoda_scheduler.core.admission import check_queue
from pagoda_scheduler.core.request import Request, RequestStatus
from pagoda_scheduler.core.sink import Sink
from pagoda_scheduler.core.step import StepResult
from pagoda_scheduler.engine.deadlines import Deadlines
from pagoda_scheduler.engine.engine_core import EngineCore
from pagoda_scheduler.engine.load import Counters, Load
from pagoda_scheduler.engine.router import ROUTERS, Router
from pagoda_scheduler.kv.kv_events import KVEventLog
from pagoda_scheduler.observability.traces import Traces

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a request that may outlive its frontend comes from."""

    key: str
    """Name under which it can be adopted."""
    message: object
    """What its frontend sent, for whoever adopts it."""


@dataclass(slots=True)
class OpenRequest:
    """A request that has not ended, or that is kept for its client: its sequences, and the group that serves them."""

    attempt: int
    sequences: list[Request]
    core: EngineCore | None
    origin: Origin | None = None

    @property
    def unfinished(self) -> list[Request]:
        """Sequences still open."""
        return [request for request in self.sequences if not request.is_finished]


class Engine:
    """Open requests over the worker groups that serve now.

    A request without a group waits for one; the requests of a lost group go on elsewhere with their token log.
    """

    def __init__(self, *, config: EngineConfig) -> None:
        self.config = config
        self.cores: list[EngineCore] = []
        """Groups that take requests."""
        self._retired: list[EngineCore] = []
        """Groups that only finish what runs there."""
        self.requests: dict[str, OpenRequest] = {}
        self.sinks: set[Sink] = set()
        self._slow: set[Sink] = set()
        """Sinks whose readers do not keep up: their sequences wait for them."""
        self.traces: Traces | None = None
        """Of requests whose trace is sampled, where somebody collects them."""
        self.num_submitted = 0
        """Counter: requests taken in."""
        self.kv_events: KVEventLog | None = None
        """Where groups report their cached blocks; set before the first group comes."""
        self.is_draining = False
        self.not_ready_reason = "no worker has registered yet"
        self._homeless: OrderedDict[Request, None] = OrderedDict()
        self._past = Counters()
        self._router: Router = ROUTERS[config.scheduler.routing_policy]()
        self._deadlines = Deadlines(expire=self._expire)
        self._leases = Deadlines(expire=self._end_lease)
        """Requests whose frontend is gone."""
        self._announcement: asyncio.TimerHandle | None = None

    # Requests.

    def submit(self, sequences: list[Request], *, timeout_s: float = 0.0, origin: Origin | None = None) -> None:
        """Take in the sequences of one request; with an `origin` it is kept until `release`, or its lease is over.

        Raises:
            RequestTooLong, QueueFull: it cannot be admitted.
            NotReady: draining.
            Superseded: a newer attempt of the request is known.
        """
        request_id, attempt = sequences[0].request_id, sequences[0].attempt
        known = self.requests.get(request_id)
        if known is not None:
            if attempt == known.attempt:
                return
            if attempt < known.attempt:
                raise Superseded(f"request {request_id} is at attempt {known.attempt}, got {attempt}")
            self._drop(request_id)
        if self.is_draining:
            raise NotReady("the engine is draining", retry_after_s=1)
        core = self._router.choose(sequences[0], self.cores) if self.cores else None
        if core is not None:
            unfinished = [sequence for sequence in sequences if not sequence.is_finished]
            check = core.scheduler.admission.check_fits if attempt > 1 else core.scheduler.admission.check
            check(unfinished)
        elif attempt <= 1:
            check_queue(self.config.scheduler, waiting=self._homeless, requests=sequences)
        is_resumed = any(sequence.output_token_ids for sequence in sequences)
        open_request = OpenRequest(attempt, sequences, core, origin)
        self.requests[request_id] = open_request
        self.num_submitted += 1
        if timeout_s > 0:
            self._deadlines.set(request_id, timeout_s)
        self._start(open_request.unfinished, core, at_front=is_resumed)

    def abort(self, request_ids: Iterable[str]) -> None:
        """End every sequence of the requests, and say so in one message; unknown ids are ignored."""
        known = [request_id for request_id in dict.fromkeys(request_ids) if request_id in self.requests]
        if not known:
            return
        self._end([sequence for request_id in known for sequence in self.requests[request_id].unfinished], "abort")
        for request_id in known:
            self.release(request_id)

    def release(self, request_id: str) -> None:
        """The client has everything: a request that has ended is not kept any longer; unknown ids are ignored."""
        open_request = self.requests.get(request_id)
        if open_request is not None and not open_request.unfinished:
            self._forget(request_id)

    def adopt(self, key: str) -> list[OpenRequest]:
        """The requests with this key, each with a lease anew if its frontend is gone."""
        found = [r for r in self.requests.values() if r.origin is not None and r.origin.key == key]
        for open_request in found:
            if open_request.sequences[0].sink is None:
                self._leases.set(open_request.sequences[0].request_id, self.config.scheduler.orphan_lease_s)
        return found

    def stop(self, sequences: Iterable[Request]) -> None:
        """End sequences whose stop string a frontend has seen."""
        self._end([request for request in sequences if not request.is_finished], "stop")

    def close_sink(self, sink: Sink) -> None:
        """Forget a sink and abort what it waits for, but for what somebody else may go on with."""
        self.unpark(sink)  # what is kept is computed on
        self.sinks.discard(sink)
        lease_s = self.config.scheduler.orphan_lease_s
        for request_id, open_request in list(self.requests.items()):
            if open_request.sequences[0].sink is not sink:
                continue
            if open_request.origin is None or not lease_s:
                self._drop(request_id)
                continue
            for sequence in open_request.sequences:
                sequence.sink = None
            self._leases.set(request_id, lease_s)

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests and wait until the open ones have ended, at most `timeout_s` seconds."""
        self.is_draining = True
        self.announce()
        deadline = time.monotonic() + timeout_s
        while self._is_busy and time.monotonic() < deadline:  # noqa: ASYNC110 (a poll is enough, once in a life)
            await asyncio.sleep(0.02)

    def hand_over(self) -> None:
        """End every stream: whoever has requests open goes on with them at the next scheduler."""
        for sink in list(self.sinks):
            sink.close(NotReady("the scheduler is shutting down", retry_after_s=1))

    def compact(self) -> None:
        """Give back what a burst of requests has left fragmented, or in empty tables; only while none is open."""
        if self.requests or self._homeless:
            return
        self.requests.clear()
        self._homeless.clear()
        self._deadlines.compact()
        self._leases.compact()
        for core in self.cores:
            core.scheduler.compact()

    # Worker groups.

    def add_core(self, core: EngineCore) -> None:
        """A group serves from now on."""
        self.cores.append(core)
        core.scheduler.kv.tell(self.kv_events)
        self.not_ready_reason = ""
        homeless, self._homeless = self._homeless, OrderedDict()
        for request in homeless:
            request.learn_model(max_model_len=core.scheduler.max_model_len, eos_token_ids=core.eos_token_ids)
        self._place(homeless)
        self.announce()

    def retire_core(self, core: EngineCore, reason: str) -> None:
        """A group takes nothing new any more: what waits there goes on elsewhere, what runs there ends there."""
        self.cores.remove(core)
        core.scheduler.kv.tell(None)
        self._router.forget(core)
        self._retired.append(core)
        if not self.cores:
            self.not_ready_reason = reason
        self._place(core.scheduler.take_waiting())
        self.announce()

    def remove_core(self, core: EngineCore, reason: str, *, is_fault: bool = True) -> None:
        """A group serves no more: its sequences go on elsewhere, with their token log, ahead of what waits there.

        Args:
            is_fault: it went of itself, and whoever was in flight may be the cause.
        """
        if core in self._retired:
            self._retired.remove(core)
        elif core in self.cores:
            self.cores.remove(core)
            self._router.forget(core)
        else:
            return
        self._past.take(core)
        drafts = core.scheduler.speculation.counters
        if drafts.num_drafts:
            text = "speculation: %d of %d draft tokens were right, in %d drafts"
            logger.info(text, drafts.num_accepted_tokens, drafts.num_draft_tokens, drafts.num_drafts)
        self._past.num_worker_losses += is_fault
        if not self.cores:
            self.not_ready_reason = reason
        poisonous = core.scheduler.blame() if is_fault else []
        orphans = core.scheduler.take_all()
        if self.traces:
            self.traces.lose(orphans)
        if orphans:
            what = "worker group lost" if is_fault else "worker group does not serve now"
            logger.warning("%s (%s): %d sequences will be recomputed", what, reason, len(orphans))
        for request in poisonous:
            text = "request %s crashes its worker whenever it is computed: failed"
            logger.error(text, request.request_id, extra={"request_id": request.request_id})
            request.finish_reason = "error"
            request.error = RequestFailed(
                f"this request crashed its worker {request.num_crashes} times in a row, the last time alone: {reason}"
            )
            self._finish_unqueued(request)
        self._place(request for request in orphans if not request.is_finished)
        self.announce()

    def deliver(self, result: StepResult) -> None:
        """Hand one step's news to the sinks that wait for them."""
        if self.traces:
            self.traces.end(result.finished)
        for request in result.finished:
            self._close(request)
        is_whole = len(self.sinks) == 1 and not len(self._leases)
        parts = {next(iter(self.sinks)): result} if is_whole else result.by_sink()
        for sink, part in parts.items():
            if sink in self.sinks:
                try:
                    sink.push(part)
                except Exception as error:  # a bug, but the other streams' tokens are not lost for it
                    logger.exception("a step's tokens could not be sent")
                    sink.close(PagodaError(f"internal error: {type(error).__name__}"))
                if sink.is_behind and sink not in self._slow:
                    self._park(sink)

    # Readers that do not keep up.

    def _park(self, sink: Sink) -> None:
        """Nothing more is made for a sink; its sequences leave their blocks and slots to others."""
        self._slow.add(sink)
        sequences = self._sequences_of(sink)
        logger.warning("a reader does not keep up: %d sequences wait for it", len(sequences))
        for core, request in sequences:
            core.park(request)

    def unpark(self, sink: Sink) -> None:
        """The reader keeps up again: what was parked for it resumes."""
        if sink in self._slow:
            self._slow.discard(sink)
            for core, request in reversed(self._sequences_of(sink)):
                core.unpark(request)

    def _sequences_of(self, sink: Sink) -> list[tuple[EngineCore, Request]]:
        """Unfinished sequences of a sink that some group has."""
        return [
            (open_request.core, request)
            for open_request in self.requests.values()
            if open_request.core is not None and open_request.sequences[0].sink is sink
            for request in open_request.unfinished
            if request not in self._homeless
        ]

    def _add(self, core: EngineCore, request: Request, *, at_front: bool) -> None:
        core.add(request, at_front=at_front)
        if request.sink in self._slow:
            core.park(request)

    # Load.

    @property
    def _is_busy(self) -> bool:
        """Whether some sequence has not ended."""
        return any(open_request.unfinished for open_request in self.requests.values())

    @property
    def is_ready(self) -> bool:
        """Whether some group serves."""
        return bool(self.cores) and not self.is_draining

    def load(self) -> Load:
        """Load now."""
        counters = self._past.copy()
        cores = [*self.cores, *self._retired] if self._retired else self.cores
        for core in cores:
            counters.take(core)
        schedulers = [core.scheduler for core in cores]
        return Load(
            num_running_reqs=sum(len(scheduler.running) for scheduler in schedulers),
            num_waiting_reqs=sum(len(s.waiting) + len(s.parked) for s in schedulers) + len(self._homeless),
            num_used_blocks=sum(scheduler.kv.pool.num_used_blocks for scheduler in schedulers),
            num_total_blocks=sum(scheduler.kv.pool.num_blocks for scheduler in schedulers),
            silence_ms=max((core.silence_ms for core in cores), default=0),
            num_groups=len(self.cores),
            counters=counters,
        )

    def announce(self) -> None:
        """Tell every sink soon that load or readiness have changed outside of a step."""
        if self._announcement is None:
            self._announcement = asyncio.get_running_loop().call_later(0.01, self._announce)

    def _announce(self) -> None:
        self._announcement = None
        for sink in list(self.sinks):
            sink.announce()

    # Parts.

    def _start(self, sequences: list[Request], core: EngineCore | None, *, at_front: bool) -> None:
        for request in sequences:
            if request.check_finished():  # resumed behind its own end
                self._finish_unqueued(request)
            elif core is None:
                self._homeless[request] = None
            else:
                self._add(core, request, at_front=at_front)

    def _place(self, sequences: Iterable[Request]) -> None:
        """Give sequences that had been running or waiting elsewhere to a group, or keep them until there is one."""
        if not self.cores:
            for request in reversed(list(sequences)):
                self._homeless[request] = None
                self._homeless.move_to_end(request, last=False)
            return
        chosen: dict[str, EngineCore] = {}
        for request in reversed(list(sequences)):
            core = chosen.get(request.request_id) or self._router.choose(request, self.cores)
            chosen[request.request_id] = self.requests[request.request_id].core = core
            try:
                core.scheduler.admission.check_fits([request])
            except PagodaError as error:
                request.finish_reason, request.error = "error", error
                self._finish_unqueued(request)
                continue
            if request.check_finished():  # resumed behind its own end, before the model was known
                self._finish_unqueued(request)
            else:
                self._add(core, request, at_front=True)

    def _expire(self, request_id: str, timeout_s: float) -> None:
        if request_id in self.requests:
            error = DeadlineExceeded(f"request was not finished within its {timeout_s:g} s")
            self._end(self.requests[request_id].unfinished, "error", error)

    def _end(self, sequences: list[Request], reason: FinishReason, error: PagodaError | None = None) -> None:
        for request in sequences:
            request.finish_reason, request.error = reason, error
        self._finish(sequences)
        self.announce()

    def _finish(self, sequences: list[Request]) -> None:
        """End sequences outside of a step, and say so to their sinks."""
        for request in sequences:
            self._detach(request)
        self.deliver(StepResult(step=0, finished=list(sequences)))

    def _detach(self, request: Request) -> None:
        core = self.requests[request.request_id].core
        if request in self._homeless:
            del self._homeless[request]
            request.status = RequestStatus.FINISHED
        else:
            assert core is not None, "a request without a group is homeless"
            core.finish(request)

    def _finish_unqueued(self, request: Request) -> None:
        request.status = RequestStatus.FINISHED
        self.deliver(StepResult(step=0, finished=[request]))

    def _drop(self, request_id: str) -> None:
        """End a request without telling anyone."""
        if self.traces:
            self.traces.end(self.requests[request_id].sequences)
        for request in self.requests[request_id].unfinished:
            self._detach(request)
        self._forget(request_id)
        self.announce()

    def _end_lease(self, request_id: str, lease_s: float) -> None:
        text = "request %s: nobody went on with it within %g s: aborted"
        logger.warning(text, request_id, lease_s, extra={"request_id": request_id})
        self._drop(request_id)

    def _close(self, request: Request) -> None:
        open_request = self.requests.get(request.request_id)
        if open_request is not None and request in open_request.sequences and not open_request.unfinished:
            self._deadlines.cancel(request.request_id)
            if open_request.origin is None:
                self._forget(request.request_id)

    def _forget(self, request_id: str) -> None:
        self._deadlines.cancel(request_id)
        self._leases.cancel(request_id)
        del self.requests[request_id]
