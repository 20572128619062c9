"""The worker's own metrics: tokens of a step with its drafts, sequences, and each stage under its name."""

import numpy as np
from prometheus_client import CollectorRegistry

from pagoda_worker.metrics import STAGES, WorkerMetrics
from pagoda_worker.steps.step import StepInput, StepOutput, StepTimings

TIMINGS = StepTimings(
    queue_ns=1_000_000_000, prepare_ns=2_000_000_000, forward_ns=3_000_000_000, sample_ns=4_000_000_000
)


def values(registry: CollectorRegistry) -> dict[tuple[str, str], float]:
    return {
        (sample.name, sample.labels.get("stage", "")): sample.value
        for family in registry.collect()
        for sample in family.samples
        if "le" not in sample.labels
    }


def test_a_step_counts_its_tokens_and_those_of_drafts() -> None:
    registry = CollectorRegistry()
    metrics = WorkerMetrics(registry=registry)
    metrics.observe(StepInput(), StepOutput(timings=TIMINGS))
    assert values(registry)["pagoda:worker_sequences_total", ""] == 0, "nothing was computed"
    metrics.observe(StepInput(num_seqs=3), StepOutput(timings=TIMINGS))
    assert values(registry)["pagoda:worker_tokens_total", ""] == 3
    step = StepInput(num_seqs=2, num_scheduled_tokens=np.array([1, 20]))
    metrics.observe(step, StepOutput(num_draft_tokens=np.array([4, 0]), timings=TIMINGS))
    found = values(registry)
    assert found["pagoda:worker_tokens_total", ""] == 3 + 21 + 4
    assert found["pagoda:worker_sequences_total", ""] == 5
    sums = {stage: found["pagoda:worker_step_seconds_sum", stage] for stage in STAGES}
    assert sums == {"queue": 2.0, "prepare": 4.0, "forward": 6.0, "sample": 8.0}
