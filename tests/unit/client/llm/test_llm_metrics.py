"""What LLM.get_metrics counts of generations: buckets add up, and what had no token has no first one."""

import pytest

from pagoda.llm.metrics import FIRST_TOKEN_BOUNDS_S, LENGTH_BOUNDS, Distribution, GenerationCounts
from pagoda_common.params.outputs import CompletionOutput, RequestOutput, RequestStateStats


def output(*, first_token_ts: float, latency_s: float = 0.0) -> RequestOutput:
    stats = RequestStateStats(first_token_ts=first_token_ts, first_token_latency=latency_s)
    completions = [CompletionOutput(0, "", [1, 2], finish_reason="stop"), CompletionOutput(1, "", [3])]
    return RequestOutput("a", None, [5, 6, 7], completions, finished=False, metrics=stats)


def test_each_bucket_has_those_below_it_and_its_bound_is_in_it() -> None:
    distribution = Distribution((1.0, 2.0, 4.0))
    for value in (0.5, 1.0, 1.5, 4.0, 9.0):
        distribution.add(value)
    shown = distribution.histogram("name", {"a": "b"})
    assert shown.buckets == {"1.0": 2, "2.0": 3, "4.0": 4, "+Inf": 5}
    assert (shown.count, shown.sum, shown.labels) == (5, 16.0, {"a": "b"})


def test_what_ended_without_a_token_has_no_time_to_its_first_one() -> None:
    counts = GenerationCounts()
    counts.add(output(first_token_ts=100.0, latency_s=0.3))
    counts.add(output(first_token_ts=0.0))
    assert counts.first_token_s.histogram("", {}).count == 1
    assert (counts.num_prompt_tokens, counts.num_output_tokens, counts.finish_reasons) == (6, 6, {"stop": 2})


@pytest.mark.parametrize("bounds", [LENGTH_BOUNDS, FIRST_TOKEN_BOUNDS_S])
def test_bounds_of_a_histogram_ascend(bounds: tuple[float, ...]) -> None:
    assert list(bounds) == sorted(set(bounds))
    distribution = Distribution(bounds)
    for bound in bounds:
        distribution.add(bound)
    assert list(distribution.histogram("", {}).buckets.values()) == [*range(1, len(bounds) + 1), len(bounds)]
