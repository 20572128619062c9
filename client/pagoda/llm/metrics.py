"""LLM.get_metrics: the engine's load and what was generated here, under the names of the server's /metrics."""

from bisect import bisect_left
from collections import Counter as Counts
from dataclasses import dataclass, field

from pagoda.v1 import types_pb2
from pagoda_common.params.outputs import RequestOutput


@dataclass(frozen=True, slots=True)
class Metric:
    """One figure."""

    name: str
    labels: dict[str, str]


@dataclass(frozen=True, slots=True)
class Counter(Metric):
    """A figure that only grows."""

    value: int


@dataclass(frozen=True, slots=True)
class Gauge(Metric):
    """A figure of now."""

    value: float


@dataclass(frozen=True, slots=True)
class Vector(Metric):
    """A figure that only grows, by position."""

    values: list[int]


@dataclass(frozen=True, slots=True)
class Histogram(Metric):
    """How a figure was distributed."""

    count: int
    sum: float
    buckets: dict[str, int]
    """By upper bound ("0.1", …, "+Inf"): how many figures were at most that."""


LENGTH_BOUNDS = tuple(float(m * 10**e) for e in range(7) for m in (1, 2, 5))
"""Tokens."""
FIRST_TOKEN_BOUNDS_S = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96)


@dataclass(slots=True)
class Distribution:
    """Figures counted by the bounds of a histogram."""

    bounds: tuple[float, ...]
    counts: Counts[int] = field(default_factory=Counts)
    """By place in `bounds`; the place after the last one is beyond all."""
    total: float = 0.0

    def add(self, value: float) -> None:
        """Count one."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def histogram(self, name: str, labels: dict[str, str]) -> Histogram:
        """As a metric."""
        buckets, num_so_far = {}, 0
        for place, bound in enumerate((*map(str, self.bounds), "+Inf")):
            num_so_far += self.counts[place]
            buckets[bound] = num_so_far
        return Histogram(name, labels, num_so_far, self.total, buckets)


@dataclass(slots=True)
class GenerationCounts:
    """Counts of what one LLM has generated."""

    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    finish_reasons: Counts[str] = field(default_factory=Counts)
    """Sequences by finish_reason."""
    first_token_s: Distribution = field(default_factory=lambda: Distribution(FIRST_TOKEN_BOUNDS_S))
    """Seconds from a request's arrival to its first token."""
    prompt_tokens: Distribution = field(default_factory=lambda: Distribution(LENGTH_BOUNDS))
    """Prompt tokens of each request."""
    output_tokens: Distribution = field(default_factory=lambda: Distribution(LENGTH_BOUNDS))
    """Generated tokens of each sequence."""

    def add(self, output: RequestOutput) -> None:
        """Count a request that has ended."""
        if output.metrics is not None and output.metrics.first_token_ts:
            self.first_token_s.add(output.metrics.first_token_latency)
        self.num_prompt_tokens += len(output.prompt_token_ids)
        self.prompt_tokens.add(len(output.prompt_token_ids))
        for completion in output.outputs:
            self.num_output_tokens += len(completion.token_ids)
            self.output_tokens.add(len(completion.token_ids))
            if completion.finish_reason is not None:
                self.finish_reasons[completion.finish_reason] += 1


def snapshot(load: types_pb2.EngineLoad, counts: GenerationCounts, *, model_name: str) -> list[Metric]:
    """All metrics; the names are vLLM's where it has them."""
    labels = {"model_name": model_name, "engine": "0"}
    usage = load.num_used_blocks / load.num_total_blocks if load.num_total_blocks else 0.0
    return [
        Gauge("vllm:num_requests_running", labels, float(load.num_running_reqs)),
        Gauge("vllm:num_requests_waiting", labels, float(load.num_waiting_reqs)),
        Gauge("vllm:kv_cache_usage_perc", labels, usage),
        Counter("vllm:prefix_cache_queries", labels, load.prefix_cache_queries),
        Counter("vllm:prefix_cache_hits", labels, load.prefix_cache_hits),
        Counter("vllm:num_preemptions", labels, load.num_preemptions),
        Counter("pagoda:worker_losses", labels, load.num_worker_losses),
        Counter("pagoda:engine_steps", labels, load.num_steps),
        Counter("vllm:prompt_tokens", labels, counts.num_prompt_tokens),
        Counter("vllm:generation_tokens", labels, counts.num_output_tokens),
        *(
            Counter("vllm:request_success", {**labels, "finished_reason": reason}, count)
            for reason, count in sorted(counts.finish_reasons.items())
        ),
        counts.first_token_s.histogram("vllm:time_to_first_token_seconds", labels),
        counts.prompt_tokens.histogram("vllm:request_prompt_tokens", labels),
        counts.output_tokens.histogram("vllm:request_generation_tokens", labels),
        *(_drafts(load.speculation, labels) if load.HasField("speculation") else ()),
    ]


def _drafts(drafts: types_pb2.SpeculationLoad, labels: dict[str, str]) -> list[Metric]:
    per_pos = list(drafts.num_accepted_tokens_per_pos)
    return [
        Counter("vllm:spec_decode_num_drafts", labels, drafts.num_drafts),
        Counter("vllm:spec_decode_num_draft_tokens", labels, drafts.num_draft_tokens),
        Counter("vllm:spec_decode_num_accepted_tokens", labels, drafts.num_accepted_tokens),
        Vector("vllm:spec_decode_num_accepted_tokens_per_pos", labels, per_pos),
    ]
