"""Placement: assigns sequences to worker groups. Knows no sinks and no time limits."""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from pagoda_common.config.engine_config import SchedulerConfig
from pagoda_common.errors import PagodaError, RequestFailed
from pagoda_scheduler.core.admission import check_queue
from pagoda_scheduler.core.request import Request, RequestStatus
from pagoda_scheduler.core.turns import TURN
from pagoda_scheduler.core.waiting_queue import FcfsQueue
from pagoda_scheduler.engine.engine_core import EngineCore
from pagoda_scheduler.engine.load import Counters, Load
from pagoda_scheduler.engine.open_requests import OpenRequest
from pagoda_scheduler.engine.router import ROUTERS, Router

logger = logging.getLogger(__name__)


class Placement:
    """The serving groups, and the sequences that wait for a group (homeless)."""

    def __init__(
        self,
        *,
        config: SchedulerConfig,
        requests: Mapping[str, OpenRequest],
        finish: Callable[[Request], None],
        is_slow: Callable[[Request], bool],
    ) -> None:
        """`requests`: the open ones, by id. `finish` reports a sequence that ended before it was in a group; `is_slow`:
        the reader is too slow, so the sequence is parked at once."""
        self.cores: list[EngineCore] = []
        """Groups that accept requests."""
        self._retired: list[EngineCore] = []
        """Groups that only finish their running sequences."""
        self._config = config
        self._requests = requests
        self._finish = finish
        self._is_slow = is_slow
        self._homeless = FcfsQueue()
        self._router: Router = ROUTERS[config.routing_policy]()
        self._past = Counters()

    def choose(self, sequences: list[Request], *, is_new: bool) -> EngineCore | None:
        """The group for the sequences of one request; None if there is no group, and they wait for one.

        Args:
            is_new: apply the queue's bounds.

        Raises:
            RequestTooLong, InvalidRequest, QueueFull: the request cannot be admitted.
        """
        if self.cores:
            core = self._router.choose(sequences[0], self.cores)
            unfinished = [sequence for sequence in sequences if not sequence.is_finished]
            check = core.scheduler.admission.check if is_new else core.scheduler.admission.check_fits
            check(unfinished)
            return core
        if is_new:
            check_queue(self._config, waiting=self._homeless, requests=sequences)
        return None

    def start(self, sequences: Iterable[Request], core: EngineCore | None, *, at_front: bool) -> None:
        """Queue sequences at `core`, or until there is a group; `at_front`: they had already run."""
        for request in sequences:
            if request.check_finished():  # resumed after its own end
                self._end(request)
            elif core is None:
                self._homeless.append(request)
            else:
                self._add(core, request, at_front=at_front)

    def place(self, sequences: Iterable[Request]) -> None:
        """Move sequences from another group to a group, or keep them until there is one."""
        if not self.cores:
            for request in reversed(list(sequences)):
                self._homeless.append_front(request)
            return
        chosen: dict[str, EngineCore] = {}
        ordered, late = _split_late(sequences)
        for request in (*reversed(ordered), *late):
            core = chosen.get(request.request_id) or self._router.choose(request, self.cores)
            chosen[request.request_id] = self._requests[request.request_id].core = core
            try:
                core.scheduler.admission.check_fits([request])
            except PagodaError as error:
                request.finish_reason, request.error = "error", error
                self._end(request)
                continue
            if request.check_finished():  # resumed after its own end, before the model was known
                self._end(request)
            else:
                self._add(core, request, at_front=request not in late)

    def take_out(self, request: Request) -> None:
        """End a sequence now, in whatever group it is."""
        if request in self._homeless:
            self._homeless.remove(request)
            request.status = RequestStatus.FINISHED
        else:
            core = self._requests[request.request_id].core
            assert core is not None, "a request without a group is homeless"
            core.finish(request)

    def is_homeless(self, request: Request) -> bool:
        """Whether a sequence waits for a group."""
        return request in self._homeless

    def compact(self) -> None:
        """Free memory that a burst of requests has left fragmented; only while no request is open."""
        self._homeless.compact()
        for core in self.cores:
            core.scheduler.compact()

    def forget_constraints(self) -> bool:
        """Let workers drop constraints without sequences; returns whether there were any. Only while no request is
        open."""
        return sum(core.forget_constraints() for core in self.cores) > 0

    # Groups that are added and removed.

    def add(self, core: EngineCore) -> None:
        """A group starts serving, first the sequences without a group."""
        self.cores.append(core)
        homeless, self._homeless = list(self._homeless), FcfsQueue()
        for request in homeless:
            request.learn_model(max_model_len=core.scheduler.max_model_len, eos_token_ids=core.eos_token_ids)
        self.place(homeless)

    def retire(self, core: EngineCore) -> None:
        """Retire a group: its waiting sequences move to other groups, its running ones end there."""
        self.cores.remove(core)
        self._router.forget(core)
        self._retired.append(core)
        self.place(core.scheduler.take_waiting())

    def remove(self, core: EngineCore, *, is_fault: bool) -> tuple[list[Request], list[Request]] | None:
        """Remove a group; None if it did not serve.

        Args:
            is_fault: the group failed, and a sequence in flight may be the cause.

        Returns:
            The group's unfinished sequences, and those of them that are proven to crash their worker.
        """
        if core in self._retired:
            self._retired.remove(core)
        elif core in self.cores:
            self.cores.remove(core)
            self._router.forget(core)
        else:
            return None
        self._past.take(core)
        self._past.num_worker_losses += is_fault
        drafts = core.scheduler.speculation.counters
        if drafts.num_drafts:
            text = "speculation: %d of %d draft tokens were right, in %d drafts"
            logger.info(text, drafts.num_accepted_tokens, drafts.num_draft_tokens, drafts.num_drafts)
        poisonous = core.scheduler.blame() if is_fault else []
        return core.scheduler.take_all(), poisonous

    def fail(self, poisonous: Iterable[Request], reason: str) -> None:
        """End sequences that crash their worker whenever they run."""
        for request in poisonous:
            text = "request %s failed: it crashes its worker whenever it runs"
            logger.error(text, request.request_id, extra={"request_id": request.request_id})
            request.finish_reason = "error"
            request.error = RequestFailed(
                f"this request crashed its worker {request.num_crashes} times in a row, the last time alone: {reason}"
            )
            self._end(request)

    def load(self) -> Load:
        """Load of all groups together."""
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

    def _add(self, core: EngineCore, request: Request, *, at_front: bool) -> None:
        core.add(request, at_front=at_front)
        if self._is_slow(request):
            core.park(request)

    def _end(self, request: Request) -> None:
        request.status = RequestStatus.FINISHED
        self._finish(request)


def _split_late(sequences: Iterable[Request]) -> tuple[list[Request], dict[Request, None]]:
    """Split sequences into those that go first, and those of large calls that have not run and wait for turns again."""
    ordered: list[Request] = []
    late: dict[Request, None] = {}
    counts: Counter[str] = Counter()
    for request in sequences:
        has_run = request.num_preemptions or request.admitted_ns or request.output_token_ids
        counts[request.group] += not has_run
        if has_run or counts[request.group] <= TURN:
            ordered.append(request)
        else:
            late[request] = None
    return ordered, late
