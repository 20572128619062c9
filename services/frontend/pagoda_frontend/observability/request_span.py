"""The frontend's span of one engine request, a child of the API call's span."""

import time

from pagoda_common.engine.stream import EngineRequest
from pagoda_common.metrics.tracing import Span, Tracer, Value
from pagoda_common.params.outputs import SequenceDelta


class RequestSpan:
    """The span of one engine request, with vLLM's name and attributes."""

    def __init__(self, *, span: Span, request: EngineRequest, model_name: str) -> None:
        self._span = span
        self._request = request
        self._start_ns = time.time_ns()
        self._first_ns = 0
        self._num_tokens: dict[int, int] = {}
        self._queue_s: float | None = None
        params = request.sampling_params
        attributes: dict[str, Value] = {
            "gen_ai.request.id": request.request_id,
            "gen_ai.response.model": model_name,
            "gen_ai.request.n": params.n,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.usage.num_sequences": params.n,
            "gen_ai.usage.prompt_tokens": len(request.prompt_token_ids),
        }
        if params.max_tokens is not None:
            attributes["gen_ai.request.max_tokens"] = params.max_tokens
        span.set(attributes)

    def add(self, deltas: list[SequenceDelta]) -> None:
        """Note new tokens that are given to the client."""
        for delta in deltas:
            if delta.token_ids and not self._first_ns:
                self._first_ns = time.time_ns()
            self._num_tokens[delta.index] = delta.num_output_tokens
            if self._queue_s is None:
                self._queue_s = delta.queue_s

    def close(self, outcome: str, error: str = "") -> None:
        """End the span: the output is complete, the request was aborted, or it failed."""
        end_ns = time.time_ns()
        attributes: dict[str, Value] = {
            "gen_ai.usage.completion_tokens": sum(self._num_tokens.values()),
            "gen_ai.latency.e2e": (end_ns - self._start_ns) / 1e9,
        }
        if self._queue_s is not None:
            attributes["gen_ai.latency.time_in_queue"] = self._queue_s
        if self._first_ns:
            first_s = (self._first_ns - self._start_ns) / 1e9
            attributes["gen_ai.latency.time_to_first_token"] = first_s
            attributes["gen_ai.latency.time_in_model_decode"] = (end_ns - self._first_ns) / 1e9
            if self._queue_s is not None:
                attributes["gen_ai.latency.time_in_model_prefill"] = max(0.0, first_s - self._queue_s)
            self._span.add("deliver", self._first_ns, end_ns, {"pagoda.outcome": outcome})
        self._span.set(attributes)
        if error:
            self._span.fail(error)
        self._span.end(end_ns)


def start_request_span(
    request: EngineRequest, *, tracer: Tracer, above: Span | None, model_name: str
) -> RequestSpan | None:
    """Begin the span of `request` and pass its trace on to the engine; None when it is not sampled.

    Args:
        above: span of the call; None begins a new trace.
    """
    span = tracer.start("llm_request") if above is None else above.start("llm_request") if above.is_sampled else None
    if span is None or not span.is_sampled:
        return None
    request.traceparent = span.traceparent
    return RequestSpan(span=span, request=request, model_name=model_name)
