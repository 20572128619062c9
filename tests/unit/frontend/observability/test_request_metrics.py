"""RequestTimer: what is observed of the tokens of a request, and when."""

import pytest
from prometheus_client import CollectorRegistry

from pagoda_common.params.outputs import FinishReason, SequenceDelta
from pagoda_frontend.observability import metrics
from pagoda_frontend.observability.metrics import RequestMetrics, RequestTimer


class Clock:
    """time.perf_counter, as the test says."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def perf_counter(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(metrics, "time", clock)
    return clock


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def recorded(registry: CollectorRegistry) -> RequestMetrics:
    return RequestMetrics(registry=registry, model_name="tiny", max_model_len=512)


def value(registry: CollectorRegistry, name: str) -> float:
    """The sum over labels of what a scraper reads."""
    samples = [sample for family in registry.collect() for sample in family.samples if sample.name == name]
    assert samples, name
    return sum(sample.value for sample in samples)


def delta(index: int, num_tokens: int, num_output_tokens: int, reason: FinishReason | None = None) -> SequenceDelta:
    return SequenceDelta(
        index=index,
        text="",
        token_ids=[7] * num_tokens,
        offset=num_output_tokens - num_tokens,
        num_output_tokens=num_output_tokens,
        finish_reason=reason,
        queue_s=0.5,
        num_cached_tokens=2,
    )


def test_tokens_that_come_together_share_the_time_since_the_ones_before(
    clock: Clock, registry: CollectorRegistry, recorded: RequestMetrics
) -> None:
    timer = RequestTimer(metrics=recorded, num_prompt_tokens=5, n=1, max_tokens=None)
    for passed_s, num_tokens, total in ((1.0, 1, 1), (0.6, 3, 4), (0.1, 1, 5)):
        clock.now_s += passed_s
        timer.add([delta(0, num_tokens, total)])
    name = "vllm:inter_token_latency_seconds"
    assert value(registry, f"{name}_count") == 4
    assert value(registry, f"{name}_sum") == pytest.approx(0.7)
    assert value(registry, "vllm:time_to_first_token_seconds_sum") == pytest.approx(1.0)
    assert value(registry, "vllm:generation_tokens_total") == 5


def test_the_gaps_of_a_sequence_are_its_own_and_the_prompt_counts_once(
    clock: Clock, registry: CollectorRegistry, recorded: RequestMetrics
) -> None:
    timer = RequestTimer(metrics=recorded, num_prompt_tokens=5, n=2, max_tokens=9)
    clock.now_s += 1.0
    timer.add([delta(0, 1, 1)])
    clock.now_s += 1.0
    timer.add([delta(1, 1, 1)])
    clock.now_s += 2.0
    timer.add([delta(0, 1, 2, "stop"), delta(1, 1, 2, "length")])
    assert value(registry, "vllm:inter_token_latency_seconds_sum") == pytest.approx(3.0 + 2.0)
    assert value(registry, "vllm:time_to_first_token_seconds_sum") == pytest.approx(1.0 + 2.0)
    assert value(registry, "vllm:prompt_tokens_total") == 5
    assert value(registry, "vllm:request_time_per_output_token_seconds_sum") == pytest.approx(3.0 + 2.0)
    assert value(registry, "vllm:e2e_request_latency_seconds_sum") == pytest.approx(8.0)
    assert value(registry, "vllm:request_success_total") == 2


def test_sequences_that_did_not_end_by_themselves_are_counted_by_why(
    clock: Clock, registry: CollectorRegistry, recorded: RequestMetrics
) -> None:
    timer = RequestTimer(metrics=recorded, num_prompt_tokens=5, n=3, max_tokens=None)
    timer.add([delta(0, 1, 1, "stop")])
    timer.close("abort")
    timer.close("abort")
    success = {
        sample.labels["finished_reason"]: sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name == "vllm:request_success_total" and sample.value
    }
    assert success == {"stop": 1, "abort": 2}
