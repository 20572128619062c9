"""Prometheus metrics under vLLM's names, so that dashboards and autoscalers for vLLM work. One registry per app."""

import time
from collections.abc import Callable, Iterator, Sequence

from prometheus_client import (
    CollectorRegistry,
    Counter,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pagoda_common.engine.interface import Engine
from pagoda_common.metrics.labels import ENGINE, LABELS
from pagoda_common.metrics.lean_histogram import HistogramSeries, LeanHistogram
from pagoda_common.params.outputs import SequenceDelta
from pagoda_frontend.observability.history import Latencies

QUEUE_BOUNDS = ("max_num_queued_reqs", "max_num_queued_tokens", "max_queued_share")
"""Reasons of admission_rejections."""
PROMPT_SOURCES = ("local_compute", "local_cache_hit")
"""Sources of prompt_tokens_by_source."""
FINISHED_REASONS = ("stop", "length", "abort", "error")
_FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_PER_TOKEN_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)


def one_two_five(bound: int) -> list[float]:
    """1, 2, 5, 10, … up to `bound`."""
    buckets = [float(m * 10**e) for e in range(len(str(bound))) for m in (1, 2, 5) if m * 10**e <= bound]
    return buckets or [1.0]


class ConnectionCollector(Collector):
    """Whether the scheduler is connected, and how often it was lost."""

    def __init__(self, *, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """Called for every scrape."""
        connected = self._engine.is_connected
        yield GaugeMetricFamily(
            "pagoda:scheduler_connected", "Whether the scheduler is connected: 0 or 1.", value=int(connected)
        )
        lost = self._engine.num_losses
        yield CounterMetricFamily("pagoda:scheduler_losses", "Lost connections to the scheduler.", value=lost)


class RequestMetrics:
    """Token counts and durations of requests."""

    def __init__(self, *, registry: CollectorRegistry, model_name: str, max_model_len: int) -> None:
        labels = (model_name, ENGINE)
        lengths = one_two_five(max_model_len)

        def counter(name: str, text: str) -> Counter:
            return Counter(f"vllm:{name}", text, LABELS, registry=registry).labels(*labels)

        def histogram(name: str, text: str, buckets: Sequence[float]) -> HistogramSeries:
            return LeanHistogram(f"vllm:{name}", text, LABELS, buckets=buckets, registry=registry).labels(*labels)

        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of requests with a first token or an embedding.")
        self.generation_tokens = counter("generation_tokens", "Tokens generated.")
        success = Counter("vllm:request_success", "Sequences ended.", (*LABELS, "finished_reason"), registry=registry)
        self.success = {reason: success.labels(*labels, reason) for reason in FINISHED_REASONS}
        self.first_token_s = histogram("time_to_first_token_seconds", "Time to first token.", _FIRST_TOKEN_S)
        self.between_tokens_s = histogram("inter_token_latency_seconds", "Time between tokens.", _PER_TOKEN_S)
        self.per_output_token_s = histogram(
            "request_time_per_output_token_seconds", "Mean time between a sequence's tokens.", _PER_TOKEN_S
        )
        self.request_s = histogram("e2e_request_latency_seconds", "Time from arrival to end.", _REQUEST_S)
        self.queue_s = histogram("request_queue_time_seconds", "Time in the waiting queue.", _REQUEST_S)
        self.prefill_s = histogram("request_prefill_time_seconds", "Time from admission to first token.", _REQUEST_S)
        self.decode_s = histogram("request_decode_time_seconds", "Time from first to last token.", _REQUEST_S)
        self.inference_s = histogram("request_inference_time_seconds", "Time from admission to end.", _REQUEST_S)
        self.request_prompt_tokens = histogram("request_prompt_tokens", "Prompt tokens of a request.", lengths)
        self.request_generation_tokens = histogram("request_generation_tokens", "Tokens of a sequence.", lengths)
        self.request_max_num_generation_tokens = histogram(
            "request_max_num_generation_tokens", "Tokens of a request's longest sequence.", lengths
        )
        self.prefill_kv_computed_tokens = histogram(
            "request_prefill_kv_computed_tokens", "Prompt tokens that were not found in the cache.", lengths
        )
        self.prompt_tokens_cached = counter("prompt_tokens_cached", "Prompt tokens found in the cache.")
        text = "Prompt tokens: computed, or found in the cache."
        by_source = Counter("vllm:prompt_tokens_by_source", text, (*LABELS, "source"), registry=registry)
        self.prompt_tokens_by_source = {source: by_source.labels(*labels, source) for source in PROMPT_SOURCES}
        rejections = Counter(
            "vllm:admission_rejections",
            "Requests refused because of a limit on waiting requests.",
            (LABELS[0], "reason"),
            registry=registry,
        )
        self.rejections = {bound: rejections.labels(model_name, bound) for bound in QUEUE_BOUNDS}
        self.request_num_preemptions = histogram(
            "request_num_preemptions", "Preemptions of a sequence.", (1, 2, 3, 4, 5, 10, 20)
        )
        self.params_n = histogram("request_params_n", "n of a request.", (1, 2, 5, 10, 20))
        self.params_max_tokens = histogram("request_params_max_tokens", "max_tokens of a request.", lengths)


class RequestTimer:
    """Follows one engine request and records it: tokens as they come, the rest when its sequences end."""

    def __init__(self, *, metrics: RequestMetrics, num_prompt_tokens: int, n: int, max_tokens: int | None) -> None:
        self._metrics = metrics
        self._num_prompt_tokens = num_prompt_tokens
        self._arrival_s = time.perf_counter()
        self._first_s: dict[int, float] = {}
        self._last_s: dict[int, float] = {}
        self._open = n
        self._longest = 0
        metrics.params_n.observe(n)
        if max_tokens is not None:
            metrics.params_max_tokens.observe(max_tokens)

    def add(self, deltas: list[SequenceDelta]) -> None:
        """Record new tokens and ends."""
        now_s = time.perf_counter()
        metrics = self._metrics
        num_tokens = 0
        for delta in deltas:
            count = len(delta.token_ids)
            if delta.embedding is not None:
                self._count_prompt(delta.num_cached_tokens)
            if count:
                num_tokens += count
                last_s = self._last_s.get(delta.index)
                if last_s is None:
                    if not self._first_s:
                        self._count_prompt(delta.num_cached_tokens)
                    self._first_s[delta.index] = now_s
                    metrics.first_token_s.observe(now_s - self._arrival_s)
                else:
                    gap_s = (now_s - last_s) / count
                    for _ in range(count):
                        metrics.between_tokens_s.observe(gap_s)
                self._last_s[delta.index] = now_s
            if delta.finish_reason is not None:
                self._end(delta, delta.finish_reason, now_s)
        if num_tokens:
            metrics.generation_tokens.inc(num_tokens)

    def _count_prompt(self, num_cached_tokens: int) -> None:
        metrics = self._metrics
        metrics.prompt_tokens.inc(self._num_prompt_tokens)
        metrics.prompt_tokens_cached.inc(num_cached_tokens)
        metrics.prompt_tokens_by_source["local_compute"].inc(self._num_prompt_tokens - num_cached_tokens)
        metrics.prompt_tokens_by_source["local_cache_hit"].inc(num_cached_tokens)

    def close(self, reason: str) -> None:
        """Record the sequences that did not end by themselves."""
        for _ in range(self._open):
            self._metrics.success[reason].inc()
        self._open = 0

    def _end(self, delta: SequenceDelta, reason: str, now_s: float) -> None:
        metrics = self._metrics
        first_s = self._first_s.get(delta.index, now_s)
        num_output_tokens = delta.num_output_tokens
        self._open -= 1
        self._longest = max(self._longest, num_output_tokens)
        if self._open == 0:
            metrics.request_max_num_generation_tokens.observe(self._longest)
        if delta.queue_s is not None:  # None: it ended before it was admitted
            admitted_s = self._arrival_s + delta.queue_s
            metrics.queue_s.observe(delta.queue_s)
            metrics.prefill_s.observe(max(0.0, first_s - admitted_s))
            metrics.decode_s.observe(now_s - first_s)
            metrics.inference_s.observe(max(0.0, now_s - admitted_s))
            metrics.prefill_kv_computed_tokens.observe(self._num_prompt_tokens - delta.num_cached_tokens)
        metrics.success[reason].inc()
        metrics.request_s.observe(now_s - self._arrival_s)
        metrics.request_prompt_tokens.observe(self._num_prompt_tokens)
        metrics.request_generation_tokens.observe(num_output_tokens)
        metrics.request_num_preemptions.observe(delta.num_preemptions)
        if num_output_tokens > 1:
            metrics.per_output_token_s.observe((now_s - first_s) / (num_output_tokens - 1))


class Metrics:
    """The registry of one frontend. Request metrics exist as soon as the model is known: their labels name it."""

    def __init__(self, *, engine: Engine, engine_collector: Callable[[str], Collector]) -> None:
        """`engine_collector`: makes the collector of the engine's load for a model's name."""
        self._engine = engine
        self._engine_collector = engine_collector
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        GCCollector(registry=self._registry)
        self._registry.register(ConnectionCollector(engine=engine))
        self._requests: RequestMetrics | None = None

    def set_model(self, *, model_name: str, max_model_len: int) -> None:
        """Begin to record; called once."""
        self._registry.register(self._engine_collector(model_name))
        self._requests = RequestMetrics(registry=self._registry, model_name=model_name, max_model_len=max_model_len)

    def timer(self, *, num_prompt_tokens: int, n: int, max_tokens: int | None) -> RequestTimer:
        """A timer for a request that arrives now. The model is known."""
        assert self._requests is not None
        return RequestTimer(metrics=self._requests, num_prompt_tokens=num_prompt_tokens, n=n, max_tokens=max_tokens)

    def count_rejection(self, message: str) -> None:
        """Count a request that the scheduler refused; the message names the bound that it would exceed."""
        if self._requests is not None:
            for bound, counter in self._requests.rejections.items():
                if bound in message:
                    counter.inc()

    def token_totals(self) -> tuple[float, float]:
        """Prompt tokens and generated tokens so far."""
        if self._requests is None:
            return 0.0, 0.0
        # The library shows a counter's value to its collectors alone.
        return self._requests.prompt_tokens._value.get(), self._requests.generation_tokens._value.get()

    def latencies(self) -> tuple[Latencies, Latencies]:
        """Times to first tokens, and between tokens, so far."""
        if self._requests is None:
            empty = Latencies(bounds=(), counts=())
            return empty, empty
        first, following = self._requests.first_token_s, self._requests.between_tokens_s
        return (
            Latencies(bounds=first.bounds, counts=first.counts),
            Latencies(bounds=following.bounds, counts=following.counts),
        )

    async def render(self) -> bytes:
        """The text format: this frontend's metrics, then those of its engine."""
        return generate_latest(self._registry) + await self._engine.metrics_text()
