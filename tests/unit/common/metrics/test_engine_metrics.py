"""The engine's load as metrics: each figure under its own name, whatever state the engine is in."""

import pytest
from prometheus_client import CollectorRegistry

from pagoda.v1 import types_pb2
from pagoda_common.metrics.engine_metrics import SLEEP_STATES, EngineCollector

FIGURES = {
    "num_running_reqs": ("vllm:num_requests_running", 2),
    "num_waiting_reqs": ("vllm:num_requests_waiting", 3),
    "num_groups": ("pagoda:worker_groups", 4),
    "prefix_cache_queries": ("vllm:prefix_cache_queries_total", 50),
    "prefix_cache_hits": ("vllm:prefix_cache_hits_total", 30),
    "num_preemptions": ("vllm:num_preemptions_total", 6),
    "num_worker_losses": ("pagoda:worker_losses_total", 7),
    "num_steps": ("pagoda:engine_steps_total", 80),
}


def samples_of(load: types_pb2.EngineLoad) -> dict[tuple[str, str], float]:
    """Values by name and by the label that only some have."""
    registry = CollectorRegistry()
    registry.register(EngineCollector(load=lambda: load, model_name="tiny"))
    found = {}
    for family in registry.collect():
        for sample in family.samples:
            if sample.name != "vllm:cache_config_info":
                assert sample.labels["model_name"] == "tiny"
            assert sample.labels["engine"] == "0"
            label = sample.labels.get("reason") or sample.labels.get("sleep_state") or ""
            found[sample.name, label] = sample.value
    return found


def load_of(**fields: int) -> types_pb2.EngineLoad:
    figures = {name: value for name, (_, value) in FIGURES.items()}
    return types_pb2.EngineLoad(num_used_blocks=25, num_total_blocks=100, block_size=16, **{**figures, **fields})


def test_each_figure_has_its_name() -> None:
    samples = samples_of(load_of())
    assert {name: samples[name, ""] for name, _ in FIGURES.values()} == dict(FIGURES.values())
    assert samples["vllm:kv_cache_usage_perc", ""] == 0.25


def test_an_engine_without_blocks_uses_none() -> None:
    assert samples_of(types_pb2.EngineLoad())["vllm:kv_cache_usage_perc", ""] == 0


@pytest.mark.parametrize(("level", "reason"), [(0, "capacity"), (1, "deferred"), (2, "deferred")])
def test_what_waits_is_counted_once_by_why_it_waits(level: int, reason: str) -> None:
    samples = samples_of(load_of(sleep_level=level))
    waiting = {kind: samples["vllm:num_requests_waiting_by_reason", kind] for kind in ("capacity", "deferred")}
    assert waiting == {"capacity": 0, "deferred": 0} | {reason: 3}
    states = {state: samples["vllm:engine_sleep_state", state] for state in SLEEP_STATES}
    assert states == dict.fromkeys(SLEEP_STATES, 0) | {SLEEP_STATES[level]: 1}
