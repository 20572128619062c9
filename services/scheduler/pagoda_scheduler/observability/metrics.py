"""The scheduler's own Prometheus metrics: durations and sizes of steps, and the state of each group."""

import time
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pagoda_common.metrics.lean_histogram import LeanHistogram
from pagoda_scheduler.core.request import Request
from pagoda_scheduler.core.step import ModelRunnerOutput, SchedulerOutput
from pagoda_scheduler.engine.engine_core import EngineCore
from pagoda_scheduler.groups.worker_groups import WorkerGroups
from pagoda_scheduler.observability.timeline import Timeline

STAGES = ("schedule", "encode", "wire", "queue", "prepare", "forward", "sample", "decode", "deliver")
"""Stages of a step, in order. queue, prepare, forward and sample are in the worker; wire is both ways."""
_SECONDS = (
    *(0.00001, 0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005),
    *(0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0),
)
_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class HistogramTimeline(Timeline):
    """Records every step in histograms."""

    def __init__(self, *, registry: CollectorRegistry, model_name: str = "") -> None:
        text = "Time of one stage of a step."
        stages = LeanHistogram("pagoda:step_seconds", text, ("stage",), buckets=_SECONDS, registry=registry)
        self._stages = {stage: stages.labels(stage) for stage in STAGES}
        text = "Tokens of a step: computed prompt tokens and sampled tokens."
        names = ("model_name", "engine")
        tokens = LeanHistogram("vllm:iteration_tokens_total", text, names, buckets=_TOKENS, registry=registry)
        self._tokens = tokens.labels(model_name, "0")
        text = "Tokens sampled for all frontends."
        self._sampled = Counter("pagoda:sampled_tokens", text, registry=registry)
        moved = Counter("pagoda:blocks_moved", "KV-cache blocks moved.", ("direction",), registry=registry)
        self._moved = {name: moved.labels(name) for name in ("swap_out", "swap_in", "copy")}
        text = "Snapshots of recurrent state moved."
        states = Counter("pagoda:states_moved", text, ("direction",), registry=registry)
        self._moved_states = {name: states.labels(name) for name in ("load", "save", "swap_out", "swap_in")}

    def scheduled(self, output: SchedulerOutput, schedule_ns: int) -> None:
        """A step was decided in `schedule_ns` nanoseconds."""
        self._stages["schedule"].observe(schedule_ns / 1e9)
        self._tokens.observe(output.num_tokens + output.num_prefills_ended)
        if output.blocks_to_swap_out or output.blocks_to_swap_in or output.blocks_to_copy:
            self._moved["swap_out"].inc(len(output.blocks_to_swap_out))
            self._moved["swap_in"].inc(len(output.blocks_to_swap_in))
            self._moved["copy"].inc(len(output.blocks_to_copy))
        if output.states_to_load or output.states_to_save:  # a swapped state is loaded, or makes room for a save
            self._moved_states["load"].inc(len(output.states_to_load))
            self._moved_states["save"].inc(len(output.states_to_save))
            self._moved_states["swap_out"].inc(len(output.states_to_swap_out))
            self._moved_states["swap_in"].inc(len(output.states_to_swap_in))

    def delivered(self, output: ModelRunnerOutput, deliver_ns: int) -> None:
        """A step's result was applied and delivered in `deliver_ns` nanoseconds."""
        self._sampled.inc(len(output.token_ids))
        stages, timings = self._stages, output.timings
        stages["deliver"].observe(deliver_ns / 1e9)
        if timings is not None:
            stages["encode"].observe(timings.encode_ns / 1e9)
            stages["wire"].observe(timings.wire_ns / 1e9)
            stages["queue"].observe(timings.queue_ns / 1e9)
            stages["prepare"].observe(timings.prepare_ns / 1e9)
            stages["forward"].observe(timings.forward_ns / 1e9)
            stages["sample"].observe(timings.sample_ns / 1e9)
            stages["decode"].observe(timings.decode_ns / 1e9)


class GroupCollector(Collector):
    """Collects the state of each registered worker group, and its load while it serves."""

    def __init__(self, *, groups: WorkerGroups) -> None:
        self._groups = groups

    def collect(self) -> Iterator[Metric]:
        """Called for every scrape, on any thread."""
        groups = [group for _, group in sorted(self._groups.groups.copy().items())]
        info = GaugeMetricFamily(
            "pagoda:group_info", "A registered group; the value is 1.", labels=("group", "state", "device")
        )
        for group in groups:
            devices = ", ".join(dict.fromkeys(rank.identity.device for rank in group.members))
            info.add_metric((str(group.number), group.state, devices), 1)
        yield info
        gauges: tuple[tuple[str, str, Callable[[EngineCore], float]], ...] = (
            ("requests_running", "Sequences that the group runs.", lambda core: len(core.scheduler.running)),
            ("requests_waiting", "Sequences that wait for the group.", lambda core: len(core.scheduler.waiting)),
            ("kv_cache_usage_perc", "The group's KV-cache blocks in use, 0 to 1.", _kv_cache_usage),
        )
        cores = [(str(group.number), group.core) for group in groups if group.core is not None]
        for name, text, value_of in gauges:
            gauge = GaugeMetricFamily(f"pagoda:group_{name}", text, labels=("group",))
            for number, core in cores:
                gauge.add_metric((number,), value_of(core))
            yield gauge


class LoraCollector(Collector):
    """vLLM's metric of adapters with running and with waiting sequences."""

    def __init__(self, *, groups: WorkerGroups, max_loras: int) -> None:
        self._groups = groups
        self._max_loras = max_loras

    def collect(self) -> Iterator[Metric]:
        """Called for every scrape, on any thread."""
        cores = [group.core for group in self._groups.groups.copy().values() if group.core is not None]
        running = _adapter_names(request for core in cores for request in core.scheduler.running.copy())
        waiting = _adapter_names(request for core in cores for request in core.scheduler.waiting)
        info = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "Adapters of running and waiting sequences; the value is the Unix time of the scrape.",
            labels=("max_lora", "waiting_lora_adapters", "running_lora_adapters"),
        )
        info.add_metric((str(self._max_loras), waiting, running), time.time())
        yield info


def _adapter_names(requests: Iterable[Request]) -> str:
    """The names without duplicates, separated by commas."""
    return ",".join(sorted({request.lora.name for request in requests if request.lora is not None}))


def _kv_cache_usage(core: EngineCore) -> float:
    pool = core.scheduler.kv.pool
    return pool.num_used_blocks / pool.num_blocks if pool.num_blocks else 0.0
