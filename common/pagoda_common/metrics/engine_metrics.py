"""The engine's load as Prometheus metrics under vLLM's names, for frontends and schedulers alike."""

from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pagoda.v1 import types_pb2
from pagoda_common.metrics.labels import ENGINE, LABELS

SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")
"""By level."""


class EngineCollector(Collector):
    """The engine's load. A new scheduler resets its counters."""

    def __init__(self, *, load: Callable[[], types_pb2.EngineLoad], model_name: str) -> None:
        """`load` is called for every scrape."""
        self._load = load
        self._labels = (model_name, ENGINE)

    def collect(self) -> Iterator[Metric]:
        """Called for every scrape."""
        load = self._load()
        usage = load.num_used_blocks / load.num_total_blocks if load.num_total_blocks else 0.0
        for name, text, value in (
            ("vllm:num_requests_running", "Sequences that run.", load.num_running_reqs),
            ("vllm:num_requests_waiting", "Sequences in the queue.", load.num_waiting_reqs),
            ("vllm:kv_cache_usage_perc", "KV-cache blocks in use, 0 to 1.", usage),
            ("pagoda:worker_groups", "Worker groups that serve.", load.num_groups),
        ):
            gauge = GaugeMetricFamily(name, text, labels=LABELS)
            gauge.add_metric(self._labels, value)
            yield gauge
        by_reason = GaugeMetricFamily(
            "vllm:num_requests_waiting_by_reason",
            "Sequences that wait: for a slot or blocks (capacity), or until the engine wakes up (deferred).",
            labels=(*LABELS, "reason"),
        )
        is_asleep = load.sleep_level > 0
        by_reason.add_metric((*self._labels, "capacity"), 0 if is_asleep else load.num_waiting_reqs)
        by_reason.add_metric((*self._labels, "deferred"), load.num_waiting_reqs if is_asleep else 0)
        yield by_reason
        for name, text, value in (
            ("vllm:prefix_cache_queries", "Tokens looked up in the prefix cache.", load.prefix_cache_queries),
            ("vllm:prefix_cache_hits", "Tokens found in the prefix cache.", load.prefix_cache_hits),
            ("vllm:num_preemptions", "Sequences preempted: returned to the queue.", load.num_preemptions),
            ("pagoda:worker_losses", "Worker groups lost.", load.num_worker_losses),
            ("pagoda:engine_steps", "Engine steps finished.", load.num_steps),
        ):
            counter = CounterMetricFamily(name, text, labels=LABELS)
            counter.add_metric(self._labels, value)
            yield counter
        if load.HasField("speculation"):
            yield from self._drafts(load.speculation)
        sleep_state = GaugeMetricFamily(
            "vllm:engine_sleep_state",
            "1 for the engine's current state, 0 for the others.",
            labels=(*LABELS, "sleep_state"),
        )
        for level, state in enumerate(SLEEP_STATES):
            sleep_state.add_metric((*self._labels, state), float(load.sleep_level == level))
        yield sleep_state
        info = GaugeMetricFamily(
            "vllm:cache_config_info",
            "Block size and number of blocks of the KV cache; the value is 1.",
            labels=("block_size", "num_gpu_blocks", "engine"),
        )
        info.add_metric((str(load.block_size), str(load.num_total_blocks), ENGINE), 1)
        yield info

    def _drafts(self, drafts: types_pb2.SpeculationLoad) -> Iterator[Metric]:
        """Counts of draft tokens."""
        for name, text, value in (
            ("vllm:spec_decode_num_drafts", "Drafts, each of one sequence in one step.", drafts.num_drafts),
            ("vllm:spec_decode_num_draft_tokens", "Tokens in drafts.", drafts.num_draft_tokens),
            ("vllm:spec_decode_num_accepted_tokens", "Accepted draft tokens.", drafts.num_accepted_tokens),
        ):
            counter = CounterMetricFamily(name, text, labels=LABELS)
            counter.add_metric(self._labels, value)
            yield counter
        per_pos = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Accepted draft tokens, by their position in the draft.",
            labels=(*LABELS, "position"),
        )
        for position, number in enumerate(drafts.num_accepted_tokens_per_pos):
            per_pos.add_metric((*self._labels, str(position)), number)
        yield per_pos


def total_load(loads: Sequence[types_pb2.EngineLoad]) -> types_pb2.EngineLoad:
    """Requests and blocks of all engines; of one, its whole load."""
    if len(loads) == 1:
        return loads[0]
    return types_pb2.EngineLoad(
        num_running_reqs=sum(load.num_running_reqs for load in loads),
        num_waiting_reqs=sum(load.num_waiting_reqs for load in loads),
        num_used_blocks=sum(load.num_used_blocks for load in loads),
        num_total_blocks=sum(load.num_total_blocks for load in loads),
        prefix_cache_queries=sum(load.prefix_cache_queries for load in loads),
        prefix_cache_hits=sum(load.prefix_cache_hits for load in loads),
    )
