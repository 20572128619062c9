"""Every metric of the scheduler's own, for several groups and steps."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry

from pagoda.v1 import scheduler_pb2
from pagoda_common.params.lora_adapter import LoraAdapter
from pagoda_scheduler.core.step import ModelRunnerOutput, SchedulerOutput, StepTimings
from pagoda_scheduler.groups.worker_group import Rank, WorkerGroup
from pagoda_scheduler.observability import metrics as module
from pagoda_scheduler.observability.metrics import STAGES, GroupCollector, HistogramTimeline, LoraCollector
from tests.unit.scheduler.stories import make_request, make_scheduler


def samples(registry: CollectorRegistry) -> dict[tuple[str, ...], float]:
    """By name and values of labels, without buckets and times of creation."""
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in registry.collect()
        for sample in family.samples
        if "le" not in sample.labels and not sample.name.endswith("_created")
    }


def output_of(**more: Any) -> SchedulerOutput:
    fields: dict[str, Any] = {
        "step": 1,
        "new_requests": [],
        "freed_slots": [],
        "slots": [],
        "num_scheduled_tokens": [],
        "appended_slots": [],
        "appended_block_ids": [],
        "num_tokens": 0,
    }
    return SchedulerOutput(**{**fields, **more})


def test_a_step_s_moves_and_tokens_are_counted() -> None:
    registry = CollectorRegistry()
    timeline = HistogramTimeline(registry=registry, model_name="m")
    moved = output_of(
        num_tokens=10,
        num_prefills_ended=2,
        blocks_to_swap_out=[(1, 2)] * 3,
        blocks_to_swap_in=[(1, 2)] * 2,
        blocks_to_copy=[(1, 2)],
        states_to_load=[(1, 2)] * 4,
        states_to_save=[(1, 2)] * 5,
        states_to_swap_out=[(1, 2)] * 6,
        states_to_swap_in=[(1, 2)] * 7,
    )
    timeline.scheduled(moved, 2_000_000_000)
    timeline.scheduled(output_of(num_tokens=5), 1_000_000_000)
    timeline.scheduled(output_of(blocks_to_swap_in=[(1, 2)], states_to_save=[(1, 2)]), 0)
    timeline.scheduled(output_of(blocks_to_copy=[(1, 2)], states_to_load=[(1, 2)]), 0)
    found = samples(registry)
    blocks = [found["pagoda:blocks_moved_total", name] for name in ("swap_out", "swap_in", "copy")]
    assert blocks == [3, 3, 2]
    states = [found["pagoda:states_moved_total", name] for name in ("load", "save", "swap_out", "swap_in")]
    assert states == [5, 6, 6, 7]
    assert found["vllm:iteration_tokens_total_sum", "m", "0"] == 10 + 2 + 5
    assert found["vllm:iteration_tokens_total_count", "m", "0"] == 4
    assert found["pagoda:step_seconds_sum", "schedule"] == 3.0


def test_each_stage_of_a_step_has_its_own_time() -> None:
    registry = CollectorRegistry()
    timeline = HistogramTimeline(registry=registry)
    timings = StepTimings(*(number * 10**9 for number in range(1, 8)))
    timeline.answered(ModelRunnerOutput(1, None, []))
    timeline.delivered(ModelRunnerOutput(1, None, [5, 6, 7], timings=timings), 9 * 10**9)
    timeline.delivered(ModelRunnerOutput(2, None, [8]), 10**9)
    found = samples(registry)
    assert found["pagoda:sampled_tokens_total",] == 4
    sums = {stage: found["pagoda:step_seconds_sum", stage] for stage in STAGES}
    assert sums == {
        "schedule": 0,
        "encode": 1,
        "wire": 2,
        "queue": 3,
        "prepare": 4,
        "forward": 5,
        "sample": 6,
        "decode": 7,
        "deliver": 10,
    }


def group_of(number: int, *devices: str, state: str = "serving", core: Any = None) -> WorkerGroup:
    ranks = {
        rank: Rank(scheduler_pb2.WorkerIdentity(rank=rank, device=device), address="")
        for rank, device in enumerate(devices)
    }
    return WorkerGroup(number, len(devices), ranks, state=state, core=core)


def core_of(num_blocks: int = 10) -> Any:
    return SimpleNamespace(scheduler=make_scheduler(num_blocks=num_blocks))


def test_groups_are_told_in_order_with_their_load() -> None:
    busy, without_blocks = core_of(), core_of()
    for name in "abc":
        busy.scheduler.add(make_request(name, 5))
    busy.scheduler._slots = type(busy.scheduler._slots)(size=1)
    busy.scheduler.schedule()
    without_blocks.scheduler.kv.pool.num_blocks = 0
    groups = {
        3: group_of(3, "gpu A", "gpu B", "gpu A", core=busy),
        1: group_of(1, "cpu", state="loading"),
        2: group_of(2, "cpu", core=without_blocks),
    }
    registry = CollectorRegistry()
    registry.register(GroupCollector(groups=cast("Any", SimpleNamespace(groups=groups))))
    assert list(samples(registry).items()) == [
        (("pagoda:group_info", "1", "loading", "cpu"), 1),
        (("pagoda:group_info", "2", "serving", "cpu"), 1),
        (("pagoda:group_info", "3", "serving", "gpu A, gpu B"), 1),
        (("pagoda:group_requests_running", "2"), 0),
        (("pagoda:group_requests_running", "3"), 1),
        (("pagoda:group_requests_waiting", "2"), 0),
        (("pagoda:group_requests_waiting", "3"), 2),
        (("pagoda:group_kv_cache_usage_perc", "2"), 0),
        (("pagoda:group_kv_cache_usage_perc", "3"), 0.2),
    ]


def test_adapters_are_told_once_by_who_runs_and_who_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.time, "time", lambda: 77.5)
    first, second = core_of(), core_of()

    def of(name: str) -> Any:
        return make_request(name, 5, lora=LoraAdapter(name=name))

    first.scheduler.running += [of("sql"), of("chat"), make_request("plain", 5)]
    second.scheduler.running += [of("sql")]
    for core, name in ((first, "late"), (second, "chat")):
        core.scheduler.waiting.append(of(name))
    groups = {0: group_of(0, core=first), 1: group_of(1, core=second), 2: group_of(2)}
    registry = CollectorRegistry()
    registry.register(LoraCollector(groups=cast("Any", SimpleNamespace(groups=groups)), max_loras=4))
    assert samples(registry) == {("vllm:lora_requests_info", "4", "chat,late", "chat,sql"): 77.5}
