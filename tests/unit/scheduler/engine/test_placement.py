"""Placement: who goes to which group, in which order, and what is said of all groups together."""

import pytest

from pagoda_common.config.engine_config import CacheConfig, EngineConfig, SchedulerConfig
from pagoda_common.errors import InvalidRequest, QueueFull, RequestFailed, RequestTooLong
from pagoda_scheduler.core.request import Request, RequestStatus
from pagoda_scheduler.core.speculation import SpeculationCounters
from pagoda_scheduler.core.step_result import StepResult
from pagoda_scheduler.core.turns import TURN
from pagoda_scheduler.engine.engine import Engine
from pagoda_scheduler.engine.engine_core import EngineCore
from pagoda_scheduler.engine.load import Counters
from pagoda_scheduler.engine.open_requests import OpenRequest, Origin
from pagoda_scheduler.engine.placement import Placement, _split_late
from pagoda_scheduler.kv.cache_group import CacheSizes
from tests.unit.scheduler.engine.test_engine_core import Group
from tests.unit.scheduler.engine.test_open_requests import Notes, submit
from tests.unit.scheduler.stories import make_request


def engine_of(**scheduler: object) -> Engine:
    config = SchedulerConfig(**scheduler)  # type: ignore[arg-type]  # any of its fields
    return Engine(config=EngineConfig(cache=CacheConfig(block_size=4), scheduler=config))


def add_core(
    engine: Engine, *, num_blocks: int = 100, max_model_len: int = 64, eos_token_ids: tuple[int, ...] = ()
) -> tuple[EngineCore, Group]:
    group = Group()
    core = EngineCore(
        config=engine.config,
        executor=group,
        sizes=CacheSizes(num_blocks),
        max_model_len=max_model_len,
        eos_token_ids=eos_token_ids,
        deliver=engine.deliver,
    )
    engine.add_core(core)
    return core, group


async def test_the_load_of_two_groups_and_of_those_that_retire_is_one() -> None:
    engine, sink = engine_of(max_num_seqs=1), Notes()
    assert engine.load().silence_ms == 0
    first, _ = add_core(engine, num_blocks=10)
    submit(engine, sink, "a")
    submit(engine, sink, "b")
    first.step()
    second, _ = add_core(engine, num_blocks=20)
    first.num_steps, second.num_steps = 3, 4
    first.scheduler.num_preemptions, second.scheduler.num_preemptions = 5, 6
    first.scheduler.kv.num_prefix_queries, second.scheduler.kv.num_prefix_queries = 70, 80
    first.scheduler.kv.num_prefix_hits, second.scheduler.kv.num_prefix_hits = 7, 8
    first.scheduler.speculation.counters.count(3, 2)
    second.scheduler.speculation.counters.count(4, 1)
    for retires in (False, True):
        if retires:
            engine.retire_core(first, "leaves")
        load = engine.load()
        assert (load.num_running_reqs, load.num_waiting_reqs) == (1, 1)
        assert (load.num_used_blocks, load.num_total_blocks, load.num_groups) == (2, 30, 1 if retires else 2)
        counters = load.counters
        assert (counters.num_steps, counters.num_preemptions, counters.num_worker_losses) == (7, 11, 0)
        assert (counters.prefix_cache_queries, counters.prefix_cache_hits) == (150, 15)
        assert counters.speculation == SpeculationCounters(2, 7, 3, [2, 1, 0, 0])
    engine.remove_core(first, "gone")
    load = engine.load()
    assert (load.counters.num_steps, load.counters.num_worker_losses, load.num_total_blocks) == (7, 1, 20)
    assert load.counters.speculation == SpeculationCounters(2, 7, 3, [2, 1, 0, 0])
    engine.load()
    assert engine.load().counters.num_steps == 7, "a look changes nothing"


def test_a_copy_of_counters_is_on_its_own() -> None:
    counters = Counters(1, 2, 3, 4, 5)
    counters.speculation.count(2, 1)
    copy = counters.copy()
    assert copy == counters
    copy.speculation.count(2, 2)
    copy.num_steps += 1
    assert counters == Counters(1, 2, 3, 4, 5, SpeculationCounters(1, 2, 1, [1, 0]))


async def test_the_longest_silence_of_some_group_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of()
    add_core(engine)
    add_core(engine)
    for number, silence_ms in enumerate((3, 8)):
        core = engine.cores[number]
        monkeypatch.setattr(core, "_last_progress_ns", 0)
        monkeypatch.setattr(type(core), "silence_ms", property(lambda self: self.told_ms), raising=False)
        core.told_ms = silence_ms  # type: ignore[attr-defined]  # of this test
    assert engine.load().silence_ms == 8


async def test_what_waited_for_a_group_learns_its_model_and_keeps_its_order() -> None:
    engine, sink = engine_of(), Notes()
    requests = [submit(engine, sink, name) for name in "abc"]
    for request in requests:
        request.eos_token_ids, request.max_num_tokens = (), 10_000
    core, _ = add_core(engine, max_model_len=32, eos_token_ids=(9,))
    assert list(core.scheduler.waiting) == requests
    assert [(request.max_num_tokens, request.eos_token_ids) for request in requests] == [(32, (9,))] * 3
    assert [engine.requests[name].core for name in "abc"] == [core] * 3


async def test_what_is_too_long_for_the_group_that_came_fails_alone() -> None:
    engine, sink = engine_of(), Notes()
    long, short = make_request("long", 31, sink=sink), make_request("short", 30, sink=sink)
    engine.sinks.add(sink)
    engine.submit([long])
    engine.submit([short])
    core, _ = add_core(engine, max_model_len=31)
    assert isinstance(long.error, RequestTooLong)
    assert (long.finish_reason, long.is_finished, list(core.scheduler.waiting)) == ("error", True, [short])
    assert [result.finished for result in sink.results] == [[long]]


async def test_a_resumed_sequence_that_has_its_end_is_not_computed() -> None:
    engine, sink = engine_of(), Notes()
    engine.sinks.add(sink)
    core, _ = add_core(engine)
    ended = make_request("r", 5, index=0, output_token_ids=[8, 57], sink=sink)
    going_on = make_request("r", 5, index=1, output_token_ids=[8, 9], sink=sink)
    first = make_request("first", 5, sink=sink)
    engine.submit([first])
    engine.submit([ended, going_on])
    assert (ended.finish_reason, ended.is_finished, going_on.is_finished) == ("stop", True, False)
    assert [result.finished for result in sink.results] == [[ended]]
    assert list(core.scheduler.waiting) == [going_on, first], "one that resumes goes first"


async def test_the_bounds_of_the_queue_are_for_new_requests() -> None:
    engine = engine_of(max_num_queued_reqs=1)
    add_core(engine)
    engine.submit([make_request("a", 5)])
    with pytest.raises(QueueFull):
        engine.submit([make_request("new", 5, attempt=1)])
    engine.submit([make_request("again", 5, attempt=2)])
    with pytest.raises(RequestTooLong):
        engine.submit([make_request("long", 64, attempt=2)])
    assert (engine.num_submitted, list(engine.requests)) == (2, ["a", "again"])


async def test_a_sequence_that_has_ended_is_not_checked_again() -> None:
    engine = engine_of()
    add_core(engine)
    request = make_request("a", 80)
    request.status = RequestStatus.FINISHED
    engine.submit([request, make_request("a", 5, index=1)])
    assert list(engine.requests) == ["a"]


async def test_sequences_of_one_request_stay_together() -> None:
    engine, sink = engine_of(routing_policy="round_robin"), Notes()
    first, _ = add_core(engine)
    engine.sinks.add(sink)
    for name in "abcd":
        engine.submit([make_request(name, 5, index=index, sink=sink) for index in range(2)])
    others = [add_core(engine)[0] for _ in range(2)]
    engine.remove_core(first, "lost")
    for core in others:
        names = [request.request_id for request in core.scheduler.waiting]
        assert len(names) == 4
        assert all(names.count(name) == 2 for name in names)
        assert all(engine.requests[name].core is core for name in names)


async def test_what_comes_back_is_ahead_in_its_order() -> None:
    engine, sink = engine_of(), Notes()
    first, _ = add_core(engine)
    moved = [submit(engine, sink, name) for name in "abc"]
    second, _ = add_core(engine)
    first_of_second = make_request("own", 5)
    second.add(first_of_second)
    engine.remove_core(first, "lost")
    assert list(second.scheduler.waiting) == [*moved, first_of_second]


def test_of_a_large_call_what_has_not_run_waits_for_turns_after_the_others() -> None:
    call = [make_request(str(number), 5, group="call") for number in range(TURN + 3)]
    call[TURN].num_preemptions = 1
    call[TURN + 2].output_token_ids = [7]
    other = make_request("other", 5)
    ran = make_request("ran", 5, group="call")
    ran.admitted_ns = 1
    ordered, late = _split_late([*call, other, ran])
    assert list(late) == [call[TURN + 1]]
    assert ordered == [*call[: TURN + 1], call[TURN + 2], other, ran]


def test_what_has_run_takes_no_turn() -> None:
    ran = [make_request(f"ran {number}", 5, group="call") for number in range(3)]
    for request in ran:
        request.num_preemptions = 1
    call = [make_request(str(number), 5, group="call") for number in range(TURN + 1)]
    ordered, late = _split_late([*ran, *call])
    assert (list(late), len(ordered)) == ([call[TURN]], TURN + 3)


async def test_late_sequences_of_a_call_follow_what_waits_there() -> None:
    engine = engine_of(max_num_seqs=64)
    first, _ = add_core(engine)
    call = [make_request("call", 5, index=number) for number in range(TURN + 2)]
    engine.submit(call)
    second, _ = add_core(engine)
    own = make_request("own", 5)
    second.add(own)
    engine.remove_core(first, "lost")
    assert list(second.scheduler.waiting)[: TURN + 1] == [*call[:TURN], own]
    assert list(second.scheduler.waiting)[TURN + 1 :] == call[TURN:]


async def test_a_sequence_that_crashes_its_worker_fails_with_the_reason() -> None:
    engine, sink = engine_of(), Notes()
    request, other = submit(engine, sink, "bad"), submit(engine, sink, "good")
    request.num_crashes = 3
    core, _ = add_core(engine)
    del core
    engine._placement.fail([request], "segmentation fault")
    assert isinstance(request.error, RequestFailed)
    message = "this request crashed its worker 3 times in a row, the last time alone: segmentation fault"
    assert (request.error.message, request.finish_reason, request.is_finished) == (message, "error", True)
    assert [result.finished for result in sink.results] == [[request]]
    assert (list(engine.requests), other.is_finished) == (["good"], False)


async def test_a_group_that_is_lost_without_fault_blames_nobody_and_one_of_another_engine_is_none() -> None:
    engine = engine_of()
    core, _ = add_core(engine)
    request = make_request("a", 5)
    engine.submit([request])
    core.step()
    assert engine._placement.remove(core, is_fault=False) == ([request], [])
    assert (request.num_crashes, engine._placement.remove(core, is_fault=True)) == (0, None)
    assert engine.load().counters.num_worker_losses == 0


async def test_only_groups_that_serve_are_routed_to() -> None:
    engine, sink = engine_of(routing_policy="round_robin"), Notes()
    first, _ = add_core(engine)
    second, _ = add_core(engine)
    engine.retire_core(first, "leaves")
    assert engine.cores == [second]
    requests = [submit(engine, sink, name) for name in "ab"]
    assert (list(first.scheduler.waiting), list(second.scheduler.waiting)) == ([], requests)


async def test_tables_of_all_groups_are_given_back_at_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, compacted = engine_of(), list[int]()
    for number in range(3):
        core, _ = add_core(engine)
        monkeypatch.setattr(core.scheduler, "compact", lambda number=number: compacted.append(number))
    monkeypatch.setattr(engine._placement._homeless, "compact", lambda: compacted.append(-1))
    engine.submit([make_request("a", 5)])
    engine.compact()
    assert compacted == []
    engine.abort(["a"])
    engine.compact()
    assert compacted == [-1, 0, 1, 2]


async def test_constraints_are_forgotten_of_every_group_and_only_at_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, asked = engine_of(), list[int]()
    for number in range(3):
        core, _ = add_core(engine)
        monkeypatch.setattr(core, "forget_constraints", lambda number=number: asked.append(number) or number == 1)
    engine.submit([make_request("a", 5)])
    assert (engine.forget_constraints(), asked) == (False, [])
    engine.abort(["a"])
    assert (engine.forget_constraints(), asked) == (True, [0, 1, 2])


# Engine.


async def test_a_queue_that_is_full_leaves_nothing_behind() -> None:
    engine = engine_of(max_num_queued_reqs=1)
    engine.submit([make_request("a", 5)])
    with pytest.raises(QueueFull):
        engine.submit([make_request("b", 5)])
    assert (engine.num_submitted, list(engine.requests), engine.load().num_waiting_reqs) == (1, ["a"], 1)


async def test_an_invalid_request_replaces_its_older_attempt_all_the_same() -> None:
    engine, sink = engine_of(), Notes()
    add_core(engine)
    older = submit(engine, sink, "r", attempt=1)
    with pytest.raises(InvalidRequest):
        engine.submit([make_request("r", 100, attempt=2)])
    assert (older.is_finished, engine.requests) == (True, {})


async def test_a_request_ends_with_its_last_sequence() -> None:
    engine, sink = engine_of(), Notes()
    engine.sinks.add(sink)
    sequences = [make_request("r", 5, index=index, sink=sink) for index in range(2)]
    engine.submit(sequences)
    engine.stop([sequences[0]])
    engine.release("r")
    assert list(engine.requests) == ["r"]
    assert engine.requests["r"].unfinished == [sequences[1]]
    engine.stop(sequences)
    assert engine.requests == {}
    assert [result.finished for result in sink.results] == [[sequences[0]], [sequences[1]]]


async def test_readiness_follows_groups_and_draining() -> None:
    engine, sink = engine_of(), Notes()
    engine.sinks.add(sink)
    assert (engine.is_ready, engine.not_ready_reason) == (False, "no worker has registered yet")
    core, _ = add_core(engine)
    assert (engine.is_ready, engine.not_ready_reason) == (True, "")
    other, _ = add_core(engine)
    engine.retire_core(other, "one leaves")
    assert (engine.is_ready, engine.not_ready_reason) == (True, "")
    engine.remove_core(other, "one is gone", is_fault=False)
    assert (engine.is_ready, engine.not_ready_reason) == (True, "")
    await engine.drain(0)
    assert not engine.is_ready
    engine.remove_core(core, "lost")
    assert (engine.is_ready, engine.not_ready_reason) == (False, "lost")


@pytest.mark.parametrize("change", ["add", "retire", "remove", "abort", "drop", "drain"])
async def test_what_changes_load_or_readiness_is_announced(change: str) -> None:
    engine, sink = engine_of(), Notes()
    core, _ = add_core(engine)
    submit(engine, sink, "a")
    engine._readers.announce_now()
    told = sink.num_announcements
    if engine._readers._announcement is not None:
        engine._readers._announcement.cancel()
        engine._readers._announcement = None
    if change == "add":
        add_core(engine)
    elif change == "retire":
        engine.retire_core(core, "leaves")
    elif change == "remove":
        engine.remove_core(core, "lost")
    elif change == "abort":
        engine.abort(["a"])
    elif change == "drop":
        engine.close_sink(sink)
        engine.sinks.add(sink)
    else:
        await engine.drain(0)
    assert engine._readers._announcement is not None
    engine._readers._announcement.cancel()
    engine._readers.announce_now()
    assert sink.num_announcements == told + 1


async def test_a_deadline_tells_its_seconds_and_ends_all_sequences() -> None:
    engine, sink = engine_of(), Notes()
    engine.sinks.add(sink)
    sequences = [make_request("r", 5, index=index, sink=sink) for index in range(2)]
    engine.submit(sequences, timeout_s=0.5)
    engine._expire("unknown", 1.0)
    engine._expire("r", 0.5)
    for sequence in sequences:
        assert sequence.error is not None
        assert (sequence.finish_reason, sequence.error.message) == (
            "error",
            "request was not finished within its 0.5 s",
        )
    assert [result.finished for result in sink.results] == [sequences]


async def test_what_others_get_of_a_step_is_not_lost_when_one_reader_fails() -> None:
    class Broken(Notes):
        def push(self, result: object) -> None:
            raise ValueError("a bug")

    engine, broken, whole = engine_of(), Broken(), Notes()
    first, second = submit(engine, broken, "a"), submit(engine, whole, "b")
    engine.stop([first, second])
    assert broken.error is not None
    assert broken.error.message == "internal error: ValueError"
    assert [result.finished for result in whole.results] == [[second]]
    assert whole.error is None


async def test_one_reader_gets_the_result_itself_unless_some_of_it_is_no_ones() -> None:
    engine, sink = engine_of(), Notes()
    own = make_request("own", 5, sink=sink)
    orphan = make_request("orphan", 5)
    engine.sinks.add(sink)
    engine.submit([own])
    engine.submit([orphan], origin=Origin("key", None))
    engine._readers.deliver(_result_of(own, orphan), has_orphans=True)
    assert [request.request_id for request in sink.results[0].requests] == ["own"]
    engine._readers.deliver(whole := _result_of(own), has_orphans=False)
    assert sink.results[1] is whole


def _result_of(*requests: Request) -> StepResult:
    result = StepResult(step=3)
    for number, request in enumerate(requests):
        request.output_token_ids.append(number)
        result.add_token(request, number, number)
    return result


def test_an_open_request_is_its_sequences() -> None:
    sink = object()
    sequences = [make_request("r", 5, index=index, sink=sink) for index in range(2)]
    open_request = OpenRequest(3, sequences, None)
    assert (open_request.request_id, open_request.sink, open_request.origin) == ("r", sink, None)
    sequences[0].status = RequestStatus.FINISHED
    assert open_request.unfinished == [sequences[1]]


def test_placement_without_groups_keeps_what_it_is_given_in_front() -> None:
    ended: list[Request] = []
    placement = Placement(config=SchedulerConfig(), requests={}, finish=ended.append, is_slow=lambda _: False)
    waiting, first, second = (make_request(name, 5) for name in ("waiting", "first", "second"))
    placement.start([waiting], None, at_front=False)
    placement.place([first, second])
    assert list(placement._homeless) == [first, second, waiting]
    assert placement.is_homeless(first)
    placement.take_out(first)
    assert (placement.is_homeless(first), first.is_finished, ended) == (False, True, [])
    assert placement.load().num_waiting_reqs == 2
