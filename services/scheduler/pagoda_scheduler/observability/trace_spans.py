"""Makes the spans of an ended request from recorded timestamps: submit, queue, prefill chunks, decode."""

from pagoda_common.metrics.tracing import Span, Tracer, Value
from pagoda_scheduler.core.step import StepTimings
from pagoda_scheduler.observability.traces import PrefillChunk, RequestTrace


class SpanMaker:
    """Makes a sequence's spans at its end."""

    def __init__(self, *, tracer: Tracer, has_details: bool) -> None:
        """`has_details`: add a span for the worker's part of each chunk."""
        self._tracer = tracer
        self._has_details = has_details

    def __call__(self, trace: RequestTrace) -> None:
        """Send `trace` to the collector, as children of the frontend's span."""
        request = trace.request
        arrival_ns = min(request.arrival_ns or trace.submitted_ns, trace.submitted_ns)
        whole = self._tracer.start(
            "engine_request",
            traceparent=trace.traceparent,
            start_ns=arrival_ns,
            attributes={
                "gen_ai.request.id": request.request_id,
                "gen_ai.usage.prompt_tokens": request.num_prompt_tokens,
                "gen_ai.usage.completion_tokens": len(request.output_token_ids),
                "pagoda.sequence.index": request.index,
                "pagoda.request.attempt": request.attempt,
                "pagoda.usage.cached_tokens": request.num_cached_tokens,
                "pagoda.num_preemptions": request.num_preemptions,
                "pagoda.finish_reason": request.finish_reason or "dropped",
            },
        )
        whole.add("submit", arrival_ns, trace.submitted_ns)
        admitted_ns = request.admitted_ns or trace.end_ns
        waited_s = max(0, admitted_ns - trace.submitted_ns) / 1e9
        whole.add("queue", trace.submitted_ns, admitted_ns, {"gen_ai.latency.time_in_queue": waited_s})
        for number, chunk in enumerate(trace.chunks):
            self._add_chunk(whole, number, chunk, trace.end_ns)
        if trace.first_token_ns:
            self._add_decode(whole, trace)
        for name, at_ns in trace.events:
            whole.event(name, at_ns)
        if request.error is not None:
            whole.fail(request.error.message)
        whole.end(trace.end_ns)

    def _add_chunk(self, whole: Span, number: int, chunk: PrefillChunk, end_ns: int) -> None:
        attributes: dict[str, Value] = {
            "pagoda.chunk": number,
            "pagoda.step": chunk.step,
            "pagoda.num_tokens": chunk.num_tokens,
            "pagoda.is_answered": bool(chunk.end_ns),
        }
        span = whole.add("prefill", chunk.start_ns, chunk.end_ns or end_ns, attributes)
        if self._has_details and chunk.timings is not None:
            _add_worker(span, chunk, chunk.timings)

    def _add_decode(self, whole: Span, trace: RequestTrace) -> None:
        request = trace.request
        num_tokens = len(request.output_token_ids)
        spent_s = max(0, trace.end_ns - trace.first_token_ns) / 1e9
        attributes: dict[str, Value] = {
            "gen_ai.usage.completion_tokens": num_tokens,
            "gen_ai.latency.time_in_model_decode": spent_s,
        }
        if num_tokens > 1:
            attributes["pagoda.time_per_output_token"] = spent_s / (num_tokens - 1)
        whole.add("decode", trace.first_token_ns, trace.end_ns, attributes)


def _add_worker(span: Span, chunk: PrefillChunk, timings: StepTimings) -> None:
    """The worker's part of a chunk, estimated without the worker's clock: the answer took half of the wire time."""
    spent_ns = timings.queue_ns + timings.compute_ns
    end_ns = max(chunk.start_ns, chunk.end_ns - timings.decode_ns - timings.wire_ns // 2)
    start_ns = max(chunk.start_ns, end_ns - spent_ns)
    attributes: dict[str, Value] = {
        "pagoda.worker.queue": timings.queue_ns / 1e9,
        "pagoda.worker.prepare": timings.prepare_ns / 1e9,
        "gen_ai.latency.time_in_model_forward": timings.forward_ns / 1e9,
        "gen_ai.latency.time_in_model_execute": spent_ns / 1e9,
        "pagoda.worker.sample": timings.sample_ns / 1e9,
    }
    span.add("worker", start_ns, end_ns, attributes)
