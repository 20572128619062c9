"""Sinks of the scheduler's streams: write steps as SchedulerMessages for frontends, as TokenOutputs for stubs."""

import time
from collections.abc import Callable

import numpy as np

from pagoda.v1 import scheduler_pb2, types_pb2
from pagoda_common.engine.convert import FINISH_NUMBERS, column, error_to_proto
from pagoda_common.errors import PagodaError
from pagoda_scheduler.beams.beam_group import BeamGroup
from pagoda_scheduler.core.request import Request
from pagoda_scheduler.core.step import LogprobRows
from pagoda_scheduler.core.step_result import StepResult
from pagoda_scheduler.rpc.joined_steps import join_steps
from pagoda_scheduler.rpc.outbox import Outbox
from pagoda_scheduler.rpc.scheduler_state import SchedulerState

LOAD_PERIOD_NS = 50_000_000
"""Steps between load reports while sequences only continue: a report costs as much as the rest of the message."""


class SessionSink:
    """Encodes a frontend's share of each step as one SchedulerMessage."""

    def __init__(self, *, state: SchedulerState, on_room: Callable[["SessionSink"], None]) -> None:
        """`on_room`: called when the frontend was too slow and has caught up."""
        self.outbox: Outbox[scheduler_pb2.SchedulerMessage] = Outbox(on_room=self._catch_up, join=join_steps)
        self.sequences: dict[int, Request] = {}
        """Open sequences by the frontend's slots."""
        self._state = state
        self._announced_model: types_pb2.ModelInfo | None = None
        self._announced_loras: scheduler_pb2.LoraList | None = None
        self._load_told_ns = 0
        self._on_room = on_room
        self._has_announcement = False
        """Kept until the frontend has caught up."""

    @property
    def is_behind(self) -> bool:
        """Whether the frontend is too slow: its sequences should be parked."""
        return self.outbox.is_full

    def _catch_up(self) -> None:
        self._on_room(self)
        if self._has_announcement:
            self.announce()

    def hello(self, version: str) -> None:
        """First message of the stream."""
        message = self._message(step=0)
        message.hello.version = version
        message.hello.takes_acknowledgements = True
        self.outbox.put(message)

    def announce(self) -> None:
        """Send load and model outside of a step."""
        self._has_announcement = self.is_behind
        if not self._has_announcement:
            self.outbox.put(self._message(step=0))

    def close(self, error: PagodaError) -> None:
        """End the stream."""
        self.outbox.close(error)

    def reject(self, request_id: str, error: PagodaError) -> None:
        """Refuse a request."""
        message = self._message(step=0)
        message.rejected.add(request_id=request_id, error=error_to_proto(error))
        self.outbox.put(message)

    def push(self, result: StepResult) -> None:
        """Send one step's tokens."""
        requests = result.requests
        goes_on = requests and not result.admitted and not result.finished
        is_load_due = not goes_on or time.monotonic_ns() - self._load_told_ns >= LOAD_PERIOD_NS
        message = self._message(step=result.step, has_load=is_load_due)
        if requests:
            message.slots = column([request.session_slot for request in requests], "<u4")
            message.offsets = column(result.offsets, "<u4")
            message.token_ids = column(result.token_ids, "<u4")
        for request in result.admitted:
            message.admitted.add(
                slot=request.session_slot,
                num_cached_tokens=request.num_cached_tokens,
                queue_ns=max(0, request.admitted_ns - request.arrival_ns),
            )
        for request in result.finished:
            message.finished.append(_finished_to_proto(request))
            self.sequences.pop(request.session_slot, None)
        if result.finished and not self.sequences:
            self.sequences.clear()  # an empty table keeps its largest size
        if result.logprobs is not None:
            picked = pick_rows(result.logprobs, result.rows)
            if len(picked.rows):
                message.logprobs.CopyFrom(_logprobs_to_proto(picked))
        for request, chunk in result.prompt_logprobs:
            columns = _logprobs_to_proto(chunk.logprobs)
            message.prompt_logprobs.add(slot=request.session_slot, start=chunk.start, logprobs=columns)
        self.outbox.put(message)

    def _message(self, *, step: int, has_load: bool = True) -> scheduler_pb2.SchedulerMessage:
        state = self._state
        message = scheduler_pb2.SchedulerMessage(session_epoch=state.session_epoch, step=step)
        if has_load:
            message.load.CopyFrom(state.load())
            self._load_told_ns = time.monotonic_ns()
        if state.model_info is not self._announced_model and state.model_info is not None:
            self._announced_model = state.model_info
            message.model_info.CopyFrom(state.model_info)
        if state.loras is not self._announced_loras and state.loras is not None:
            self._announced_loras = state.loras
            message.loras.CopyFrom(state.loras)
        return message


class GenerateSink:
    """Encodes one request's tokens as TokenOutputs; the stream ends with its last sequence."""

    def __init__(self, *, num_sequences: int, on_room: Callable[["GenerateSink"], None]) -> None:
        """`on_room`: called when the client was too slow and has caught up."""
        self.outbox: Outbox[scheduler_pb2.TokenOutput] = Outbox(on_room=lambda: on_room(self))
        self._num_open = num_sequences

    @property
    def is_behind(self) -> bool:
        """Whether the client is too slow."""
        return self.outbox.is_full

    def announce(self) -> None:
        """No-op: the stream reports nothing outside of a step."""

    def close(self, error: PagodaError) -> None:
        """End the stream."""
        self.outbox.close(error)

    def push(self, result: StepResult) -> None:
        """Send one step's tokens."""
        outputs: dict[Request, scheduler_pb2.TokenOutput] = {}
        for request in (*result.requests, *result.finished):
            outputs.setdefault(request, scheduler_pb2.TokenOutput(index=request.index))
        logprobs = _sampled_logprobs(result)
        for position, request in enumerate(result.requests):
            output = outputs[request]
            if not output.token_ids:
                output.offset = result.offsets[position]
            output.token_ids.append(result.token_ids[position])
            if result.rows[position] in logprobs:
                output.logprobs.append(logprobs[result.rows[position]])
        for request in result.admitted:
            outputs[request].num_cached_tokens = request.num_cached_tokens
        failed: PagodaError | None = None
        for request in result.finished:
            output, finished = outputs[request], _finished_to_proto(request)
            output.finish_reason = finished.finish_reason
            output.embedding = finished.embedding
            if finished.HasField("stop_token_id"):
                output.stop_token_id = finished.stop_token_id
            if not output.token_ids:
                output.offset = finished.num_output_tokens
            failed = failed or request.error
        for output in outputs.values():
            self.outbox.put(output)
        self._num_open -= len(result.finished)
        if failed is not None or self._num_open == 0:
            self.outbox.close(failed)


def pick_rows(logprobs: LogprobRows, rows: list[int]) -> LogprobRows:
    """The rows of `logprobs` that are in `rows`, renumbered by their position there."""
    positions = {row: position for position, row in enumerate(rows)}
    keep = [index for index, row in enumerate(logprobs.rows.tolist()) if row in positions]
    ends = np.cumsum(logprobs.counts, dtype=np.int64)
    spans = [np.arange(ends[index] - int(logprobs.counts[index]), ends[index]) for index in keep]
    entries = np.concatenate(spans) if spans else np.zeros(0, dtype=np.int64)
    return LogprobRows(
        rows=np.array([positions[int(logprobs.rows[index])] for index in keep], dtype=np.uint32),
        counts=logprobs.counts[keep],
        token_ids=logprobs.token_ids[entries],
        logprobs=logprobs.logprobs[entries],
        sampled_ranks=logprobs.sampled_ranks[keep],
    )


def _sampled_logprobs(result: StepResult) -> dict[int, float]:
    """Log probability of the sampled token by worker row."""
    if result.logprobs is None:
        return {}
    counts = result.logprobs.counts.astype(np.int64)
    starts = np.cumsum(counts) - counts
    return dict(zip(result.logprobs.rows.tolist(), result.logprobs.logprobs[starts].tolist(), strict=True))


def _logprobs_to_proto(logprobs: LogprobRows) -> types_pb2.LogprobColumns:
    return types_pb2.LogprobColumns(
        rows=logprobs.rows.astype("<u4").tobytes(),
        counts=logprobs.counts.astype("<u4").tobytes(),
        token_ids=logprobs.token_ids.astype("<u4").tobytes(),
        logprobs=logprobs.logprobs.astype("<f4").tobytes(),
        sampled_ranks=logprobs.sampled_ranks.astype("<u4").tobytes(),
    )


def _finished_to_proto(request: Request) -> scheduler_pb2.FinishedSequence:
    assert request.finish_reason is not None
    finished = scheduler_pb2.FinishedSequence(
        slot=request.session_slot,
        finish_reason=FINISH_NUMBERS[request.finish_reason],
        num_output_tokens=len(request.output_token_ids),
        num_preemptions=request.num_preemptions,
        embedding=request.embedding,
    )
    if request.stop_token_id is not None:
        finished.stop_token_id = request.stop_token_id
    group = request.beam_group
    hypothesis = group.hypothesis_of(request) if isinstance(group, BeamGroup) else None
    if hypothesis is not None:
        finished.hypothesis.cumulative_logprob = hypothesis.log_probability
        finished.hypothesis.logprobs.extend(hypothesis.logprobs)
        finished.hypothesis.ranks.extend(hypothesis.ranks)
    if request.error is not None:
        finished.error.CopyFrom(error_to_proto(request.error))
    return finished
