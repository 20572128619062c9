"""The worker's own Prometheus metrics: steps, cache, device memory. Knows no gRPC."""

from collections.abc import Iterator

import torch
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pagoda_common.metrics.lean_histogram import LeanHistogram
from pagoda_worker.steps.step import StepInput, StepOutput
from pagoda_worker.worker import Worker

STAGES = ("queue", "prepare", "forward", "sample")
"""Stages of a step, in order."""
_SECONDS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


class WorkerMetrics:
    """Metrics of one worker's steps. `observe` runs on the model thread."""

    def __init__(self, *, registry: CollectorRegistry) -> None:
        text = "Time of one stage of a step in the worker."
        stages = LeanHistogram("pagoda:worker_step_seconds", text, ("stage",), buckets=_SECONDS, registry=registry)
        self._stages = {stage: stages.labels(stage) for stage in STAGES}
        self._tokens = Counter("pagoda:worker_tokens", "Tokens computed.", registry=registry)
        self._sequences = Counter("pagoda:worker_sequences", "Sequences, summed over all steps.", registry=registry)

    def observe(self, step: StepInput, output: StepOutput) -> None:
        """A step was computed."""
        if not step.num_seqs:
            return
        timings = output.timings
        self._stages["queue"].observe(timings.queue_ns / 1e9)
        self._stages["prepare"].observe(timings.prepare_ns / 1e9)
        self._stages["forward"].observe(timings.forward_ns / 1e9)
        self._stages["sample"].observe(timings.sample_ns / 1e9)
        counts = step.num_scheduled_tokens
        num_draft = 0 if output.num_draft_tokens is None else int(output.num_draft_tokens.sum())
        self._tokens.inc(num_draft + (step.num_seqs if counts is None else int(counts.sum())))
        self._sequences.inc(step.num_seqs)


class WorkerCollector(Collector):
    """Collects state and memory of one worker for every scrape."""

    def __init__(self, *, worker: Worker) -> None:
        self._worker = worker

    def collect(self) -> Iterator[Metric]:
        """Called for every scrape, on any thread."""
        state = GaugeMetricFamily(
            "pagoda:worker_info", "The worker's state and model; the value is 1.", labels=("state", "model")
        )
        facts = self._worker.facts
        state.add_metric((self._worker.state, "" if facts is None else facts.model), 1)
        yield state
        blocks = self._worker.num_blocks
        yield GaugeMetricFamily("pagoda:worker_kv_blocks", "KV-cache blocks allocated.", value=blocks)
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch has no types here
            memory = GaugeMetricFamily(
                "pagoda:worker_device_memory_bytes", "Memory of the accelerator.", labels=("kind",)
            )
            free, total = torch.cuda.mem_get_info()
            for kind, value in (
                ("free", free),
                ("total", total),
                ("allocated", torch.cuda.memory_allocated()),
                ("reserved", torch.cuda.memory_reserved()),
            ):
                memory.add_metric((kind,), value)
            yield memory
