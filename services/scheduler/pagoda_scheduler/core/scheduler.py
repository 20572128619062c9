"""Decides which tokens run in the next step. Knows requests and blocks; no tensors, no gRPC, no clock."""

from collections.abc import Sequence
from dataclasses import replace

from pagoda_common.config.engine_config import CacheConfig, SchedulerConfig
from pagoda_common.errors import PagodaError
from pagoda_common.params.lora_adapter import LoraAdapter
from pagoda_scheduler.adapters.adapter_pool import AdapterPool
from pagoda_scheduler.beams.running_beams import Beams
from pagoda_scheduler.core.admission import Admission
from pagoda_scheduler.core.chunks import Chunks
from pagoda_scheduler.core.constraint_holds import ConstraintHolds
from pagoda_scheduler.core.in_flight import InFlight
from pagoda_scheduler.core.quarantine import MAX_CRASHES, Quarantine
from pagoda_scheduler.core.request import Request, RequestStatus
from pagoda_scheduler.core.room import Room
from pagoda_scheduler.core.speculation import Speculation
from pagoda_scheduler.core.step import ModelRunnerOutput, SchedulerOutput
from pagoda_scheduler.core.step_plan import StepPlan
from pagoda_scheduler.core.step_result import StepResult
from pagoda_scheduler.core.waiting_queue import QUEUES
from pagoda_scheduler.core.worker_slots import WorkerSlots
from pagoda_scheduler.kv.cache_group import ONE_GROUP, CacheGroup, CacheSizes, computes_whole
from pagoda_scheduler.kv.kv_cache_manager import KVCacheManager
from pagoda_scheduler.kv.prefix import Prefix
from pagoda_scheduler.kv.swap_cost import SwapCost

MAX_IN_FLIGHT = 4
"""Maximum number of steps in flight, the next one included."""
MAX_WITHOUT_ADAPTER = 256
"""Maximum number of waiting sequences that a step skips because their adapters are not loaded or have no room."""


class Scheduler:
    """Continuous batching over a token budget for one worker group.

    There is no prefill phase and no decode phase: each running sequence's `num_computed_tokens` chases its
    `num_tokens`, and a step takes what fits the budget, running sequences first. A step may be scheduled while others
    are in flight: a token that they will sample counts as pending, and the worker knows it when it is needed.
    Source: iteration-level scheduling, Yu et al. 2022 (Orca); chunked prefill, Agrawal et al. 2023 (arXiv 2308.16369).
    """

    def __init__(
        self,
        *,
        config: SchedulerConfig,
        cache: CacheConfig,
        sizes: CacheSizes,
        max_model_len: int,
        groups: Sequence[CacheGroup] = ONE_GROUP,
        vocab_size: int | None = None,
        swap_block_ns: int = 0,
        num_speculative_tokens: int = 0,
        constraints: ConstraintHolds | None = None,
        adapters: AdapterPool | None = None,
    ) -> None:
        """`sizes`, `max_model_len`, `swap_block_ns`: measured by the worker; `groups`: cache groups of the model's
        layers; `vocab_size`: None accepts every id; `num_speculative_tokens`: maximum draft tokens per sequence and
        step; `constraints`: those compiled ahead of steps, None: steps wait; `adapters`: LoRA adapters of the workers,
        None: no sequence may have one."""
        self.computes_whole = computes_whole(groups)
        """Whether every sequence runs whole in one step, because the model generates no tokens."""
        if self.computes_whole:
            budget = max(config.max_num_batched_tokens, max_model_len)
            config = replace(config, enable_chunked_prefill=False, max_num_batched_tokens=budget)
        self._config = config
        self.adapters = adapters
        self.kv = KVCacheManager(
            sizes=sizes if config.preemption_mode != "recompute" else sizes.on_device(),
            groups=groups,
            block_size=cache.block_size,
            enable_prefix_caching=cache.enable_prefix_caching,
            snapshot_interval=cache.snapshot_interval,
            max_step_tokens=max(config.max_num_batched_tokens, MAX_IN_FLIGHT * (1 + num_speculative_tokens)),
        )
        self.max_model_len = self.kv.capacity_tokens(max_model_len)
        self.running: list[Request] = []
        self.waiting = QUEUES[config.policy]()
        self.admission = Admission(
            config=config,
            waiting=self.waiting,
            max_model_len=self.max_model_len,
            vocab_size=vocab_size,
            takes_adapters=adapters is not None,
            only_pools=self.computes_whole,
        )
        self.parked: dict[Request, None] = {}
        """Sequences outside of the queue that wait for a slow reader."""
        self.num_preemptions = 0
        self.quarantine = Quarantine()
        self._constraints = constraints
        self._chunks = Chunks(config=config, states=self.kv.states)
        self._slots = WorkerSlots(size=config.max_num_seqs)
        self._beams = Beams(
            kv=self.kv,
            slots=self._slots,
            running=self.running,
            wait=self.waiting.append_front,
            preempt=self._preempt,
            finish=self.finish,
        )
        # Free blocks for running sequences to grow, so that an admission does not cause a preemption at once.
        self._watermark_blocks = max(self.kv.tables.count, sizes.num_blocks // 100)
        self._room = Room(
            config=config,
            waiting=self.waiting,
            running=self.running,
            has_place=self._has_place,
            is_prepared=self._is_prepared,
            preempt=self._preempt,
            num_blocks=sizes.num_blocks,
        )
        self.speculation = Speculation(num_speculative_tokens=num_speculative_tokens)
        swap_ns = swap_block_ns * max(1, self.kv.tables.num_full) if config.preemption_mode == "auto" else 0
        self._in_flight = InFlight(
            kv=self.kv,
            beams=self._beams,
            speculation=self.speculation,
            finish=self.finish,
            took=self._chunks.took,
            charge=self.waiting.charge if config.policy == "fair" else None,
            swap_cost=SwapCost(swap_block_ns=swap_ns, block_size=cache.block_size) if swap_ns else None,
        )
        self._now_ns = 0
        self._step = 0

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether some sequence waits or runs."""
        return bool(self.running) or len(self.waiting) > 0 or len(self.quarantine) > 0

    def add(self, request: Request, *, at_front: bool = False) -> None:
        """Queue a sequence; `at_front` if it had already been admitted elsewhere."""
        limit = max(self.max_model_len, request.num_prompt_tokens + 1)
        request.max_num_tokens = min(request.max_num_tokens, limit)
        if request.beam_group is not None:
            if request is not request.beam_group.sequences[0]:
                return  # it waits for the beams of the first
            request = request.beam_group.start()
        if request.num_crashes >= MAX_CRASHES:
            self.quarantine.add(request)
            return
        if at_front:
            self.waiting.append_front(request)
        else:
            self.waiting.append(request)
        if self._constraints is not None:
            self._constraints.announce(request)

    def put_back(self, requests: Sequence[Request]) -> None:
        """The constraint of these requests is compiled: those that were set aside get their places back."""
        for request in requests:
            self.waiting.put_back(request)

    def finish(self, request: Request) -> None:
        """End a sequence now, in any state; its blocks are free at once.

        A step in flight may still write to those blocks, but it runs before any later step that uses them.
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
        elif request in self.parked:
            del self.parked[request]
        elif request.status is RequestStatus.WAITING and request not in self.quarantine:
            self.waiting.remove(request)
        self._leave_constraint(request)
        self.quarantine.discard(request)
        request.status = RequestStatus.FINISHED

    def fail_adapter(self, adapter: LoraAdapter, error: PagodaError) -> list[Request]:
        """An adapter cannot be loaded: end the waiting sequences that need it with `error`, and return them."""
        assert self.adapters is not None, "it was asked for"
        candidates = (*self.waiting, *self.parked, *self.quarantine)
        failing: dict[Request, None] = {}
        for request in self.adapters.failed(adapter, candidates, error):
            self.finish(request)
            owners = [request] if request.beam_group is None else request.beam_group.sequences
            for owner in owners:
                owner.finish_reason, owner.error = "error", error
                owner.status = RequestStatus.FINISHED
            failing.update(dict.fromkeys(owners))
        return list(failing)

    def park(self, request: Request) -> None:
        """Take a sequence out of the queue until `unpark`, and free its blocks and slot.

        A beam search is not parked (it sends nothing before its end), nor is a suspect (others wait for its clearance).
        """
        if request.is_finished or request.beam_group is not None or request in self.quarantine:
            return
        if request.status is RequestStatus.RUNNING:
            self._preempt(request)
        if request not in self.parked:
            self.waiting.remove(request)
            self._leave_constraint(request)
            self.parked[request] = None

    def unpark(self, request: Request) -> None:
        """Queue a sequence that was parked, ahead of the others; no-op for one that was not."""
        if request in self.parked:
            del self.parked[request]
            self.waiting.append_front(request)

    def schedule(self, now_ns: int = 0) -> SchedulerOutput | None:
        """Decide the next step; None when there is nothing to compute. `now_ns`: recorded as time of admission."""
        self._now_ns = now_ns
        plan = StepPlan(budget=self._chunks.budget(self.running), num_tables=self.kv.tables.count)
        if self.adapters is not None:
            self.adapters.begin(self.running)
        if self.quarantine:
            self._schedule_suspect(plan)
        else:
            if self._constraints is not None:
                self._constraints.resume()
            self._room.make()
            if self._schedule_running(plan):
                self._schedule_waiting(plan)
        if not plan.scheduled:
            if self.running and self.waiting.has_next and not self._in_flight and not self.quarantine:
                # Beams hold all blocks while they wait for a sibling that has none.
                self._preempt(self.running[-1])
                return self.schedule(now_ns)
            if not self._slots.is_telling:
                return None
        self._beams.reenter(plan.scheduled, plan.appended, plan.admitted)
        self._step += 1
        freed_slots, transfers = self._slots.take_freed(), self.kv.take_transfers(plan.scheduled, plan.ahead)
        output = plan.output(step=self._step, freed_slots=freed_slots, transfers=transfers, adapters=self.adapters)
        samples, num_prefills_ended = [], 0
        for request, num_new in plan.scheduled.items():
            num_tokens = request.num_tokens
            if num_new == 1 and request.num_computed_tokens + 1 == num_tokens:  # a decode
                request.num_computed_tokens = num_tokens
                request.num_pending += 1
                request.num_tokens = num_tokens + 1
                samples.append(True)
            else:
                samples.append(self._advance(request, num_new))
                num_prefills_ended += samples[-1]
        for request, num_ahead in plan.ahead.items():
            request.num_lookahead += num_ahead
        self._in_flight.add(output, list(plan.scheduled), samples)
        if self._constraints is not None:
            self._constraints.sent(self._step)
        return output._replace(num_prefills_ended=num_prefills_ended) if num_prefills_ended else output

    def update(self, output: ModelRunnerOutput, result: StepResult | None = None) -> StepResult:
        """Apply a step's result: append tokens, end sequences. Results come in the order of their steps.

        Args:
            result: filled and returned; after an exception it has what was applied before it.
        """
        result = result or StepResult(step=output.step)
        self._in_flight.take(output, result)
        if self._constraints is not None:
            self._constraints.answered(output.step)
        if self.quarantine:
            for request in result.requests:
                self.quarantine.discard(request)
        return result

    def take_all(self) -> list[Request]:
        """The worker is lost: remove and return every unfinished sequence, in the order in which to run them again."""
        taken: dict[Request, None] = {}
        for request in (*self.running, *self.waiting):
            owners = [request] if request.beam_group is None else request.beam_group.sequences
            taken.update(dict.fromkeys(owners))
        taken.update(dict.fromkeys((*self.quarantine.take_all(), *self.parked)))
        self.parked.clear()
        requests = list(taken)
        for request in requests:
            request.forget_computed()
        self.running.clear()
        for request in list(self.waiting):
            self.waiting.remove(request)
        return requests

    def take_waiting(self) -> list[Request]:
        """Remove and return, in order, the waiting sequences of requests that have no other sequence here."""
        bound = {request.request_id for request in (*self.running, *self.parked, *self.quarantine)}
        bound |= {request.request_id for request in self.waiting if request.num_pending or request.beam_group}
        taken = [request for request in self.waiting if request.request_id not in bound]
        for request in taken:
            self.waiting.remove(request)
            self._leave_constraint(request)
            request.forget_computed()
        return taken

    def compact(self) -> None:
        """Give back memory that a burst has left fragmented; only while there are no unfinished requests."""
        if not self.has_unfinished_requests and not self.parked:
            self.waiting.compact()
            self.kv.compact()

    def forget_constraints(self) -> bool:
        """Let the worker drop constraints that are no longer needed, including those of ended sequences whose slots the
        next step reports; returns whether there were any. Only while idle."""
        if self.has_unfinished_requests or self.parked or self._in_flight:
            return False
        has_forgotten = self._constraints is not None and self._constraints.forget_idle()
        if has_forgotten:
            self._slots.tell()
        return has_forgotten

    def blame(self) -> list[Request]:
        """The worker is lost: count that against the sequences in flight and those whose constraints it was compiling.

        Returns sequences that crash their worker whenever they run. Call it before `take_all`.
        """
        return self._in_flight.blame([] if self._constraints is None else self._constraints.being_compiled)

    # The parts of one step.

    def _schedule_suspect(self, plan: StepPlan) -> None:
        """Schedule only the first suspect, one step at a time."""
        if self._in_flight:
            return
        suspect = self.quarantine.first
        if suspect.status is RequestStatus.WAITING:
            if self._constraints is not None and not self._constraints.is_ready_alone(suspect):
                return
            if self.adapters is not None and not self.adapters.can_run(suspect, is_alone=True):
                return
            while not (self._slots.has_free and self.kv.can_admit(suspect, self.kv.find_prefix(suspect))):
                self._preempt(self.running[-1])
            prefix = self.kv.find_prefix(suspect)
            self._admit(suspect, prefix, min(suspect.num_tokens - prefix.num_tokens, plan.budget), plan)
            return
        num_new = min(suspect.num_tokens - suspect.num_computed_tokens, plan.budget)
        while (blocks := self.kv.extend(suspect, suspect.num_computed_tokens + num_new)) is None:
            self._preempt(next(request for request in reversed(self.running) if request is not suspect))
        plan.add(suspect, num_new, blocks=blocks)

    def _schedule_running(self, plan: StepPlan) -> bool:
        """Schedule running sequences in order, preempting from the end when blocks run out.

        Returns whether sequences may be admitted: not after a preemption, because they would take the preempted one's
        place.
        """
        is_short, block_size, num_ahead_of = False, self.kv.block_size, self.speculation.num_ahead
        speculates = self.speculation.num_speculative_tokens > 0
        scheduled = plan.scheduled
        # Drafts use the rest of the budget after every running sequence has a token.
        spare = plan.budget - len(self.running)
        index = 0
        while index < len(self.running) and plan.budget > 0:
            request = self.running[index]
            index += 1
            computed, num_ahead = request.num_computed_tokens, 0
            num_new = request.num_tokens - computed
            if num_new == 0 or (request.num_pending and request.num_tokens >= request.max_num_tokens):
                continue  # its last token is in flight already
            if num_new == 1 and not speculates and computed % block_size:  # a decode within its last block
                scheduled[request] = 1
                plan.budget -= 1
                continue
            computed += request.num_lookahead  # at most, when the step runs
            if num_new == 1:
                if speculates and spare > 0:
                    num_ahead = num_ahead_of(request, min(spare, plan.budget - 1))
                    spare -= num_ahead
                if computed + num_ahead < len(request.block_ids) * block_size:  # the same with its drafts
                    scheduled[request] = 1
                    plan.budget -= 1 + num_ahead
                    if num_ahead:
                        plan.ahead[request] = num_ahead
                    continue
            else:
                num_new = self._chunks.size(request, request.num_computed_tokens, plan.budget)
                if num_new == 0:
                    continue
            num_tokens = min(computed + num_new, request.max_num_tokens)
            blocks = self.kv.extend(request, min(num_tokens + num_ahead, request.max_num_tokens)) if num_ahead else None
            if blocks is None:
                num_ahead = 0  # never preempt for a draft
            while blocks is None and (blocks := self.kv.extend(request, num_tokens)) is None:
                is_short = True
                victim = self._room.victim
                plan.drop(victim)
                index -= self.running.index(victim) < index
                self._preempt(victim)
                if victim is request:
                    break
            if blocks is not None:
                plan.add(request, num_new, num_ahead=num_ahead, blocks=blocks)
        return not is_short

    def _schedule_waiting(self, plan: StepPlan) -> None:
        """Admit waiting sequences while budget, slots and blocks last."""
        deferred: list[Request] = []
        adapters, num_without = self.adapters, 0
        while self.waiting.has_next and self._slots.has_free and plan.budget > 0:
            request = self.waiting.peek()
            if not self._has_constraint(request):
                self.waiting.set_aside(request)
                continue
            if request.num_pending or not plan.can_admit(request):
                break  # preempted while a step in flight samples its next token, which its new start must include
            # Blocks are copied before the step computes, so one whose leader enters a slot in it has to wait as well.
            if request.is_behind_leader or request.waits_for_siblings or request.leader in plan.admitted:
                self.waiting.set_aside(request)
                deferred.append(request)
                continue
            if adapters is not None:
                if not adapters.can_run(request):
                    num_without += 1
                    if num_without > MAX_WITHOUT_ADAPTER:
                        break
                    self.waiting.set_aside(request)
                    deferred.append(request)
                    continue
                if adapters.is_impatient:
                    break
            prefix = self.kv.find_prefix(request)
            num_new = self._chunks.size(request, prefix.num_tokens, plan.budget)
            watermark = self._watermark_blocks if self.running else 0
            if num_new == 0 or not self.kv.can_admit(request, prefix, watermark_blocks=watermark):
                break
            self.waiting.pop()
            self._admit(request, prefix, num_new, plan)
        for request in deferred:
            self.waiting.put_back(request)

    def _has_place(self, request: Request) -> bool:
        """Whether there are a slot and blocks for a waiting sequence."""
        prefix, watermark = self.kv.find_prefix(request), self._watermark_blocks
        return self._slots.has_free and self.kv.can_admit(request, prefix, watermark_blocks=watermark)

    def _has_constraint(self, request: Request) -> bool:
        """Whether the request's constraint is ready, so that no step waits for it."""
        return self._constraints is None or self._constraints.is_ready(request)

    def _is_prepared(self, request: Request) -> bool:
        """Whether the request's constraint and adapter are ready."""
        return self._has_constraint(request) and (self.adapters is None or self.adapters.can_run(request))

    def _leave_constraint(self, request: Request) -> None:
        if self._constraints is not None:
            self._constraints.leave(request)

    def _admit(self, request: Request, prefix: Prefix, num_new: int, plan: StepPlan) -> None:
        """Give a waiting sequence a slot, its prefix, and blocks for its first `num_new` tokens after that."""
        self.kv.admit(request, prefix)
        blocks = self.kv.extend(request, prefix.num_tokens + num_new)
        assert blocks is not None, "can_admit() promised these blocks"
        if request.num_preemptions == 0:
            request.first_cached_tokens = prefix.num_tokens
            request.admitted_ns = self._now_ns
        request.slot = self._slots.take()
        request.status = RequestStatus.RUNNING
        self.running.append(request)
        self._leave_constraint(request)
        if self.adapters is not None:
            self.adapters.admit(request)
        self.waiting.charge(request, num_new)
        # Found by the sequence that is admitted next, even within this step.
        self.kv.cache_computed(request, prefix.num_tokens + num_new)
        plan.admit(request, num_new, num_cached_tokens=prefix.num_tokens)

    def _advance(self, request: Request, num_scheduled: int) -> bool:
        """Count a scheduled chunk as computed; returns whether the step samples a token after it."""
        request.num_computed_tokens = computed = request.num_computed_tokens + num_scheduled
        is_last = computed == request.num_tokens
        if num_scheduled > 1 or not is_last:
            self.kv.cache_computed(request, computed)
            self.kv.trim(request, computed - 1)  # a sibling that shares the prompt runs its last token again
        if is_last:
            request.num_pending += 1
            request.num_tokens = computed + 1
        return is_last

    def _preempt(self, request: Request, *, at_front: bool = True) -> None:
        """Send a running sequence back to the queue; it will be recomputed, from cached prefixes if they are still
        there."""
        self.running.remove(request)
        self._release(request)
        request.status = RequestStatus.WAITING
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        if at_front:
            self.waiting.append_front(request)
        else:
            self.waiting.append_late(request)

    def _release(self, request: Request) -> None:
        self.kv.free(request)
        self._slots.release(request.slot, is_known=self._beams.forget(request))
        request.slot = -1
