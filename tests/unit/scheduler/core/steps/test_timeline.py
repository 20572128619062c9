"""The scheduler's own metrics say where a step's time went."""

import urllib.request

from prometheus_client import CollectorRegistry

from pagoda_common.metrics.server import process_registry, serve_metrics
from pagoda_scheduler.core.step import ModelRunnerOutput, StepTimings
from pagoda_scheduler.kv.cache_group import CacheGroup
from pagoda_scheduler.observability.metrics import STAGES, HistogramTimeline
from tests.unit.scheduler.stories import PretendWorker, make_request, make_scheduler


def test_every_stage_of_a_step_is_in_a_histogram() -> None:
    registry = CollectorRegistry()
    timeline = HistogramTimeline(registry=registry, model_name="m")
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 5))
    output = scheduler.schedule()
    assert output is not None
    timeline.scheduled(output, 30_000)
    timings = StepTimings(wire_ns=1_000_000, forward_ns=4_000_000)
    timeline.delivered(ModelRunnerOutput(output.step, None, [1], timings=timings), 20_000)
    for stage in STAGES:
        assert registry.get_sample_value("pagoda:step_seconds_count", {"stage": stage}) == 1, stage
    assert registry.get_sample_value("pagoda:step_seconds_sum", {"stage": "forward"}) == 0.004
    assert registry.get_sample_value("vllm:iteration_tokens_total_sum", {"model_name": "m", "engine": "0"}) == 6

    assert registry.get_sample_value("pagoda:sampled_tokens_total") == 1

    port = serve_metrics(process_registry(registry), host="127.0.0.1", port=0)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=240) as response:
        text = response.read()
    assert b'pagoda:step_seconds_bucket{le="0.005",stage="forward"} 1.0' in text
    assert b"process_resident_memory_bytes" in text


def test_moves_of_states_are_counted() -> None:
    registry = CollectorRegistry()
    timeline = HistogramTimeline(registry=registry)
    groups = (CacheGroup("recurrent"),)
    scheduler, worker = (
        make_scheduler(groups=groups, num_snapshots=1, num_host_snapshots=1),
        PretendWorker(groups=groups),
    )
    for number in (7, 8, 7):
        scheduler.add(make_request(f"{number}", [number] * 6, max_tokens=1))
        while (output := scheduler.schedule()) is not None:
            timeline.scheduled(output, 1)
            scheduler.update(worker.execute(output))
    moved = {
        direction: registry.get_sample_value("pagoda:states_moved_total", {"direction": direction})
        for direction in ("load", "save", "swap_out", "swap_in")
    }
    assert moved == {"load": 1, "save": 2, "swap_out": 1, "swap_in": 1}
