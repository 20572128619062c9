"""LLM.get_metrics: the engine's load and what was generated here, under the names of the server's /metrics."""

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


@dataclass(slots=True)
class GenerationCounts:
    """What one LLM has generated."""

    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    finish_reasons: Counts[str] = field(default_factory=Counts)
    """Sequences by finish_reason."""

    def add(self, output: RequestOutput) -> None:
        """Count a request that has ended."""
        self.num_prompt_tokens += len(output.prompt_token_ids)
        for completion in output.outputs:
            self.num_output_tokens += len(completion.token_ids)
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
