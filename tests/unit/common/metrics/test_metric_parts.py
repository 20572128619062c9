"""Metrics of speculation and of the cache, quantiles at their bounds, and when there is a tracer."""

from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Gauge

from pagoda.v1 import types_pb2
from pagoda_common.config.observability_config import ObservabilityConfig
from pagoda_common.metrics import tracing
from pagoda_common.metrics.engine_metrics import SLEEP_STATES, EngineCollector
from pagoda_common.metrics.labels import ENGINE, LABELS
from pagoda_common.metrics.lean_histogram import HistogramSeries, quantile
from pagoda_common.metrics.server import process_registry
from pagoda_common.metrics.tracing import make_tracer, sampled_traceparent, trace_id_of

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def samples(load: types_pb2.EngineLoad) -> list[tuple[str, dict[str, str], float]]:
    collector = EngineCollector(load=lambda: load, model_name="m")
    return [
        (one.name, {name: value for name, value in one.labels.items() if name not in LABELS}, one.value)
        for family in collector.collect()
        for one in family.samples
    ]


def test_the_metrics_of_drafts() -> None:
    drafts = types_pb2.SpeculationLoad(
        num_drafts=3, num_draft_tokens=9, num_accepted_tokens=5, num_accepted_tokens_per_pos=[3, 2, 0]
    )
    found = samples(types_pb2.EngineLoad(speculation=drafts))
    prefix = "vllm:spec_decode_num_"
    assert [one for one in found if one[0].startswith(prefix)] == [
        (f"{prefix}drafts_total", {}, 3.0),
        (f"{prefix}draft_tokens_total", {}, 9.0),
        (f"{prefix}accepted_tokens_total", {}, 5.0),
        (f"{prefix}accepted_tokens_per_pos_total", {"position": "0"}, 3.0),
        (f"{prefix}accepted_tokens_per_pos_total", {"position": "1"}, 2.0),
        (f"{prefix}accepted_tokens_per_pos_total", {"position": "2"}, 0.0),
    ]
    assert not [one for one in samples(types_pb2.EngineLoad()) if one[0].startswith(prefix)]


def test_the_metric_of_the_cache_and_the_order_of_all() -> None:
    load = types_pb2.EngineLoad(block_size=16, num_total_blocks=99)
    *others, (name, labels, value) = samples(load)
    assert (name, labels, value) == ("vllm:cache_config_info", {"block_size": "16", "num_gpu_blocks": "99"}, 1.0)
    assert [name for name, *_ in others] == [
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "pagoda:worker_groups",
        *["vllm:num_requests_waiting_by_reason"] * 2,
        "vllm:prefix_cache_queries_total",
        "vllm:prefix_cache_hits_total",
        "vllm:num_preemptions_total",
        "pagoda:worker_losses_total",
        "pagoda:engine_steps_total",
        *["vllm:engine_sleep_state"] * 3,
    ]
    assert SLEEP_STATES == ("awake", "weights_offloaded", "discard_all")
    assert (tuple(LABELS), ENGINE) == (("model_name", "engine"), "0")


@pytest.mark.parametrize(
    ("counts", "share", "value"),
    [
        ((0, 0, 0), 0.5, None),
        ((1, 0, 0), 0.0, None),
        ((2, 2, 0), 0.5, 1.0),
        ((2, 2, 0), 0.25, 0.5),
        ((2, 2, 0), 0.75, 2.0),
        ((2, 2, 0), 1.0, 3.0),
        ((0, 2, 0), 0.5, 2.0),
        ((0, 0, 5), 0.5, 3.0),
        ((1, 0, 1), 0.5, 1.0),
        ((1, 0, 1), 0.9, 3.0),
    ],
)
def test_quantiles_are_linear_within_a_bucket(counts: tuple[int, ...], share: float, value: float | None) -> None:
    assert quantile((1.0, 3.0), counts, share) == value


def test_a_value_on_a_bound_is_in_its_bucket() -> None:
    series = HistogramSeries((1.0, 3.0))
    for value in (0.5, 1.0, 1.5, 3.0, 3.5):
        series.observe(value)
    assert series.counts == [2, 2, 1]
    assert series.bounds == (1.0, 3.0)
    series.counts.append(9)
    assert series.counts == [2, 2, 1], "a copy"


def test_a_process_s_metrics_are_with_its_own() -> None:
    registry = CollectorRegistry()
    Gauge("own", "", registry=registry).set(4)
    whole = process_registry(registry)
    assert whole.get_sample_value("own") == 4
    names = {family.name for family in whole.collect()}
    assert {"own", "python_info", "python_gc_objects_collected", "process_cpu_seconds"} <= names


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (f"00-{TRACE}-{SPAN}-01", TRACE),
        (f"00-{TRACE}-{SPAN}-00", TRACE),
        (f"cc-{TRACE}-{SPAN}-01-more", TRACE),
        (f"00-{'0' * 32}-{SPAN}-01", ""),
        (f"00-{TRACE.upper()}-{SPAN}-01", ""),
        (f"00-{TRACE[1:]}-{SPAN}-01", ""),
        (f"00-{TRACE}-{SPAN}-1", ""),
        (f" 00-{TRACE}-{SPAN}-01", ""),
        ("", ""),
    ],
)
def test_the_id_of_a_trace(given: str, found: str) -> None:
    assert trace_id_of(given) == found


def test_metadata_without_a_traceparent_has_none() -> None:
    assert sampled_traceparent(None) == sampled_traceparent([]) == ""
    assert sampled_traceparent([("traceparent", b"x"), ("traceparent", "nothing")]) == ""
    good = f"00-{TRACE}-{SPAN}-01"
    assert sampled_traceparent([("traceparent", "wrong"), ("traceparent", good)]) == "", "the first one counts"


def test_a_tracer_is_made_where_one_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(tracing, "Tracer", lambda **given: made.append(given) or "tracer")
    assert make_tracer("scheduler", ObservabilityConfig()) is None
    assert make_tracer("scheduler", ObservabilityConfig(otlp_traces_endpoint="http://a:1")) == "tracer"
    assert made == [{"service": "scheduler", "endpoint": "http://a:1"}]
