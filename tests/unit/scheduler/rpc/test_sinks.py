"""A step's news as messages: every field of what a frontend and a client's stream are told, for several sequences."""

from typing import Any

import numpy as np
import pytest

from pagoda.v1 import scheduler_pb2, types_pb2
from pagoda_common.config.engine_config import CacheConfig, EngineConfig
from pagoda_common.engine.convert import FINISH_NUMBERS
from pagoda_common.errors import InvalidRequest, RequestFailed
from pagoda_scheduler.core.step import LogprobRows, PromptLogprobRows
from pagoda_scheduler.core.step_result import StepResult
from pagoda_scheduler.engine.engine import Engine
from pagoda_scheduler.groups.worker_groups import WorkerGroups
from pagoda_scheduler.rpc.scheduler_state import SchedulerState
from pagoda_scheduler.rpc.sinks import GenerateSink, SessionSink, pick_rows
from tests.unit.scheduler.stories import make_request


def columns(column: bytes, kind: str = "<u4") -> list[Any]:
    return np.frombuffer(column, kind).tolist()  # type: ignore[no-any-return]


def logprobs() -> LogprobRows:
    """Three rows: two entries for row 0, one for row 2, three for row 5."""
    return LogprobRows(
        rows=np.array([0, 2, 5], np.uint32),
        counts=np.array([2, 1, 3], np.uint32),
        token_ids=np.array([10, 11, 20, 50, 51, 52], np.uint32),
        logprobs=np.array([-1, -2, -3, -4, -5, -6], np.float32),
        sampled_ranks=np.array([7, 8, 9], np.uint32),
    )


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([5, 0], ([1, 0], [2, 3], [10, 11, 50, 51, 52], [-1, -2, -4, -5, -6], [7, 9])),
        ([1, 2], ([1], [1], [20], [-3], [8])),
        ([1, 3], ([], [], [], [], [])),
    ],
)
def test_rows_are_picked_with_all_their_entries(rows: list[int], expected: tuple[list[int], ...]) -> None:
    picked = pick_rows(logprobs(), rows)
    actual = (picked.rows, picked.counts, picked.token_ids, picked.logprobs, picked.sampled_ranks)
    assert tuple(column.tolist() for column in actual) == expected


@pytest.fixture
def state() -> SchedulerState:
    engine = Engine(config=EngineConfig(cache=CacheConfig(block_size=4)))
    return SchedulerState(
        session_epoch=7, engine=engine, groups=WorkerGroups(config=engine.config, engine=engine, session_epoch=7)
    )


def result() -> StepResult:
    """One sequence that continues with two tokens, one that is new, one that ends, and one that fails."""
    going, new = make_request("going", 4, session_slot=300), make_request("new", 4, session_slot=2, arrival_ns=100)
    ended, failed = make_request("ended", 4, session_slot=70_000), make_request("failed", 4, session_slot=4)
    new.first_cached_tokens, new.admitted_ns = 3, 150
    ended.output_token_ids, ended.finish_reason, ended.stop_token_id, ended.num_preemptions = [1, 2, 3], "stop", 3, 6
    ended.embedding = b"1234"
    failed.finish_reason, failed.error = "error", InvalidRequest("why", field="prompt")
    news = StepResult(step=9, admitted=[new], finished=[ended, failed], logprobs=logprobs())
    columns_of = ((going, 5, 40), (going, 6, 41), (new, 0, 70_001), (ended, 2, 3))
    for row, (request, offset, token) in enumerate(columns_of):
        news.requests.append(request)
        news.offsets.append(offset)
        news.token_ids.append(token)
        news.rows.append(row)
    news.prompt_logprobs.append((new, PromptLogprobRows(slot=1, start=256, logprobs=logprobs())))
    return news


def test_every_part_of_a_steps_news_is_in_the_frontends_message(state: SchedulerState) -> None:
    sink = SessionSink(state=state, on_room=lambda sink: None)
    sent: list[scheduler_pb2.SchedulerMessage] = []
    sink.outbox.put = sent.append  # type: ignore[method-assign]
    news = result()
    sink.sequences = {request.session_slot: request for request in news.requests}
    sink.push(news)
    (message,) = sent
    assert (message.session_epoch, message.step, message.HasField("load")) == (7, 9, True)
    assert columns(message.slots) == [300, 300, 2, 70_000]
    assert columns(message.offsets) == [5, 6, 0, 2]
    assert columns(message.token_ids) == [40, 41, 70_001, 3]
    (admitted,) = message.admitted
    assert (admitted.slot, admitted.num_cached_tokens, admitted.queue_ns) == (2, 3, 50)
    ended, failed = message.finished
    assert (ended.slot, ended.finish_reason, ended.stop_token_id) == (70_000, FINISH_NUMBERS["stop"], 3)
    assert (ended.num_output_tokens, ended.num_preemptions, ended.embedding) == (3, 6, b"1234")
    assert not ended.HasField("error")
    assert (failed.finish_reason, failed.error.message, failed.error.field) == (
        FINISH_NUMBERS["error"],
        "why",
        "prompt",
    )
    assert not failed.HasField("stop_token_id")
    assert columns(message.logprobs.rows) == [0, 2]
    assert columns(message.logprobs.counts) == [2, 1]
    assert columns(message.logprobs.token_ids) == [10, 11, 20]
    assert columns(message.logprobs.logprobs, "<f4") == [-1, -2, -3]
    assert columns(message.logprobs.sampled_ranks) == [7, 8]
    (chunk,) = message.prompt_logprobs
    assert (chunk.slot, chunk.start, columns(chunk.logprobs.rows)) == (2, 256, [0, 2, 5])
    assert list(sink.sequences) == [300, 2], "those that have ended may not be named any more"


def test_a_model_is_told_once_and_a_refusal_names_its_request(state: SchedulerState) -> None:
    sink = SessionSink(state=state, on_room=lambda sink: None)
    sent: list[scheduler_pb2.SchedulerMessage] = []
    sink.outbox.put = sent.append  # type: ignore[method-assign]
    sink.hello("1.2")
    state._groups.model_info = types_pb2.ModelInfo(model="m")
    sink.announce()
    sink.reject("r", RequestFailed("no"))
    assert [message.HasField("model_info") for message in sent] == [False, True, False]
    assert (sent[0].hello.version, sent[0].hello.takes_acknowledgements) == ("1.2", True)
    assert [(each.request_id, each.error.message) for each in sent[2].rejected] == [("r", "no")]


def test_a_stream_gets_each_sequences_tokens_and_ends_with_the_last() -> None:
    sink = GenerateSink(num_sequences=3, on_room=lambda sink: None)
    sent: list[scheduler_pb2.TokenOutput] = []
    sink.outbox.put = sent.append  # type: ignore[method-assign]
    news = result()
    for index, request in enumerate(dict.fromkeys(news.requests)):
        request.index = index
    news.finished.pop()  # nothing fails
    sink.push(news)
    going, new, ended = sent
    assert (going.index, going.offset, list(going.token_ids), list(going.logprobs)) == (0, 5, [40, 41], [-1.0])
    assert (new.index, new.num_cached_tokens, list(new.token_ids), list(new.logprobs)) == (1, 3, [70_001], [-3.0])
    assert (ended.finish_reason, ended.stop_token_id, ended.embedding) == (FINISH_NUMBERS["stop"], 3, b"1234")
    assert not sink.outbox._is_closed
    others = [make_request(name, 4) for name in "ab"]
    for request in others:
        request.finish_reason, request.output_token_ids = "abort", [1, 2]
    sink.push(StepResult(step=0, finished=others[:1]))
    assert (sent[3].offset, sink.outbox._is_closed) == (2, False)
    sink.push(StepResult(step=0, finished=others[1:]))
    assert sink.outbox._is_closed


def test_a_stream_ends_with_the_first_failure() -> None:
    sink = GenerateSink(num_sequences=3, on_room=lambda sink: None)
    failed = make_request("a", 4)
    failed.finish_reason, failed.error = "error", RequestFailed("why")
    sink.push(StepResult(step=0, finished=[failed]))
    assert (sink.outbox._is_closed, sink.outbox._error) == (True, failed.error)


def test_a_frontend_whose_clock_is_ahead_has_waited_for_nothing(state: SchedulerState) -> None:
    sink = SessionSink(state=state, on_room=lambda sink: None)
    sent: list[scheduler_pb2.SchedulerMessage] = []
    sink.outbox.put = sent.append  # type: ignore[method-assign]
    request = make_request("a", 4, arrival_ns=2_000)
    request.admitted_ns = 1_000
    sink.push(StepResult(step=1, admitted=[request]))
    assert sent[0].admitted[0].queue_ns == 0
