"""Decides which tokens run in the next step. Knows requests and blocks; no tensors, no gRPC, no clock."""

from collections import deque
from dataclasses import dataclass

from pagoda_common.config import CacheConfig, SchedulerConfig
from pagoda_common.errors import Code, PagodaError, RequestFailed
from pagoda_scheduler.admission import Admission
from pagoda_scheduler.beams import Beams
from pagoda_scheduler.kv_cache_manager import KVCacheManager, Prefix
from pagoda_scheduler.quarantine import MAX_CRASHES, Quarantine
from pagoda_scheduler.request import Request, RequestStatus
from pagoda_scheduler.slot_table import SlotTable
from pagoda_scheduler.step import BadSlot, ModelRunnerOutput, NewRequestData, SchedulerOutput, StepResult
from pagoda_scheduler.swap_cost import SwapCost
from pagoda_scheduler.waiting_queue import QUEUES


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A step that was sent and not answered: its rows."""

    step: int
    requests: list[Request]
    slots: list[int]
    """Slots at the time; a sequence may have lost its slot since."""
    samples: list[bool]
    """Whether the row samples a token."""
    num_tokens: int
    """Tokens in the batch."""


class Scheduler:
    """Continuous batching over a token budget for one worker group.

    There is no prefill phase and no decode phase: each running sequence's `num_computed_tokens` chases its
    `num_tokens`, and a step takes what fits the budget, running sequences first. A step may be scheduled while others
    are in flight: a token they will sample counts as pending, and the worker knows it by the time it is needed.
    Source: iteration-level scheduling, Yu et al. 2022 (Orca); chunked prefill, Agrawal et al. 2023 (arXiv 2308.16369).
    """

    def __init__(
        self,
        *,
        config: SchedulerConfig,
        cache: CacheConfig,
        num_blocks: int,
        max_model_len: int,
        vocab_size: int | None = None,
        num_host_blocks: int = 0,
        swap_block_ns: int = 0,
    ) -> None:
        """`num_blocks`, `max_model_len`, `num_host_blocks`, `swap_block_ns`: measured by the worker; `vocab_size`: of
        its model, None takes every token id."""
        self._config = config
        self.kv = KVCacheManager(
            num_blocks=num_blocks,
            block_size=cache.block_size,
            enable_prefix_caching=cache.enable_prefix_caching,
            num_host_blocks=num_host_blocks if config.preemption_mode != "recompute" else 0,
        )
        weighs = swap_block_ns and config.preemption_mode == "auto"
        self._swap_cost = SwapCost(swap_block_ns=swap_block_ns, block_size=cache.block_size) if weighs else None
        self.max_model_len = min(max_model_len, self.kv.capacity_tokens)
        self.running: list[Request] = []
        self.waiting = QUEUES[config.policy]()
        self.admission = Admission(
            config=config, waiting=self.waiting, max_model_len=self.max_model_len, vocab_size=vocab_size
        )
        self.held: dict[Request, None] = {}
        """Sequences that wait for their reader, outside of the queue."""
        self.num_preemptions = 0
        self.quarantine = Quarantine()
        self._slots = SlotTable(size=config.max_num_seqs)
        self._beams = Beams(
            kv=self.kv,
            slots=self._slots,
            running=self.running,
            wait=self.waiting.append_front,
            finish=self.finish,
        )
        self._counts_service = config.policy == "fair"
        self._now_ns = 0
        self._in_flight: deque[_InFlight] = deque()
        self._step = 0
        # A little room for running sequences to grow, so that an admission does not preempt one at once.
        self._watermark_blocks = max(1, num_blocks // 100)

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether some sequence waits or runs."""
        return bool(self.running) or len(self.waiting) > 0 or len(self.quarantine) > 0

    def add(self, request: Request, *, at_front: bool = False) -> None:
        """Queue a sequence; `at_front` for one that had already been admitted elsewhere."""
        limit = max(self.max_model_len, request.num_prompt_tokens + 1)
        request.max_num_tokens = min(request.max_num_tokens, limit)
        if request.beam_group is not None:
            if request is not request.beam_group.sequences[0]:
                return  # it waits for the beams of the first
            request = request.beam_group.start()
        if request.num_crashes >= MAX_CRASHES:
            self.quarantine.add(request)
        elif at_front:
            self.waiting.append_front(request)
        else:
            self.waiting.append(request)

    def finish(self, request: Request) -> None:
        """End a sequence now, whatever it does; its blocks are free at once.

        A step in flight may still write to those blocks, but it runs before any step that gets them anew.
        """
        if request.beam_group is not None and not request.is_beam:
            for beam in request.beam_group.beams:
                self.finish(beam)
            request.beam_group.beams = []
        elif request.status is RequestStatus.RUNNING:
            if not self.kv.enable_prefix_caching:
                self.kv.forget(request)
            self.running.remove(request)
            self._release(request)
        elif request in self.held:
            del self.held[request]
        elif request.status is RequestStatus.WAITING and request not in self.quarantine:
            self.waiting.remove(request)
        self.quarantine.discard(request)
        request.status = RequestStatus.FINISHED

    def hold(self, request: Request) -> None:
        """Take a sequence out of the queue until `let_go`; its blocks and its slot are for others.

        A beam search is not held (it says nothing before its end), nor is a suspect (others wait for it to be cleared).
        """
        if request.is_finished or request.beam_group is not None or request in self.quarantine:
            return
        if request.status is RequestStatus.RUNNING:
            self._preempt(request)
        if request not in self.held:
            self.waiting.remove(request)
            self.held[request] = None

    def let_go(self, request: Request) -> None:
        """Queue a sequence that was held, ahead of the others; no-op for one that was not."""
        if request in self.held:
            del self.held[request]
            self.waiting.append_front(request)

    def schedule(self, now_ns: int = 0) -> SchedulerOutput | None:
        """Decide the next step; None when there is nothing to compute. `now_ns` is noted as time of admission."""
        self._now_ns = now_ns
        budget = self._config.max_num_batched_tokens
        scheduled: dict[Request, int] = {}
        appended: dict[Request, list[int]] = {}
        if self.quarantine:
            admitted = self._schedule_suspect(budget, scheduled, appended)
        else:
            self._preempt_for_urgent()
            budget = self._schedule_running(budget, scheduled, appended)
            admitted = self._schedule_waiting(budget, scheduled)
        if not scheduled:
            if self.running and self.waiting and not self._in_flight and not self.quarantine:
                # Beams hold all blocks while they wait for a sibling that has none.
                self._preempt(self.running[-1])
                return self.schedule(now_ns)
            return None
        self._beams.reenter(scheduled, appended, admitted)
        self._step += 1
        transfers = self.kv.take_transfers()
        output = SchedulerOutput(
            step=self._step,
            new_requests=[_new_request_data(request, computed) for request, computed in admitted],
            freed_slots=self._slots.take_freed(),
            slots=[request.slot for request in scheduled],
            num_scheduled_tokens=list(scheduled.values()),
            appended_slots=[request.slot for request, blocks in appended.items() for _ in blocks],
            appended_block_ids=[block_id for blocks in appended.values() for block_id in blocks],
            blocks_to_swap_out=transfers.swap_out,
            blocks_to_swap_in=transfers.swap_in,
            blocks_to_copy=transfers.copy,
        )
        samples = []
        for request, num_new in scheduled.items():
            if num_new == 1 and request.num_computed_tokens + 1 == request.num_tokens:  # a decode
                request.num_computed_tokens += 1
                request.num_pending += 1
                request.num_tokens += 1
                samples.append(True)
            else:
                samples.append(self._advance(request, num_new))
        num_tokens = output.num_tokens
        self._in_flight.append(_InFlight(self._step, list(scheduled), output.slots, samples, num_tokens))
        return output

    def update(self, output: ModelRunnerOutput, result: StepResult | None = None) -> StepResult:
        """Take a step's result: append tokens, end sequences. Results come in the order of their steps.

        Args:
            result: filled and returned; what was taken before an exception is in it.
        """
        flight = self._in_flight[0]  # until it is taken whole: whatever fails on the way is held against its sequences
        assert output.step == flight.step, f"result of step {output.step}, expected {flight.step}"
        result = result or StepResult(step=output.step)
        result.logprobs = output.logprobs
        self._take_prompt_logprobs(flight, output, result)
        self._weigh_swapping(flight, output)
        bad = {bad_slot.slot: bad_slot for bad_slot in output.bad_slots} if output.bad_slots else None
        counts = output.num_sampled_tokens
        tokens, finished = output.token_ids, RequestStatus.FINISHED
        requests: list[Request] = []
        rows: list[int] = []
        try:
            if counts is None and bad is None:  # a token for every sequence, as in most steps
                for row, request in enumerate(flight.requests):
                    if request.status is not finished:
                        if request.is_beam:
                            self._beams.advance(request, tokens[row], row, result.logprobs, result)
                        else:
                            self._append(request, tokens[row], result)
                            rows.append(row)
                            requests.append(request)
            else:
                self._update_mixed(flight, output, bad or {}, result, requests, rows)
        finally:
            result.add_tokens(requests, rows, tokens)
        self._in_flight.popleft()
        if self.quarantine:
            for request in requests:
                self.quarantine.discard(request)
        return result

    def _update_mixed(
        self,
        flight: _InFlight,
        output: ModelRunnerOutput,
        bad: dict[int, BadSlot],
        result: StepResult,
        requests: list[Request],
        rows: list[int],
    ) -> None:
        """A step some of whose sequences got no token: parts of prompts, failures. Adds to `requests` and `rows`."""
        counts, row = output.num_sampled_tokens, 0
        for index, request in enumerate(flight.requests):
            count = 1 if counts is None else counts[index]
            if request.is_finished:
                pass  # aborted or ended while the step was in flight
            elif flight.slots[index] in bad:
                self._fail(request, bad[flight.slots[index]], result)
            elif flight.samples[index]:
                if count != 1:
                    raise PagodaError(f"step {output.step}: {request!r} got {count} tokens, expected 1")
                if request.is_beam:
                    self._beams.advance(request, output.token_ids[row], row, result.logprobs, result)
                else:
                    self._append(request, output.token_ids[row], result)
                    rows.append(row)
                    requests.append(request)
            row += count

    def take_all(self) -> list[Request]:
        """Take every unfinished sequence out, in the order in which they should run again; their worker is lost."""
        taken: dict[Request, None] = {}
        for request in (*self.running, *self.waiting):
            owners = [request] if request.beam_group is None else request.beam_group.sequences
            taken.update(dict.fromkeys(owners))
        taken.update(dict.fromkeys((*self.quarantine.take_all(), *self.held)))
        self.held.clear()
        requests = list(taken)
        for request in requests:
            request.forget_computed()
        self.running.clear()
        for request in list(self.waiting):
            self.waiting.remove(request)
        return requests

    def take_waiting(self) -> list[Request]:
        """Take out, in their order, the waiting sequences of requests that have nothing else here."""
        bound = {request.request_id for request in (*self.running, *self.held, *self.quarantine)}
        bound |= {request.request_id for request in self.waiting if request.num_pending or request.beam_group}
        taken = [request for request in self.waiting if request.request_id not in bound]
        for request in taken:
            self.waiting.remove(request)
            request.forget_computed()
        return taken

    def compact(self) -> None:
        """Give back memory that a burst has left fragmented; only while there are no unfinished requests."""
        if not self.has_unfinished_requests and not self.held:
            self.waiting.compact()
            self.kv.compact()

    def blame(self) -> list[Request]:
        """The worker is lost: count that against the sequences in flight; those that were alone in it twice over.

        To be called before `take_all`. Whoever is returned crashes its worker whenever it is computed.
        """
        in_flight: dict[Request, None] = {}
        for flight in self._in_flight:
            for request in flight.requests:
                if not request.is_finished:
                    owners = [request] if request.beam_group is None else request.beam_group.sequences
                    in_flight.update(dict.fromkeys(owners))
        for request in in_flight:
            request.num_crashes += 1
        return [request for request in in_flight if request.num_crashes > MAX_CRASHES]

    # One step, part by part.

    def _schedule_suspect(
        self, budget: int, scheduled: dict[Request, int], appended: dict[Request, list[int]]
    ) -> list[tuple[Request, int]]:
        """Schedule the first suspect and nothing else, one step at a time; (sequence, tokens found in the cache)."""
        if self._in_flight:
            return []
        suspect = self.quarantine.first
        admitted: list[tuple[Request, int]] = []
        if suspect.status is RequestStatus.WAITING:
            while not (self._slots.has_free and self.kv.can_admit(suspect, self.kv.find_prefix(suspect))):
                self._preempt(self.running[-1])
            prefix = self.kv.find_prefix(suspect)
            num_new = min(suspect.num_tokens - prefix.num_tokens, budget)
            self._admit(suspect, prefix, num_new)
            admitted.append((suspect, prefix.num_tokens))
        else:
            num_new = min(suspect.num_tokens - suspect.num_computed_tokens, budget)
            while (blocks := self.kv.extend(suspect, suspect.num_computed_tokens + num_new)) is None:
                self._preempt(next(request for request in reversed(self.running) if request is not suspect))
            if blocks:
                appended[suspect] = blocks
        scheduled[suspect] = num_new
        return admitted

    def _preempt_for_urgent(self) -> None:
        """Under the priority policy, make room for a waiting sequence at the cost of less urgent running ones."""
        if self._config.policy != "priority" or not self.waiting:
            return
        urgent = self.waiting.peek()
        if urgent.num_pending:
            return
        watermark = self._watermark_blocks
        while self.running and not (
            self._slots.has_free and self.kv.can_admit(urgent, self.kv.find_prefix(urgent), watermark_blocks=watermark)
        ):
            victim = self._victim()
            if victim.priority <= urgent.priority:
                return
            self._preempt(victim)

    def _schedule_running(self, budget: int, scheduled: dict[Request, int], appended: dict[Request, list[int]]) -> int:
        """Schedule running sequences in order, preempting from the end when blocks run out.

        Returns the budget left; 0 after a preemption, so that nobody is admitted in its place.
        """
        is_short, block_size = False, self.kv.block_size
        index = 0
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            index += 1
            num_new = request.num_tokens - request.num_computed_tokens
            if num_new == 0 or (request.num_pending and request.num_tokens >= request.max_num_tokens):
                continue  # its last token is in flight already
            computed = request.num_computed_tokens
            if num_new == 1 and computed < len(request.block_ids) * block_size:  # a decode within its last block
                scheduled[request] = 1
                budget -= 1
                continue
            num_new = self._chunk(num_new, budget)
            if num_new == 0:
                continue
            while (blocks := self.kv.extend(request, computed + num_new)) is None:
                is_short = True
                victim = self._victim()
                budget += scheduled.pop(victim, 0)
                appended.pop(victim, None)
                index -= self.running.index(victim) < index
                self._preempt(victim)
                if victim is request:
                    break
            if blocks is None:
                continue
            scheduled[request] = num_new
            if blocks:
                appended[request] = blocks
            budget -= num_new
        return 0 if is_short else budget

    def _schedule_waiting(self, budget: int, scheduled: dict[Request, int]) -> list[tuple[Request, int]]:
        """Admit waiting sequences while budget, slots and blocks last; (sequence, tokens found in the cache)."""
        admitted: list[tuple[Request, int]] = []
        deferred: list[Request] = []
        while self.waiting and self._slots.has_free and budget > 0:
            request = self.waiting.peek()
            if request.num_pending:
                break  # preempted while a step in flight samples its next token, which its new start must include
            if request.is_behind_leader or request.is_held:
                deferred.append(self.waiting.pop())
                continue
            prefix = self.kv.find_prefix(request)
            num_new = self._chunk(request.num_tokens - prefix.num_tokens, budget)
            watermark = self._watermark_blocks if self.running else 0
            if num_new == 0 or not self.kv.can_admit(request, prefix, watermark_blocks=watermark):
                break
            self.waiting.pop()
            self._admit(request, prefix, num_new)
            scheduled[request] = num_new
            admitted.append((request, prefix.num_tokens))
            budget -= num_new
        for request in reversed(deferred):
            self.waiting.append_front(request)
        return admitted

    def _admit(self, request: Request, prefix: Prefix, num_new: int) -> None:
        """Give a waiting sequence a slot, its prefix, and blocks for its first `num_new` tokens behind that."""
        self.kv.admit(request, prefix)
        blocks = self.kv.extend(request, prefix.num_tokens + num_new)
        assert blocks is not None, "can_admit() promised these blocks"
        if request.num_preemptions == 0:
            request.first_cached_tokens = prefix.num_tokens
            request.admitted_ns = self._now_ns
        request.slot = self._slots.take()
        request.status = RequestStatus.RUNNING
        self.running.append(request)
        self.waiting.charge(request, num_new)
        # Found by whoever is admitted next, even within this step.
        self.kv.cache_computed(request, prefix.num_tokens + num_new)

    def _chunk(self, num_new: int, budget: int) -> int:
        """How many of a sequence's `num_new` tokens this step takes; 0 when it has to wait."""
        if not self._config.enable_chunked_prefill and num_new <= self._config.max_num_batched_tokens:
            return num_new if num_new <= budget else 0  # one that has outgrown every step is recomputed in chunks
        threshold = self._config.long_prefill_token_threshold
        if 0 < threshold < num_new:
            num_new = threshold
        return min(num_new, budget)

    def _advance(self, request: Request, num_scheduled: int) -> bool:
        """Count a scheduled chunk as computed; whether the step samples a token behind it."""
        request.num_computed_tokens = computed = request.num_computed_tokens + num_scheduled
        is_last = computed == request.num_tokens
        if num_scheduled > 1 or not is_last:
            self.kv.cache_computed(request, computed)
        if is_last:
            request.num_pending += 1
            request.num_tokens = computed + 1
        return is_last

    def _weigh_swapping(self, flight: _InFlight, output: ModelRunnerOutput) -> None:
        if self._swap_cost is not None and output.timings is not None:
            is_cheaper = self._swap_cost.add(forward_ns=output.timings.forward_ns, num_tokens=flight.num_tokens)
            if is_cheaper is not None:
                self.kv.is_swap_cheaper = is_cheaper

    def _take_prompt_logprobs(self, flight: _InFlight, output: ModelRunnerOutput, result: StepResult) -> None:
        if output.prompt_logprobs:
            by_slot = dict(zip(flight.slots, flight.requests, strict=True))
            chunks = ((by_slot[chunk.slot], chunk) for chunk in output.prompt_logprobs)
            result.prompt_logprobs = [(request, chunk) for request, chunk in chunks if not request.is_finished]

    def _append(self, request: Request, token_id: int, result: StepResult) -> None:
        """Commit a sampled token. Runs once for every token of every sequence: what is rare stands behind a test."""
        if self._counts_service:
            self.waiting.charge(request, 2)  # an output token costs about as much as two of a prompt
        if not request.is_announced:
            request.is_announced = True
            result.admitted.append(request)
        request.output_token_ids.append(token_id)
        request.num_pending -= 1
        request.num_crashes = 0
        num_known = request.num_tokens - request.num_pending
        if (token_id in request.end_token_ids or num_known >= request.max_num_tokens) and request.check_finished():
            self.finish(request)
            result.finished.append(request)
        elif (num_known - 1) % self.kv.block_size == 0 and request.status is RequestStatus.RUNNING:
            self.kv.cache_computed(request, num_known - 1)  # everything before the new token is in the cache

    def _fail(self, request: Request, bad_slot: BadSlot, result: StepResult) -> None:
        """End a sequence that the worker could not compute; its blocks may hold garbage."""
        self.kv.forget(request)
        for sequence in [request] if request.beam_group is None else request.beam_group.sequences:
            sequence.finish_reason = "error"
            sequence.error = RequestFailed(bad_slot.message, field=bad_slot.field or None, code=Code(bad_slot.code))
            self.finish(sequence)
            result.finished.append(sequence)

    def _victim(self) -> Request:
        """The running sequence to preempt: the last admitted, or the least urgent."""
        if self._config.policy == "priority":
            return max(self.running, key=lambda request: (request.priority, request.arrival_ns))
        return self.running[-1]

    def _preempt(self, request: Request) -> None:
        """Send a running sequence back to the queue; it will be computed again, from cached prefixes if they last."""
        self.running.remove(request)
        self._release(request)
        request.status = RequestStatus.WAITING
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.append_front(request)

    def _release(self, request: Request) -> None:
        self.kv.free(request)
        self._slots.release(request.slot, is_known=self._beams.forget(request))
        request.slot = -1


def _new_request_data(request: Request, num_cached: int) -> NewRequestData:
    return NewRequestData(
        slot=request.slot,
        request_id=f"{request.request_id}/{request.index}",
        prompt_token_ids=request.prompt_token_ids,
        output_token_ids=list(request.output_token_ids),
        sampling_params=request.sampling_params,
        eos_token_ids=request.eos_token_ids,
        block_ids=list(request.block_ids),
        num_computed_tokens=num_cached,
        is_beam=request.is_beam,
    )
