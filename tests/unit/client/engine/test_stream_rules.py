"""What a stream keeps hidden, gives up and takes over: retries, patience, adoption, log probabilities."""

import sys
import time

import pytest

from pagoda_common.engine import stream as engine_stream
from pagoda_common.engine.stream import (
    MAX_RESUBMITS_WITHOUT_PROGRESS,
    PATIENCE_S,
    AdoptedRequest,
    AdoptedSequence,
    EngineRequest,
    EngineStream,
)
from pagoda_common.errors import InvalidRequest, NotReady, QueueFull, Superseded
from pagoda_common.params.outputs import TokenLogprobs
from pagoda_common.params.sampling_params import SamplingParams


def make(adopted: AdoptedRequest | None = None, timeout_s: float = 0.0, **params: object) -> EngineStream:
    request = EngineRequest(
        request_id="a",
        prompt_token_ids=[1, 2, 3],
        sampling_params=SamplingParams(**params),  # type: ignore[arg-type]  # of several types
        adopted=adopted,
        timeout_s=timeout_s,
    )
    return EngineStream(request=request, on_stop=lambda *_: None, on_abort=lambda *_: None)


def entry(token_id: int) -> TokenLogprobs:
    return TokenLogprobs(token_ids=[token_id], logprobs=[-1.0], sampled_rank=1)


def test_what_a_consumer_has_dropped_is_free_without_a_garbage_collection() -> None:
    stream, entries = make(logprobs=0, prompt_logprobs=0), [entry(1), entry(2)]
    before = [sys.getrefcount(entries[0]), sys.getrefcount(entries[1])]
    assert stream.prompt_logprobs is not None
    stream.prompt_logprobs[1] = entries[0]
    stream.sequences[0].extend(0, [5], entries[1:])
    assert sys.getrefcount(entries[0]) > before[0]
    stream.abort()
    stream.drop()
    assert [sys.getrefcount(entries[0]), sys.getrefcount(entries[1])] == before


async def test_news_after_a_stream_was_dropped_change_nothing() -> None:
    stream = make(logprobs=0, prompt_logprobs=0)
    stream.abort()
    stream.drop()
    assert stream.sequences[0].extend(0, [5], [entry(5)])
    assert (stream.prompt_logprobs, stream.sequences[0].logprobs, stream.is_done) == (None, None, True)


@pytest.mark.parametrize(
    ("attempt", "age_s", "error", "is_hidden"),
    [
        (1, 0.0, NotReady("no worker"), True),
        (1, PATIENCE_S - 1, NotReady("no worker"), True),
        (1, PATIENCE_S + 1, NotReady("no worker"), False),
        (1, 0.0, QueueFull("full"), False),
        (2, PATIENCE_S + 1, NotReady("no worker"), True),
        (2, PATIENCE_S + 1, QueueFull("full"), True),
        (2, 0.0, InvalidRequest("wrong"), False),
        (2, 0.0, Superseded("newer"), False),
    ],
)
def test_which_rejections_are_tried_again(
    attempt: int, age_s: float, error: Exception, is_hidden: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = make()
    stream.attempt = attempt
    now = time.monotonic()
    monkeypatch.setattr(engine_stream.time, "monotonic", lambda: now + age_s)
    assert stream.can_retry(error) is is_hidden  # type: ignore[arg-type]  # all are PagodaErrors


def test_each_new_token_gives_as_many_tries_again() -> None:
    stream = make(n=2)
    for _ in range(3):
        assert all(stream.count_resubmit() for _ in range(MAX_RESUBMITS_WITHOUT_PROGRESS))
        assert not stream.count_resubmit()
        assert not stream.count_resubmit()
        stream.sequences[1].extend(len(stream.sequences[1].token_ids), [5])


async def test_log_probabilities_that_overlap_are_taken_once() -> None:
    log = make(logprobs=0).sequences[0]
    assert log.extend(0, [5, 6], [entry(5), entry(6)])
    assert log.extend(1, [6, 7, 8], [entry(6), entry(7), entry(8)])
    assert log.extend(0, [5], [entry(5)])
    assert log.token_ids == [5, 6, 7, 8]
    assert log.logprobs is not None
    assert [one.token_ids[0] for one in log.logprobs] == [5, 6, 7, 8]
    output = log.take()
    assert [one.token_ids[0] for one in output.logprobs or ()] == [5, 6, 7, 8]
    assert log.logprobs == [], "what was given out is not kept"
    log.extend(4, [9], [entry(9)])
    assert log.take().logprobs == [entry(9)], "what is new, and nothing else"


@pytest.mark.parametrize("given", [None, [], [entry(5)], [entry(5)] * 3])
def test_tokens_without_the_log_probabilities_asked_for_end_the_sequence(given: list[TokenLogprobs] | None) -> None:
    log = make(logprobs=0).sequences[0]
    log.extend(0, [5, 6], given)
    assert log.finish_reason == "error"
    assert log.error is not None
    assert "without the logprobs" in log.error.message


def test_who_asked_for_no_log_probabilities_gets_none() -> None:
    log = make().sequences[0]
    log.extend(0, [5], [entry(5)])
    assert log.take().logprobs is None


def test_a_finished_sequence_takes_nothing_more_and_keeps_its_reason() -> None:
    log = make().sequences[0]
    log.extend(0, [5])
    log.finish("stop", stop_token_id=5)
    log.finish("length")
    assert log.extend(7, [9]), "no gap: no reader waits for it"
    assert (log.token_ids, log.finish_reason, log.stop_token_id) == ([5], "stop", 5)


def test_prompt_log_probabilities_have_a_place_for_each_token() -> None:
    assert make(prompt_logprobs=0).prompt_logprobs == [None, None, None]
    assert make().prompt_logprobs is None


async def test_an_adopted_request_begins_with_what_is_known() -> None:
    adopted = AdoptedRequest(
        request_id="a",
        attempt=4,
        prompt_token_ids=[1, 2, 3],
        seed=9,
        arrival_time_ns=77,
        timeout_s=0.0,
        note=b"",
        sequences=[
            AdoptedSequence(token_ids=[5, 6], num_cached_tokens=2),
            AdoptedSequence(token_ids=[]),
            AdoptedSequence(token_ids=[], finish_reason="stop", stop_token_id=8),
        ],
    )
    stream = make(adopted, n=3)
    assert (stream.attempt, stream.arrival_time_ns) == (4, 77)
    known, ended = await stream.get()
    assert (known.index, known.token_ids, known.finish_reason, known.num_cached_tokens) == (0, [5, 6], None, 2)
    assert (ended.index, ended.token_ids, ended.finish_reason, ended.stop_token_id) == (2, [], "stop", 8)
    assert not stream.is_finished
    assert stream.sequences[0].extend(2, [7])
    assert [output.token_ids for output in await stream.get()] == [[7]]


def test_a_time_limit_counts_from_the_start_and_never_reads_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = make(timeout_s=5.0)
    now = time.monotonic()
    assert 4.9 < stream.remaining_s <= 5.0
    assert not stream.is_overdue
    monkeypatch.setattr(engine_stream.time, "monotonic", lambda: now + 99)
    assert stream.remaining_s == 0.001, "0 would mean no limit"
    assert stream.is_overdue
    assert (make().remaining_s, make().is_overdue) == (0.0, False)
