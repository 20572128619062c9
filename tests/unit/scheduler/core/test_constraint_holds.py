"""Constraints are compiled ahead of steps: a step never waits for one, and what is held has bounds."""

import pytest

from pagoda_common.params.structured_outputs import StructuredOutputsParams
from pagoda_scheduler.core import constraint_holds
from pagoda_scheduler.core.constraint_holds import LARGE, ConstraintHolds
from pagoda_scheduler.core.quarantine import MAX_CRASHES
from pagoda_scheduler.core.request import Request
from pagoda_scheduler.core.scheduler import Scheduler
from tests.unit.scheduler.stories import PretendWorker, expected_output, make_request, make_scheduler, run


class Compiler:
    """A worker that compiles when the test says so."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.released: list[str] = []
        self.holds = ConstraintHolds(
            start=lambda params: self.started.append(str(params.regex)),
            release=lambda params: self.released.append(str(params.regex)),
        )

    def finish(self, scheduler: Scheduler, regex: str) -> None:
        scheduler.put_back(self.holds.compiled(StructuredOutputsParams(regex=regex)))


@pytest.fixture
def compiler() -> Compiler:
    return Compiler()


def under(regex: str, name: str | None = None, **more: object) -> Request:
    """A request whose output matches `regex`."""
    return make_request(name or regex, 6, structured_outputs=StructuredOutputsParams(regex=regex), **more)


def one_step(scheduler: Scheduler, worker: PretendWorker) -> list[Request]:
    output = scheduler.schedule()
    assert output is not None
    return scheduler.update(worker.execute(output)).requests


def test_others_step_on_while_a_constraint_is_compiled(compiler: Compiler) -> None:
    scheduler, worker = make_scheduler(constraints=compiler.holds), PretendWorker()
    slow, victim = under("slow", cache_salt="slow"), make_request("victim", 6, max_tokens=20, ignore_eos=True)
    scheduler.add(slow)
    scheduler.add(victim)
    for _ in range(5):
        assert one_step(scheduler, worker) == [victim]
    assert (compiler.started, len(scheduler.waiting)) == (["slow"], 1)
    compiler.finish(scheduler, "slow")
    run(scheduler, worker)
    for request in (slow, victim):
        assert request.output_token_ids == expected_output(
            list(request.prompt_token_ids), len(request.output_token_ids)
        )
    assert slow.finish_reason == victim.finish_reason == "length"


def test_all_sequences_of_a_request_wait_for_one_compilation(compiler: Compiler) -> None:
    scheduler, worker = make_scheduler(constraints=compiler.holds), PretendWorker()
    first, second = under("r", "a", index=0), under("r", "a", index=1)
    second.leader = first
    for request in (first, second):
        scheduler.add(request)
    assert scheduler.schedule() is None
    assert scheduler.has_unfinished_requests
    compiler.finish(scheduler, "r")
    run(scheduler, worker)
    assert compiler.started == ["r"]
    assert first.output_token_ids == second.output_token_ids == expected_output(list(first.prompt_token_ids), 4)


def test_a_known_constraint_is_admitted_at_once(compiler: Compiler) -> None:
    scheduler, worker = make_scheduler(constraints=compiler.holds), PretendWorker()
    scheduler.add(under("r", "a"))
    compiler.finish(scheduler, "r")
    run(scheduler, worker)
    scheduler.add(again := under("r", "b"))
    run(scheduler, worker)
    assert (compiler.started, again.finish_reason) == (["r"], "length")


def test_a_constraint_set_aside_takes_its_place_again(compiler: Compiler) -> None:
    scheduler, worker = make_scheduler(constraints=compiler.holds, max_num_seqs=1), PretendWorker()
    requests = [under("r", "first"), make_request("second", 6), make_request("third", 6)]
    for request in requests:
        scheduler.add(request)
    while not requests[1].is_finished:
        one_step(scheduler, worker)
    compiler.finish(scheduler, "r")
    assert list(scheduler.waiting) == [requests[0], requests[2]]


def test_what_leaves_while_it_is_set_aside_is_gone(compiler: Compiler) -> None:
    scheduler = make_scheduler(constraints=compiler.holds)
    ended, parked, moved = under("a"), under("b"), under("c")
    for request in (ended, parked, moved):
        scheduler.add(request)
    assert scheduler.schedule() is None
    scheduler.finish(ended)
    scheduler.park(parked)
    assert scheduler.take_waiting() == [moved]
    assert (len(scheduler.waiting), scheduler.waiting.num_prompt_tokens) == (0, 0)
    compiler.finish(scheduler, "a")
    compiler.finish(scheduler, "b")
    assert scheduler.schedule() is None
    scheduler.unpark(parked)
    output = scheduler.schedule()
    assert output is not None
    assert [new.request_id for new in output.new_requests] == ["b/0"]


@pytest.mark.parametrize("leave", ["finish", "park", "take_waiting"])
def test_no_constraint_is_compiled_for_who_has_left(compiler: Compiler, leave: str) -> None:
    scheduler = make_scheduler(constraints=compiler.holds)
    first, second, third = (under(name) for name in "abc")
    for request in (first, second, third):
        scheduler.add(request)
    assert compiler.started == ["a", "b"], "two at a time"
    assert list(compiler.holds.being_compiled) == [first, second]
    if leave == "take_waiting":
        scheduler.take_waiting()
    else:
        for request in (first, third):
            getattr(scheduler, leave)(request)
    assert first not in compiler.holds.being_compiled, "a loss of the worker is none of its doing"
    assert compiler.holds.compiled(StructuredOutputsParams(regex="a")) == []
    assert compiler.started == ["a", "b"], "no one waits for the third"


def test_a_constraint_that_cannot_be_compiled_names_its_sequences_alone(compiler: Compiler) -> None:
    scheduler = make_scheduler(constraints=compiler.holds)
    bad, good = under("bad"), under("good")
    scheduler.add(bad)
    scheduler.add(good)
    failed = compiler.holds.failed(StructuredOutputsParams(regex="bad"))
    assert failed == [bad]
    scheduler.finish(bad)
    compiler.finish(scheduler, "good")
    run(scheduler, PretendWorker())
    assert good.finish_reason == "length"
    scheduler.add(under("bad", "again"))
    assert compiler.started == ["bad", "good", "bad"]


def test_large_constraints_of_one_tenant_leave_room_for_small_ones_and_for_others(compiler: Compiler) -> None:
    scheduler = make_scheduler(constraints=compiler.holds)
    large = [letter * LARGE for letter in "abc"]
    for regex in large:
        scheduler.add(under(regex, tenant="greedy"))
    scheduler.add(under("small", tenant="other"))
    scheduler.add(under("d" * LARGE, tenant="other"))
    assert compiler.started == [large[0], "small"]
    compiler.finish(scheduler, large[0])
    assert compiler.started[2:] == ["b" * LARGE]  # the greedy tenant came first, and has had its turn with this
    compiler.finish(scheduler, large[1])
    assert compiler.started[3:] == ["d" * LARGE]


def test_what_is_held_has_a_bound_and_is_released_after_the_steps(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constraint_holds, "MAX_AHEAD", 3)
    monkeypatch.setattr(constraint_holds, "MAX_IDLE", 1)
    scheduler, worker = make_scheduler(constraints=compiler.holds), PretendWorker()
    requests = [under(f"r{number}", max_tokens=2) for number in range(6)]
    for request in requests:
        scheduler.add(request)
    for number in range(3):
        compiler.finish(scheduler, f"r{number}")
    assert compiler.started == ["r0", "r1", "r2"]
    output = scheduler.schedule()
    assert output is not None
    assert [new.request_id for new in output.new_requests] == ["r0/0", "r1/0", "r2/0"]
    assert compiler.started[3:] == ["r3", "r4"]
    assert compiler.released == []  # the step that brings them has not been answered
    scheduler.update(worker.execute(output))
    assert compiler.released == ["r0", "r1"]
    for number in range(3, 6):
        compiler.finish(scheduler, f"r{number}")
    run(scheduler, worker)
    assert [request.finish_reason for request in requests] == ["length"] * 6


def test_a_preempted_sequence_waits_for_its_constraint_again(compiler: Compiler) -> None:
    scheduler, worker = make_scheduler(constraints=compiler.holds), PretendWorker()
    scheduler.add(request := under("r", max_tokens=8, ignore_eos=True))
    compiler.finish(scheduler, "r")
    for _ in range(3):
        one_step(scheduler, worker)
    scheduler.park(request)
    scheduler.unpark(request)
    run(scheduler, worker)
    assert compiler.started == ["r"]
    assert request.output_token_ids == expected_output(list(request.prompt_token_ids), 8)


def test_a_constraint_that_ends_the_worker_is_held_against_its_request_alone(compiler: Compiler) -> None:
    def crash(scheduler: Scheduler) -> tuple[list[Request], list[Request]]:
        poisonous = scheduler.blame()
        return poisonous, scheduler.take_all()

    victim, deadly = make_request("victim", 6, max_tokens=30, ignore_eos=True), under("deadly")
    requests = [victim, deadly]
    for _ in range(MAX_CRASHES):
        compiler = Compiler()
        scheduler = make_scheduler(constraints=compiler.holds)
        for request in requests:
            scheduler.add(request)
        scheduler.schedule()
        poisonous, requests = crash(scheduler)
        assert poisonous == []
    assert {request.num_crashes for request in requests} == {MAX_CRASHES}
    scheduler, worker = make_scheduler(constraints=(compiler := Compiler()).holds), PretendWorker()
    for request in sorted(requests, key=lambda request: request is deadly):
        scheduler.add(request)
    assert compiler.started == []
    one_step(scheduler, worker)  # the first suspect alone, and nothing is compiled meanwhile
    assert compiler.started == []
    scheduler.schedule()
    assert compiler.started == ["deadly"] or scheduler.running == [victim]
    while compiler.started != ["deadly"]:
        one_step(scheduler, worker)
    assert scheduler.schedule() is None, "only the suspect is computed"
    poisonous, _ = crash(scheduler)
    assert poisonous == [deadly]
    assert victim.num_crashes == 0


def test_what_is_held_for_the_next_request_has_a_size(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constraint_holds, "MAX_IDLE_BYTES", 5000)
    scheduler, worker = make_scheduler(constraints=compiler.holds), PretendWorker()
    regexes = [letter * 2000 for letter in "abcd"]
    for regex in regexes:
        scheduler.add(under(regex, max_tokens=2))
        compiler.finish(scheduler, regex)
        run(scheduler, worker)
    assert compiler.released == regexes[:2]


def test_what_is_held_for_the_next_request_is_released_at_rest(compiler: Compiler) -> None:
    scheduler, worker = make_scheduler(constraints=compiler.holds), PretendWorker()
    assert not scheduler.forget_constraints()
    for regex in "ab":
        scheduler.add(under(regex, max_tokens=2))
        compiler.finish(scheduler, regex)
    one_step(scheduler, worker)
    assert not scheduler.forget_constraints(), "there are sequences"
    run(scheduler, worker)
    assert compiler.released == []
    assert scheduler.forget_constraints()
    assert compiler.released == ["a", "b"]
    assert len(worker.logs) == 2, "what has ended is in its slots until a step says so"
    one_step(scheduler, worker)
    assert not worker.logs
    assert scheduler.schedule() is None
    assert not scheduler.forget_constraints()
    again = under("a", "again", max_tokens=2)
    scheduler.add(again)
    compiler.finish(scheduler, "a")
    run(scheduler, worker)
    assert (compiler.started, again.finish_reason) == (["a", "b", "a"], "length")
