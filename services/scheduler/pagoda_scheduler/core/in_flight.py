"""InFlight: keeps steps until they are answered, and applies their results to sequences. No policy, no tensors, no
gRPC."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from pagoda_common.errors import Code, PagodaError, RequestFailed
from pagoda_scheduler.beams.running_beams import Beams
from pagoda_scheduler.core.quarantine import MAX_CRASHES
from pagoda_scheduler.core.request import Request, RequestStatus
from pagoda_scheduler.core.speculation import Speculation
from pagoda_scheduler.core.step import BadSlot, ModelRunnerOutput, SchedulerOutput
from pagoda_scheduler.core.step_result import StepResult
from pagoda_scheduler.kv.kv_cache_manager import KVCacheManager
from pagoda_scheduler.kv.swap_cost import SwapCost

OUTPUT_TOKEN_COST = 2
"""Service units of an output token in the fair policy; a prompt token counts 1."""


class _Flight(NamedTuple):
    """The rows of a step that was sent and not answered."""

    step: int
    requests: list[Request]
    slots: list[int]
    """Slots when the step was sent; a sequence may have lost its slot since."""
    samples: list[bool]
    """Whether the row samples tokens."""
    num_tokens: int
    """Tokens in the batch, without drafts."""
    lookahead: list[int] | None
    """Maximum draft tokens of each row; None: no drafts."""


class InFlight:
    """The steps in flight of one scheduler, oldest first. Results come in the order of their steps."""

    def __init__(
        self,
        *,
        kv: KVCacheManager,
        beams: Beams,
        speculation: Speculation,
        finish: Callable[[Request], None],
        took: Callable[[int, int], None],
        charge: Callable[[Request, int], None] | None = None,
        swap_cost: SwapCost | None = None,
    ) -> None:
        """`finish` ends a sequence; `took` gets each step's tokens and nanoseconds; `charge` counts service to a
        tenant; `swap_cost` learns from step times."""
        self._kv = kv
        self._beams = beams
        self._speculation = speculation
        self._finish = finish
        self._took = took
        self._charge = charge
        self._swap_cost = swap_cost
        self._flights: deque[_Flight] = deque()

    def __len__(self) -> int:
        return len(self._flights)

    def __iter__(self) -> Iterator[Request]:
        """Every sequence of every step; a sequence in several steps is repeated."""
        return (request for flight in self._flights for request in flight.requests)

    def blame(self, others: Iterable[Request] = ()) -> list[Request]:
        """Count the loss of the worker against the sequences in flight and `others`, for which it worked outside of
        steps. Returns the sequences with more than MAX_CRASHES: the last one happened while they ran alone."""
        in_flight: dict[Request, None] = {}
        for request in (*self, *others):
            if not request.is_finished:
                owners = [request] if request.beam_group is None else request.beam_group.sequences
                in_flight.update(dict.fromkeys(owners))
        for request in in_flight:
            request.num_crashes += 1
        return [request for request in in_flight if request.num_crashes > MAX_CRASHES]

    def add(self, output: SchedulerOutput, requests: list[Request], samples: list[bool]) -> None:
        """A step is sent; `samples`: which of its rows sample."""
        lookahead = output.num_lookahead_tokens
        self._flights.append(_Flight(output.step, requests, output.slots, samples, output.num_tokens, lookahead))

    def take(self, output: ModelRunnerOutput, result: StepResult) -> None:
        """Apply the oldest step's result: append tokens, end sequences. After an exception, `result` has what was
        applied before it."""
        flight = self._flights[0]  # removed only when fully applied: a failure before that counts against its sequences
        assert output.step == flight.step, f"result of step {output.step}, expected {flight.step}"
        result.logprobs = output.logprobs
        self._take_prompt_logprobs(flight, output, result)
        if output.timings is not None:
            self._took(flight.num_tokens, output.timings.compute_ns)
        self._weigh_swapping(flight, output)
        if output.num_sampled_tokens is None and not output.bad_slots and flight.lookahead is None:
            self._take_one_each(flight, output, result)
        else:
            self._take_mixed(flight, output, result)
        if output.num_draft_tokens is not None:
            self._speculation.count(output.num_draft_tokens, output.num_sampled_tokens)
        self._flights.popleft()

    def _take_one_each(self, flight: _Flight, output: ModelRunnerOutput, result: StepResult) -> None:
        """Apply a step with one token for every sequence, as most steps are."""
        tokens, finished, block_size = output.token_ids, RequestStatus.FINISHED, self._kv.block_size
        is_plain = self._charge is None
        rows: list[int] = []
        try:
            for row, request in enumerate(flight.requests):
                if request.status is finished:
                    continue
                token_id = tokens[row]
                if request.is_beam:
                    self._beams.advance(request, token_id, row, result.logprobs, result)
                    continue
                num_known = request.num_tokens - request.num_pending
                if (
                    is_plain
                    and request.is_announced
                    and num_known % block_size
                    and num_known + 1 < request.max_num_tokens
                    and token_id not in request.end_token_ids
                ):  # _append would do nothing for this token
                    request.output_token_ids.append(token_id)
                    request.num_pending -= 1
                    request.num_crashes = 0
                else:
                    self._append(request, token_id, result)
                rows.append(row)
        finally:
            result.add_last_tokens(flight.requests, rows, tokens)

    def _take_mixed(self, flight: _Flight, output: ModelRunnerOutput, result: StepResult) -> None:
        """Apply a step with prompt chunks, failures, or drafts: no token for some sequences, several for others."""
        bad = {bad_slot.slot: bad_slot for bad_slot in output.bad_slots}
        counts, tokens, row = output.num_sampled_tokens, output.token_ids, 0
        for index, request in enumerate(flight.requests):
            count = 1 if counts is None else counts[index]
            if request.is_finished:
                pass  # aborted or ended while the step was in flight
            elif flight.slots[index] in bad:
                self._fail(request, bad[flight.slots[index]], result)
            elif request.pooling is not None:
                if flight.samples[index]:
                    self._take_embedding(request, (output.pooled or {}).get(flight.slots[index]), result)
            elif flight.samples[index]:
                num_ahead = 0 if flight.lookahead is None else flight.lookahead[index]
                if not 1 <= count <= 1 + num_ahead:
                    wanted = "1" if not num_ahead else f"1 to {1 + num_ahead}"
                    raise PagodaError(f"step {output.step}: {request!r} got {count} tokens, expected {wanted}")
                if request.is_beam:
                    self._beams.advance(request, tokens[row], row, result.logprobs, result)
                else:
                    request.settle(num_accepted=count - 1, num_ahead=num_ahead)
                    for place in range(row, row + count):
                        self._append(request, tokens[place], result)
                        result.add_token(request, tokens[place], place)
                        if request.is_finished:
                            break  # tokens sampled after the end are dropped
            row += count

    def _take_embedding(self, request: Request, embedding: bytes | None, result: StepResult) -> None:
        """End a pooled sequence, whose whole prompt is computed."""
        request.num_tokens -= request.num_pending
        request.num_pending = 0
        if embedding is None:
            self._fail(request, BadSlot(request.slot, Code.INTERNAL, "the worker has given no embedding"), result)
            return
        if not request.is_announced:
            request.is_announced = True
            result.admitted.append(request)
        request.embedding, request.finish_reason = embedding, "stop"
        self._finish(request)
        result.finished.append(request)

    def _take_prompt_logprobs(self, flight: _Flight, output: ModelRunnerOutput, result: StepResult) -> None:
        if output.prompt_logprobs:
            by_slot = dict(zip(flight.slots, flight.requests, strict=True))
            chunks = ((by_slot[chunk.slot], chunk) for chunk in output.prompt_logprobs)
            result.prompt_logprobs = [(request, chunk) for request, chunk in chunks if not request.is_finished]

    def _weigh_swapping(self, flight: _Flight, output: ModelRunnerOutput) -> None:
        if self._swap_cost is not None and output.timings is not None:
            num_tokens = flight.num_tokens + sum(output.num_draft_tokens or ())
            is_cheaper = self._swap_cost.add(forward_ns=output.timings.forward_ns, num_tokens=num_tokens)
            if is_cheaper is not None:
                self._kv.is_swap_cheaper = is_cheaper

    def _append(self, request: Request, token_id: int, result: StepResult) -> None:
        """Commit a sampled token. Runs once per token of every sequence, so rare cases are tested last."""
        if self._charge is not None:
            self._charge(request, OUTPUT_TOKEN_COST)
        if not request.is_announced:
            request.is_announced = True
            result.admitted.append(request)
        request.output_token_ids.append(token_id)
        request.num_pending -= 1
        request.num_crashes = 0
        num_known = request.num_tokens - request.num_pending
        if (token_id in request.end_token_ids or num_known >= request.max_num_tokens) and request.check_finished():
            self._finish(request)
            result.finished.append(request)
        elif (num_known - 1) % self._kv.block_size == 0 and request.status is RequestStatus.RUNNING:
            self._kv.cache_computed(request, num_known - 1)  # everything before the new token is in the cache

    def _fail(self, request: Request, bad_slot: BadSlot, result: StepResult) -> None:
        """End a sequence that the worker could not compute; its blocks may hold garbage."""
        self._kv.forget(request)
        for sequence in [request] if request.beam_group is None else request.beam_group.sequences:
            sequence.finish_reason = "error"
            sequence.error = RequestFailed(bad_slot.message, field=bad_slot.field or None, code=Code(bad_slot.code))
            self._finish(sequence)
            result.finished.append(sequence)
