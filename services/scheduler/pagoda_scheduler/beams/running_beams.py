"""Beams: continues, forks and ends the beams of all searches of a scheduler. Knows no budget."""

from collections.abc import Callable

from pagoda_scheduler.beams.beam_group import BeamGroup
from pagoda_scheduler.core.request import Request, RequestStatus
from pagoda_scheduler.core.step import LogprobRows
from pagoda_scheduler.core.step_result import StepResult
from pagoda_scheduler.core.worker_slots import WorkerSlots
from pagoda_scheduler.kv.kv_cache_manager import KVCacheManager


class Beams:
    """The running beams of all beam groups of one scheduler."""

    def __init__(
        self,
        *,
        kv: KVCacheManager,
        slots: WorkerSlots,
        running: list[Request],
        wait: Callable[[Request], None],
        preempt: Callable[[Request], None],
        finish: Callable[[Request], None],
    ) -> None:
        """`running`: the scheduler's list; `wait`: queues a beam ahead of others; `preempt`: sends a running one back
        to the queue; `finish`: ends one."""
        self._kv = kv
        self._slots = slots
        self._running = running
        self._wait = wait
        self._preempt = preempt
        self._finish = finish
        self._reentering: dict[Request, bool] = {}
        """Running beams that must be sent again, and whether the worker has another log in their slot.
        """

    def advance(self, beam: Request, token_id: int, row: int, logprobs: LogprobRows | None, result: StepResult) -> None:
        """Add one beam's candidates; after the last beam of a step, choose the beams of the next step."""
        beam.num_pending -= 1
        beam.num_tokens -= 1
        group = beam.beam_group
        assert isinstance(group, BeamGroup), "a beam belongs to a search"
        assert logprobs is not None, "beams ask for logprobs"
        beam.sampled_token_id = token_id
        beam.waits_for_siblings = True
        if not group.collect(beam, logprobs, row):
            return
        for sequence in group.sequences:
            sequence.num_crashes = 0
        parents, continuations = group.beams, group.advance()
        # The first continuation of a beam takes its place, after the others have forked from it.
        chosen: list[Request | None] = [None] * len(continuations)
        firsts: dict[int, int] = {}
        for place, continuation in enumerate(continuations):
            if firsts.setdefault(continuation.parent, place) != place:
                chosen[place] = self._fork(parents[continuation.parent], continuation.token_id)
        for parent, place in firsts.items():
            chosen[place] = self._continue(parents[parent], continuations[place].token_id)
        group.beams = [request for request in chosen if request is not None]
        for index, parent_beam in enumerate(parents):
            if index not in firsts:
                self._finish(parent_beam)
        if not continuations:
            group.deliver(result)
            for sequence in group.sequences:
                sequence.status = RequestStatus.FINISHED

    def reenter(
        self, scheduled: dict[Request, int], appended: dict[Request, list[int]], admitted: dict[Request, int]
    ) -> None:
        """Send scheduled beams as new requests if their log in the worker is not their own."""
        for request in [request for request in self._reentering if request in scheduled]:
            if self._reentering.pop(request):
                self._slots.renew(request.slot)
            appended.pop(request, None)
            admitted[request] = request.num_computed_tokens
            self._kv.begin_anew(request)

    def forget(self, request: Request) -> bool:
        """`request` leaves its slot; whether the worker has it in that slot."""
        return self._reentering.pop(request, None) is not False

    def _continue(self, beam: Request, token_id: int) -> Request:
        """Let a beam continue with `token_id`."""
        beam.waits_for_siblings = False
        beam.output_token_ids.append(token_id)
        beam.num_tokens += 1
        beam.max_num_tokens = beam.num_tokens + 1
        if beam.status is RequestStatus.RUNNING:
            self._kv.cache_computed(beam, beam.num_computed_tokens)
            if token_id == beam.sampled_token_id:
                self._kv.go_on(beam)
            elif self._kv.can_begin_anew(beam):
                self._reentering[beam] = True  # the worker's log ends with the likeliest token
            else:
                self._preempt(beam)
        return beam

    def _fork(self, parent: Request, token_id: int) -> Request:
        """A new beam: the tokens of `parent`, then `token_id`."""
        output = [*parent.output_token_ids, token_id]
        child = parent.derive(sampling_params=parent.sampling_params, output_token_ids=output)
        if parent.status is RequestStatus.RUNNING and self._slots.has_free and self._kv.can_fork(parent):
            self._kv.fork(parent, child)
            child.slot = self._slots.take()
            child.status = RequestStatus.RUNNING
            self._running.append(child)
            self._reentering[child] = False
        else:
            self._wait(child)
        return child
