"""What a scraper reads of a request: every metric's name, type, labels, bounds and value."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from pagoda_common.engine.interface import Engine
from pagoda_common.params.outputs import SequenceDelta
from pagoda_frontend.observability import metrics
from pagoda_frontend.observability.metrics import ConnectionCollector, Metrics, RequestMetrics, RequestTimer

FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    *(160.0, 640.0, 2560.0),
)
PER_TOKEN_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0),
    *(1920.0, 7680.0),
)
LENGTHS = (1, 2, 5, 10, 20, 50)
HISTOGRAMS: dict[str, tuple[tuple[float, ...], int, float]] = {
    "time_to_first_token_seconds": (FIRST_TOKEN_S, 2, 3.0 + 3.0),
    "inter_token_latency_seconds": (PER_TOKEN_S, 3, 4.0 + 4.0),
    "request_time_per_output_token_seconds": (PER_TOKEN_S, 1, 8.0 / 3),
    "e2e_request_latency_seconds": (REQUEST_S, 2, 7.0 + 11.0),
    "request_queue_time_seconds": (REQUEST_S, 2, 1.0 + 1.0),
    "request_prefill_time_seconds": (REQUEST_S, 2, 2.0 + 2.0),
    "request_decode_time_seconds": (REQUEST_S, 2, 4.0 + 8.0),
    "request_inference_time_seconds": (REQUEST_S, 2, 6.0 + 10.0),
    "request_prompt_tokens": (LENGTHS, 2, 9 + 9),
    "request_generation_tokens": (LENGTHS, 2, 1 + 4),
    "request_max_num_generation_tokens": (LENGTHS, 1, 4),
    "request_prefill_kv_computed_tokens": (LENGTHS, 2, 7 + 7),
    "request_num_preemptions": ((1, 2, 3, 4, 5, 10, 20), 2, 3 + 0),
    "request_params_n": ((1, 2, 5, 10, 20), 1, 2),
    "request_params_max_tokens": (LENGTHS, 1, 30),
}
"""Bounds, number and sum of the values of `record`."""
COUNTERS: dict[tuple[str, str], float] = {
    ("prompt_tokens", ""): 9,
    ("generation_tokens", ""): 5,
    ("prompt_tokens_cached", ""): 2,
    ("request_success", "stop"): 1,
    ("request_success", "length"): 1,
    ("request_success", "abort"): 0,
    ("request_success", "error"): 0,
    ("prompt_tokens_by_source", "local_compute"): 7,
    ("prompt_tokens_by_source", "local_cache_hit"): 2,
    ("admission_rejections", "max_num_queued_reqs"): 0,
    ("admission_rejections", "max_num_queued_tokens"): 0,
    ("admission_rejections", "max_queued_share"): 0,
}
"""By name and the label that tells series apart."""


def delta(index: int, num_tokens: int, total: int, **fields: Any) -> SequenceDelta:
    return SequenceDelta(
        index=index,
        text="",
        token_ids=[7] * num_tokens,
        offset=total - num_tokens,
        num_output_tokens=total,
        queue_s=1.0,
        num_cached_tokens=2,
        **fields,
    )


def record(registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request of two sequences: tokens after 3 s; the first one ends after 7 s, the other after 11 s."""
    clock = SimpleNamespace(now_s=100.0)
    monkeypatch.setattr(metrics, "time", SimpleNamespace(perf_counter=lambda: clock.now_s))
    recorded = RequestMetrics(registry=registry, model_name="tiny", max_model_len=64)
    timer = RequestTimer(metrics=recorded, num_prompt_tokens=9, n=2, max_tokens=30)
    clock.now_s += 3.0
    timer.add([delta(0, 1, 1), delta(1, 1, 1)])
    clock.now_s += 4.0
    timer.add([delta(0, 0, 1, finish_reason="stop", num_preemptions=3), delta(1, 1, 2)])
    clock.now_s += 4.0
    timer.add([delta(1, 2, 4, finish_reason="length")])
    timer.close("error")


def test_every_metric_of_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = CollectorRegistry()
    record(registry, monkeypatch)
    counters: dict[tuple[str, str], float] = {}
    histograms: dict[str, tuple[tuple[float, ...], int, float]] = {}
    for family in registry.collect():
        name = family.name.removeprefix("vllm:")
        assert family.name == f"vllm:{name}"
        assert family.type == ("counter" if name in {key for key, _ in COUNTERS} else "histogram"), name
        assert family.documentation
        samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
        for sample in samples:
            assert sample.labels["model_name"] == "tiny"
            assert sample.labels.get("engine", "0") == "0"
            others = set(sample.labels) - {"model_name", "engine", "le"}
            assert ("engine" in sample.labels) == (name != "admission_rejections")
            assert len(others) <= 1
            if family.type == "counter":
                counters[name, "".join(sample.labels[one] for one in others)] = sample.value
        if family.type == "histogram":
            value = {sample.name: sample.value for sample in samples}
            bounds = tuple(float(sample.labels["le"]) for sample in samples if "le" in sample.labels)
            assert bounds[-1] == float("inf")
            histograms[name] = (bounds[:-1], int(value[f"vllm:{name}_count"]), value[f"vllm:{name}_sum"])
    assert counters == COUNTERS
    assert set(histograms) == set(HISTOGRAMS)
    for name, (wanted, num_values, total) in HISTOGRAMS.items():
        shown = histograms[name]
        assert (shown[0], shown[1]) == (wanted, num_values), name
        assert shown[2] == pytest.approx(total), name


def test_an_embedding_counts_its_prompt_and_no_token() -> None:
    registry = CollectorRegistry()
    recorded = RequestMetrics(registry=registry, model_name="tiny", max_model_len=64)
    timer = RequestTimer(metrics=recorded, num_prompt_tokens=9, n=1, max_tokens=None)
    timer.add([delta(0, 0, 0, finish_reason="stop", embedding=np.ones(1, dtype=np.float32))])
    value = registry.get_sample_value
    labels = {"model_name": "tiny", "engine": "0"}
    assert value("vllm:prompt_tokens_total", labels) == 9
    assert value("vllm:prompt_tokens_cached_total", labels) == 2
    assert value("vllm:generation_tokens_total", labels) == 0
    assert value("vllm:time_to_first_token_seconds_count", labels) == 0
    assert value("vllm:request_params_max_tokens_count", labels) == 0
    assert value("vllm:request_success_total", {**labels, "finished_reason": "stop"}) == 1


def test_a_sequence_that_was_never_admitted_has_no_time_in_the_queue() -> None:
    registry = CollectorRegistry()
    recorded = RequestMetrics(registry=registry, model_name="tiny", max_model_len=64)
    timer = RequestTimer(metrics=recorded, num_prompt_tokens=9, n=1, max_tokens=None)
    timer.add([SequenceDelta(index=0, text="", token_ids=[], offset=0, num_output_tokens=0, finish_reason="abort")])
    labels = {"model_name": "tiny", "engine": "0"}
    counts = {name: registry.get_sample_value(f"vllm:{name}_count", labels) for name in HISTOGRAMS}
    observed = {name for name, count in counts.items() if count}
    assert observed == {
        *("request_params_n", "e2e_request_latency_seconds", "request_prompt_tokens", "request_generation_tokens"),
        *("request_max_num_generation_tokens", "request_num_preemptions"),
    }


class FakeEngine:
    """What metrics ask of an engine."""

    is_connected = True
    num_losses = 3

    async def metrics_text(self) -> bytes:
        return b"of_the_engine 1\n"


def test_whether_the_scheduler_is_there() -> None:
    engine = FakeEngine()
    registry = CollectorRegistry()
    registry.register(ConnectionCollector(engine=cast("Engine", engine)))
    for connected in (True, False):
        engine.is_connected = connected
        assert registry.get_sample_value("pagoda:scheduler_connected") == float(connected)
        assert registry.get_sample_value("pagoda:scheduler_losses_total") == 3


class Empty(Collector):
    """Has no metrics."""

    def collect(self) -> Iterator[Metric]:
        return iter(())


async def test_metrics_before_and_after_the_model_is_known() -> None:
    asked: list[str] = []

    def engine_collector(model_name: str) -> Collector:
        asked.append(model_name)
        return Empty()

    recorder = Metrics(engine=cast("Engine", FakeEngine()), engine_collector=engine_collector)
    recorder.count_rejection("max_num_queued_reqs is 1")
    assert recorder.token_totals() == (0.0, 0.0)
    first, following = recorder.latencies()
    assert (first.bounds, first.counts, following.bounds, following.counts) == ((), (), (), ())
    recorder.set_model(model_name="tiny", max_model_len=64)
    assert asked == ["tiny"]
    for _ in range(2):
        recorder.count_rejection("max_num_queued_tokens is 1")
    recorder.count_rejection("something else")
    recorder.timer(num_prompt_tokens=9, n=1, max_tokens=3).add([delta(0, 2, 2)])
    assert recorder.token_totals() == (9.0, 2.0)
    first, following = recorder.latencies()
    assert (first.bounds, following.bounds) == (FIRST_TOKEN_S, PER_TOKEN_S)
    assert (sum(first.counts), sum(following.counts)) == (1, 0)
    text = (await recorder.render()).decode()
    assert text.endswith("of_the_engine 1\n")
    assert 'vllm:admission_rejections_total{model_name="tiny",reason="max_num_queued_tokens"} 2.0' in text
    assert 'vllm:admission_rejections_total{model_name="tiny",reason="max_num_queued_reqs"} 0.0' in text
    for name in ("python_gc_objects_collected_total", "python_info", "pagoda:scheduler_connected 1.0"):
        assert name in text
