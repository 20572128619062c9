"""The log of calls and the history of figures that the status page shows."""

import pytest

from pagoda_common.errors import InvalidRequest
from pagoda_common.metrics.lean_histogram import quantile
from pagoda_common.params.outputs import SequenceDelta
from pagoda_frontend.observability.history import NUM_POINTS, History, Latencies, Moment
from pagoda_frontend.observability.request_log import MAX_ENDED, RequestLog
from pagoda_frontend.observability.statistics import Totals


def delta(index: int, reason: str | None = None) -> SequenceDelta:
    return SequenceDelta(index, "", [], 0, finish_reason=reason)  # type: ignore[arg-type]


def totals(generated: float = 0.0, prompts: float = 0.0) -> Totals:
    return Totals(
        num_prompt_tokens=prompts,
        num_generation_tokens=generated,
        num_running_reqs=2,
        num_waiting_reqs=1,
        kv_cache_usage=0.25,
        prefix_cache_queries=0,
        prefix_cache_hits=0,
    )


def moment(generated: float = 0.0, counts: tuple[int, ...] = (0, 0, 0)) -> Moment:
    latencies = Latencies(bounds=(1.0, 2.0), counts=counts)
    return Moment(totals=totals(generated), first_token=latencies, next_token=latencies)


def test_a_call_is_running_until_it_ends() -> None:
    log = RequestLog()
    with log.follow("r1", tenant="a", num_prompt_tokens=5, num_sequences=2) as call:
        assert [one.request_id for one in log.running("a")] == ["r1"]
        assert log.running("b") == []
        call.add([delta(0), delta(1, "stop")], num_output_tokens=2)
        assert call.first_token_s is not None
        call.add([delta(0, "length")], num_output_tokens=3)
    assert log.running() == []
    (ended,) = log.ended("a")
    assert (ended.state, ended.reason, ended.num_output_tokens) == ("finished", "stop, length", 3)
    assert ended.duration_s is not None
    assert log.ended("b") == []


def follow_and_leave(log: RequestLog, reason: str | None) -> None:
    """A reader that leaves after a delta."""
    with log.follow("r", tenant="", num_prompt_tokens=1, num_sequences=1) as call:
        call.add([delta(0, reason)], num_output_tokens=1)
        raise GeneratorExit


@pytest.mark.parametrize(("reason", "state"), [(None, "aborted"), ("abort", "aborted"), ("stop", "finished")])
def test_a_reader_that_leaves_has_aborted_what_was_not_finished(reason: str | None, state: str) -> None:
    log = RequestLog()
    with pytest.raises(GeneratorExit):
        follow_and_leave(log, reason)
    assert log.ended()[0].state == state


@pytest.mark.parametrize(
    ("num_sequences", "reasons", "state"),
    [
        (3, ["stop", "stop"], "aborted"),
        (3, ["stop", "length", "stop"], "finished"),
        (2, ["abort", "abort"], "aborted"),
        (2, ["stop", "abort"], "finished"),
    ],
)
def test_a_call_is_finished_when_all_its_sequences_are(num_sequences: int, reasons: list[str], state: str) -> None:
    log = RequestLog()
    with log.follow("r", tenant="", num_prompt_tokens=1, num_sequences=num_sequences) as call:
        for index, reason in enumerate(reasons):
            call.add([delta(index, reason)], num_output_tokens=index + 1)
    assert log.ended()[0].state == state
    assert log.ended()[0].num_finished == len(reasons)


def test_a_call_that_fails_has_its_error() -> None:
    log = RequestLog()
    with pytest.raises(InvalidRequest), log.follow("r", tenant="", num_prompt_tokens=1, num_sequences=1):
        raise InvalidRequest("too long")
    assert (log.ended()[0].state, log.ended()[0].reason) == ("failed", "too long")


def test_the_latest_calls_are_kept() -> None:
    log = RequestLog()
    for number in range(MAX_ENDED + 3):
        with log.follow(f"r{number}", tenant="", num_prompt_tokens=1, num_sequences=1):
            pass
    assert [call.request_id for call in log.ended()] == [f"r{number}" for number in range(MAX_ENDED + 2, 2, -1)]


def test_a_point_is_what_happened_in_its_period() -> None:
    history = History()
    history.add(moment(30.0, (1, 4, 0)), moment(10.0, (1, 0, 0)), elapsed_s=5.0, unix_s=100.0)
    columns = history.columns()
    assert (columns["generated"], columns["running"], columns["kv"]) == ([4.0], [2], [0.25])
    assert columns["time"] == [100.0]
    assert columns["first_token_p50"] == [1.5]
    assert columns["next_token_p99"] == [pytest.approx(1.99)]


def test_counters_that_begin_anew_give_no_negative_rate_and_latencies_of_another_shape_none_of_the_past() -> None:
    history = History()
    before = Moment(
        totals=totals(generated=100.0, prompts=50.0),
        first_token=Latencies(bounds=(), counts=()),
        next_token=Latencies(bounds=(1.0, 2.0), counts=(0, 0, 0)),
    )
    history.add(moment(30.0, (2, 0, 0)), before, elapsed_s=5.0, unix_s=1.0)
    columns = history.columns()
    assert (columns["generated"], columns["prompts"]) == ([0.0], [0.0])
    assert columns["first_token_p50"] == [0.5]


def test_prompts_and_what_waits_are_in_a_point() -> None:
    history = History()
    now = Moment(
        totals=totals(prompts=50.0), first_token=moment().first_token, next_token=moment(counts=(0, 4, 0)).next_token
    )
    history.add(now, moment(), elapsed_s=10.0, unix_s=1.0)
    columns = history.columns()
    assert (columns["prompts"], columns["generated"], columns["waiting"]) == ([5.0], [0.0], [1])
    assert (columns["first_token_p50"], columns["next_token_p50"]) == ([None], [1.5])


def test_a_period_without_tokens_has_no_latency() -> None:
    history = History()
    history.add(moment(0.0, (1, 1, 0)), moment(0.0, (1, 1, 0)), elapsed_s=5.0, unix_s=1.0)
    assert history.columns()["first_token_p50"] == [None]


def test_the_oldest_points_are_forgotten() -> None:
    history = History()
    for number in range(NUM_POINTS + 2):
        history.add(moment(), moment(), elapsed_s=1.0, unix_s=float(number))
    assert history.columns()["time"][0] == 2.0
    assert len(history.columns()["time"]) == NUM_POINTS


@pytest.mark.parametrize(
    ("counts", "share", "expected"),
    [
        ((0, 0, 0), 0.5, None),
        ((4, 0, 0), 0.5, 0.5),
        ((1, 1, 2), 0.5, 2.0),
        ((0, 0, 3), 0.5, 2.0),
        ((2, 2, 0), 0.75, 1.5),
    ],
)
def test_a_quantile_is_linear_within_its_bucket(counts: tuple[int, ...], share: float, expected: float | None) -> None:
    assert quantile((1.0, 2.0), counts, share) == expected


def test_each_reason_is_told_once_and_in_the_order_in_which_they_came() -> None:
    log = RequestLog()
    with log.follow("r", tenant="", num_prompt_tokens=1, num_sequences=5) as call:
        for index, reason in enumerate(("stop", "length", "stop", "length", "stop")):
            call.add([delta(index, reason)], num_output_tokens=0)
            assert call.num_finished == index + 1
        assert call.first_token_s is None, "no token has come"
    assert log.ended()[0].reason == "stop, length"
