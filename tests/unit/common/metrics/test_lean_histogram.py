"""A lean histogram shows what prometheus_client's own would."""

import time

import pytest
from prometheus_client import (
    CollectorRegistry,
    Histogram,
    disable_created_metrics,
    enable_created_metrics,
    generate_latest,
)

from pagoda_common.metrics.lean_histogram import LeanHistogram

BUCKETS = (0.001, 0.5, 1, 2.5, 1000)
VALUES = (0, 0.001, 0.0010001, 0.4, 0.5, 1, 1.5, 2.5, 3, 1000, 1000.1, 10**9)


def fill(kind: type[Histogram] | type[LeanHistogram]) -> CollectorRegistry:
    registry = CollectorRegistry()
    histogram = kind("vllm:x_seconds", 'A "text".', ("model_name", "engine"), buckets=BUCKETS, registry=registry)
    first, _ = histogram.labels("m", "0"), histogram.labels("never", "1")
    for value in VALUES:
        first.observe(value)
    histogram.labels("m", "0").observe(0.25)
    return registry


@pytest.mark.parametrize("has_created", [True, False])
def test_its_text_is_that_of_the_library(monkeypatch: pytest.MonkeyPatch, has_created: bool) -> None:
    monkeypatch.setattr(time, "time", lambda: 1_700_000_000.25)
    if not has_created:
        disable_created_metrics()
    try:
        text = generate_latest(fill(LeanHistogram))
        assert text == generate_latest(fill(Histogram))
    finally:
        enable_created_metrics()
    assert (b"_created" in text) is has_created
    assert b'vllm:x_seconds_bucket{engine="0",le="2.5",model_name="m"} 9.0' in text


def test_a_registry_finds_it_by_its_names_and_takes_them_once() -> None:
    registry = fill(LeanHistogram)
    labels = {"model_name": "m", "engine": "0"}
    assert registry.get_sample_value("vllm:x_seconds_count", labels) == len(VALUES) + 1
    assert b"vllm:x_seconds_sum" in generate_latest(registry.restricted_registry(["vllm:x_seconds_sum"]))
    with pytest.raises(ValueError, match="Duplicated"):
        Histogram("vllm:x_seconds", "", registry=registry)
