"""The scheduler's own Prometheus metrics: where each step's time goes, and how much each step computes."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Histogram, start_http_server

from pagoda_scheduler.step import ModelRunnerOutput, SchedulerOutput
from pagoda_scheduler.timeline import Timeline

STAGES = ("schedule", "encode", "wire", "queue", "prepare", "forward", "sample", "decode", "deliver")
"""In the order of a step's life. queue, prepare, forward and sample are in the worker; wire is both ways."""
_SECONDS = (
    *(0.00001, 0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005),
    *(0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0),
)
_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class HistogramTimeline(Timeline):
    """Keeps every step in histograms."""

    def __init__(self, *, registry: CollectorRegistry, model_name: str = "") -> None:
        text = "Time of one stage of a step."
        stages = Histogram("pagoda:step_seconds", text, ("stage",), buckets=_SECONDS, registry=registry)
        self._stages = {stage: stages.labels(stage) for stage in STAGES}
        text = "Tokens computed in a step."
        names = ("model_name", "engine")
        tokens = Histogram("vllm:iteration_tokens_total", text, names, buckets=_TOKENS, registry=registry)
        self._tokens = tokens.labels(model_name, "0")
        moved = Counter("pagoda:blocks_moved", "KV-cache blocks moved.", ("direction",), registry=registry)
        self._moved = {name: moved.labels(name) for name in ("swap_out", "swap_in", "copy")}

    def scheduled(self, output: SchedulerOutput, schedule_ns: int) -> None:
        """A step was decided in `schedule_ns` nanoseconds."""
        self._stages["schedule"].observe(schedule_ns / 1e9)
        self._tokens.observe(output.num_tokens)
        if output.blocks_to_swap_out or output.blocks_to_swap_in or output.blocks_to_copy:
            self._moved["swap_out"].inc(len(output.blocks_to_swap_out))
            self._moved["swap_in"].inc(len(output.blocks_to_swap_in))
            self._moved["copy"].inc(len(output.blocks_to_copy))

    @contextmanager
    def result(self, output: ModelRunnerOutput) -> Iterator[None]:
        """A step's result is taken and delivered inside of this context."""
        started_ns = time.perf_counter_ns()
        yield
        stages = self._stages
        stages["deliver"].observe((time.perf_counter_ns() - started_ns) / 1e9)
        timings = output.timings
        if timings is not None:
            stages["encode"].observe(timings.encode_ns / 1e9)
            stages["wire"].observe(timings.wire_ns / 1e9)
            stages["queue"].observe(timings.queue_ns / 1e9)
            stages["prepare"].observe(timings.prepare_ns / 1e9)
            stages["forward"].observe(timings.forward_ns / 1e9)
            stages["sample"].observe(timings.sample_ns / 1e9)
            stages["decode"].observe(timings.decode_ns / 1e9)


def serve_metrics(registry: CollectorRegistry, *, host: str, port: int) -> int:
    """Serve GET /metrics on a thread of its own; the bound port.

    Raises:
        OSError: the address cannot be bound.
    """
    server, _ = start_http_server(port, addr=host, registry=registry)
    return int(server.server_port)
