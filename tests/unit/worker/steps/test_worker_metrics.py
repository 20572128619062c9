"""The worker's own metrics: tokens of a step with its drafts, sequences, and each stage under its name."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from prometheus_client import CollectorRegistry

from pagoda_worker.metrics import STAGES, WorkerCollector, WorkerMetrics
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


def gauges(worker: Any) -> dict[tuple[str, ...], float]:
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in WorkerCollector(worker=worker).collect()
        for sample in family.samples
    }


def test_state_model_and_blocks_are_those_of_the_scrape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    worker = SimpleNamespace(state="device", facts=None, num_blocks=0)
    assert gauges(worker) == {("pagoda:worker_info", "device", ""): 1, ("pagoda:worker_kv_blocks",): 0}
    worker.state, worker.facts, worker.num_blocks = "serving", SimpleNamespace(model="m"), 9
    assert gauges(worker) == {("pagoda:worker_info", "serving", "m"): 1, ("pagoda:worker_kv_blocks",): 9}


def test_memory_of_an_accelerator_is_told_once_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = SimpleNamespace(state="serving", facts=None, num_blocks=1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (10, 80))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 30)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 40)
    assert len(gauges(worker)) == 2, "a scrape must not initialize a device"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    name = "pagoda:worker_device_memory_bytes"
    memory = {kinds[1]: value for kinds, value in gauges(worker).items() if kinds[0] == name}
    assert memory == {"free": 10, "total": 80, "allocated": 30, "reserved": 40}
