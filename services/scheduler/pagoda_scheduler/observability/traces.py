"""Records timestamps of requests whose trace is sampled.

No OpenTelemetry, no gRPC. Requests that are not sampled are not kept; without sampled ones, a step costs one test.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from pagoda_scheduler.core.request import Request
from pagoda_scheduler.core.step import ModelRunnerOutput, SchedulerOutput, StepTimings
from pagoda_scheduler.observability.timeline import Timeline


@dataclass(slots=True)
class PrefillChunk:
    """A part of a prompt in one step. Times are Unix nanoseconds."""

    step: int
    start_ns: int
    num_tokens: int
    """Computed tokens, without cached ones."""
    is_last: bool
    """Whether the step samples a token after the chunk."""
    end_ns: int = 0
    """0: the step was never answered."""
    timings: StepTimings | None = None


@dataclass(slots=True)
class RequestTrace:
    """The timestamps of one sequence, until its spans are made."""

    request: Request
    traceparent: str
    """The frontend's span."""
    submitted_ns: int
    """Time at which the scheduler accepted it."""
    chunks: list[PrefillChunk] = field(default_factory=list)
    events: list[tuple[str, int]] = field(default_factory=list)
    """Its events and their times."""
    first_token_ns: int = 0
    end_ns: int = 0
    num_computed: int = 0
    """Number of computed tokens after the last step."""
    num_preemptions: int = 0
    target: int = 0
    """Number of tokens to compute at its last admission; further tokens are decoding."""


class Traces:
    """Open traces of one scheduler."""

    def __init__(self, *, on_end: Callable[[RequestTrace], None]) -> None:
        self._on_end = on_end
        self._open: dict[Request, RequestTrace] = {}

    def __len__(self) -> int:
        return len(self._open)

    def begin(self, requests: Iterable[Request], traceparent: str) -> None:
        """Follow these sequences."""
        now_ns = time.time_ns()
        for request in requests:
            self._open[request] = RequestTrace(request, traceparent, now_ns)

    def end(self, requests: Iterable[Request]) -> None:
        """These sequences have ended; unknown ones are ignored."""
        for request in requests:
            trace = self._open.pop(request, None)
            if trace is not None:
                trace.end_ns = time.time_ns()
                self._on_end(trace)

    def lose(self, requests: Iterable[Request]) -> None:
        """The worker of these sequences is lost, with all that was computed."""
        for request in requests:
            if (trace := self._open.get(request)) is not None:
                trace.events.append(("worker lost", time.time_ns()))
                trace.num_computed = 0

    def forget(self, requests: Iterable[Request]) -> None:
        """These sequences were not accepted."""
        for request in requests:
            self._open.pop(request, None)

    def scheduled(self, step: int) -> list[tuple[RequestTrace, PrefillChunk]]:
        """A step was just decided: record its prompt chunks."""
        now_ns, found = time.time_ns(), []
        for trace in self._open.values():
            request = trace.request
            computed = request.num_computed_tokens
            if request.num_preemptions > trace.num_preemptions:
                trace.events.append(("preempted", now_ns))
                trace.num_computed, trace.num_preemptions = 0, request.num_preemptions
            if computed == trace.num_computed:
                continue
            if not trace.num_computed:
                trace.target = request.num_known_tokens
                trace.num_computed = request.first_cached_tokens if not trace.chunks else 0
            if trace.num_computed < trace.target:
                num_tokens = computed - trace.num_computed
                chunk = PrefillChunk(step, now_ns, num_tokens, is_last=request.num_pending > 0)
                trace.chunks.append(chunk)
                found.append((trace, chunk))
            trace.num_computed = computed
        return found


class TracedTimeline(Timeline):
    """The timeline of one worker group, which also records its steps in traces."""

    def __init__(self, *, inner: Timeline, traces: Traces) -> None:
        self._inner = inner
        self._traces = traces
        self._in_flight: dict[int, list[tuple[RequestTrace, PrefillChunk]]] = {}

    def scheduled(self, output: SchedulerOutput, schedule_ns: int) -> None:
        """A step was decided in `schedule_ns` nanoseconds."""
        self._inner.scheduled(output, schedule_ns)
        if self._traces and (found := self._traces.scheduled(output.step)):
            self._in_flight[output.step] = found

    def answered(self, output: ModelRunnerOutput) -> None:
        """A step's result has arrived; it is applied and delivered next."""
        self._inner.answered(output)
        if self._in_flight:
            now_ns = time.time_ns()
            for trace, chunk in self._in_flight.pop(output.step, ()):
                chunk.end_ns, chunk.timings = now_ns, output.timings
                if chunk.is_last and not trace.first_token_ns:
                    trace.first_token_ns = now_ns

    def delivered(self, output: ModelRunnerOutput, deliver_ns: int) -> None:
        """A step's result was applied and delivered in `deliver_ns` nanoseconds."""
        self._inner.delivered(output, deliver_ns)
