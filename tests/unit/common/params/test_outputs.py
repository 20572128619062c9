"""What is noted of a request's times while its tokens come."""

import pytest

from pagoda_common.params import outputs
from pagoda_common.params.outputs import RequestStateStats, SequenceDelta


def delta(token_ids: list[int], queue_s: float | None = None) -> SequenceDelta:
    return SequenceDelta(index=0, text="", token_ids=token_ids, offset=0, queue_s=queue_s)


def test_the_first_token_and_the_first_admission_are_noted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(outputs.time, "monotonic", lambda: now)
    stats = RequestStateStats(arrival_time=5.0, queued_ts=90.0)
    stats.add(delta([]))
    assert (stats.first_token_ts, stats.num_generation_tokens) == (0.0, 0)
    stats.add(delta([1, 2], queue_s=3.0))
    now = 104.0
    kept = stats.copy()
    stats.add(delta([3], queue_s=9.0))
    assert (stats.scheduled_ts, stats.first_token_ts, stats.last_token_ts) == (93.0, 100.0, 104.0)
    assert (stats.first_token_latency, stats.num_generation_tokens) == (10.0, 3)
    assert (kept.last_token_ts, kept.num_generation_tokens, kept.arrival_time) == (100.0, 2, 5.0)
