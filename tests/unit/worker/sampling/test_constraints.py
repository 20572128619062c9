"""Constraints with a pretend grammar: what a sequence may sample, token by token, and grammars that are kept."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from pagoda_common.errors import InvalidRequest, ModelLoadError, PagodaError, StaleEpoch
from pagoda_common.params.sampling_params import SamplingParams
from pagoda_common.params.structured_outputs import StructuredOutputsParams
from pagoda_worker.rpc.hold_constraint import compiled
from pagoda_worker.sampling import grammars as module
from pagoda_worker.sampling import structured
from pagoda_worker.sampling.grammars import Grammars, no_compiler
from pagoda_worker.sampling.structured import NUM_FILL_THREADS, ConstrainedSequence, Constraints, _set
from pagoda_worker.steps.step import NewRequest, StepInput


class Matcher:
    """Takes even tokens alone."""

    def __init__(self) -> None:
        self.taken: list[int] = []

    def consume_token(self, token_id: int) -> bool:
        self.taken.append(token_id)
        return token_id % 2 == 0

    def get_error(self) -> str:
        return "  odd token  "


def sequence_of(matcher: Matcher | PagodaError, **more: Any) -> ConstrainedSequence:
    def compile_it() -> Any:
        if isinstance(matcher, PagodaError):
            raise matcher
        return matcher

    fields: dict[str, Any] = {"params": constraint(), "end_token_ids": frozenset({7}), "start_run": (), "pending": []}
    return ConstrainedSequence(compile=compile_it, **{**fields, **more})


def test_tokens_so_far_are_shown_to_the_matcher_once() -> None:
    matcher = Matcher()
    sequence = sequence_of(matcher, pending=[2, 4])
    sequence.catch_up()
    assert (matcher.taken, sequence.pending, sequence.is_started) == ([2, 4], [], True)
    sequence.pending.append(6)
    sequence.catch_up()
    assert (matcher.taken, sequence.problem) == ([2, 4, 6], None)


def test_an_end_token_ends_it_and_is_no_part_of_it() -> None:
    matcher = Matcher()
    sequence = sequence_of(matcher, pending=[2, 7, 9])
    sequence.catch_up()
    assert (matcher.taken, sequence.is_ended, sequence.problem) == ([2], True, None)


def test_a_token_that_does_not_fit_is_a_problem() -> None:
    matcher = Matcher()
    sequence = sequence_of(matcher, pending=[2, 3, 4])
    sequence.catch_up()
    assert matcher.taken == [2, 3]
    assert sequence.problem == "the output cannot continue under structured_outputs: odd token"


@pytest.mark.parametrize(
    ("output", "is_started", "taken"),
    [
        ([], False, []),
        ([5], False, []),
        ([5, 6], True, []),
        ([5, 5, 6, 8], True, [8]),
        ([6, 5, 8, 6], False, []),
        ([7, 5, 6, 2, 4], True, [2, 4]),
    ],
)
def test_a_constraint_begins_after_its_start_tokens(output: list[int], is_started: bool, taken: list[int]) -> None:
    matcher = Matcher()
    sequence = sequence_of(matcher, start_run=(5, 6), pending=output)
    sequence.catch_up()
    assert (sequence.is_started, sequence.is_ended, matcher.taken) == (is_started, False, taken)


def test_what_cannot_be_compiled_is_a_problem_and_is_not_tried_again() -> None:
    sequence = sequence_of(InvalidRequest("no such grammar"), pending=[2])
    sequence.catch_up()
    sequence.catch_up()
    assert (sequence.problem, sequence.matcher, sequence.pending) == ("no such grammar", None, [])


def test_bits_are_set_and_cleared_in_their_word() -> None:
    row = np.zeros(3, dtype=np.uint32)
    _set(row, frozenset({0, 31, 32, 95}), True)
    assert row.tolist() == [0x80000001, 1, 0x80000000]
    _set(row, frozenset({31, 32, 64}), False)
    assert row.tolist() == [1, 0, 0x80000000]


def constraint(text: str = "a", **more: Any) -> StructuredOutputsParams:
    return StructuredOutputsParams(regex=text, **more)


def request(slot: int, params: StructuredOutputsParams | None, **more: Any) -> NewRequest:
    return NewRequest(
        slot=slot,
        request_id=str(slot),
        prompt_token_ids=np.array([1]),
        sampling_params=SamplingParams(structured_outputs=params, stop_token_ids=(9, 500)),
        block_ids=np.array([0]),
        **more,
    )


class Kept:
    """Grammars that are asked for."""

    def __init__(self) -> None:
        self.asked: list[str | None] = []

    def template(self, params: StructuredOutputsParams) -> None:
        self.asked.append(params.regex)

    def matcher(self, params: StructuredOutputsParams) -> Any:
        return Matcher()


def constraints_of(kept: Any) -> Constraints:
    return Constraints(grammars=kept, max_num_seqs=4, vocab_size=50, eos_token_ids=(3, 99))


def test_constrained_slots_are_remembered_until_they_are_freed_or_filled_again() -> None:
    kept, in_use = Kept(), np.ones(4, dtype=np.bool_)
    constraints = constraints_of(kept)
    assert constraints.is_empty
    in_use[2] = False
    constraints.apply(
        StepInput(
            new_requests=[
                request(0, constraint("x"), eos_token_ids=(5,), output_token_ids=np.array([8, 8]), is_beam=True),
                request(1, None),
                request(2, constraint("refused")),
                request(3, constraint("y", start_after_token_ids=(6,))),
                request(9, constraint("nowhere")),
            ]
        ),
        in_use,
    )
    assert (kept.asked, list(constraints._sequences)) == (["x", "y"], [0, 3])
    first, last = constraints._sequences[0], constraints._sequences[3]
    assert (first.end_token_ids, first.pending, first.is_beam, first.start_run) == ({5, 9}, [8, 8], True, ())
    assert (last.end_token_ids, last.pending, last.is_beam, last.start_run) == ({3, 9}, [], False, (6,))
    constraints.advance(np.array([3, 1, 0]), np.array([40, 41, 42]))
    assert (first.pending, last.pending) == ([8, 8, 42], [40])
    assert constraints.problem_of(1) is None
    assert constraints.problem_of(0) == "structured_outputs and the other parameters together leave no token to sample"
    first.problem = "why"
    assert constraints.problem_of(0) == "why"
    constraints.apply(StepInput(freed_slots=np.array([0, 1])), in_use)
    assert (list(constraints._sequences), constraints._is_constrained.tolist()) == ([3], [False] * 3 + [True])
    constraints.apply(StepInput(new_requests=[request(3, None)]), in_use)
    assert (constraints.is_empty, constraints._is_constrained.any()) == (True, False)
    assert constraints.begin(np.array([0, 3])) is None


def test_rows_without_a_matcher_may_sample_nothing() -> None:
    class Refuses(Kept):
        def matcher(self, params: StructuredOutputsParams) -> Any:
            raise InvalidRequest("no such grammar")

    constraints = constraints_of(Refuses())
    constraints.apply(StepInput(new_requests=[request(2, constraint(), is_beam=True)]), np.ones(4, dtype=np.bool_))
    assert constraints.begin(np.array([0, 1])) is None
    future = constraints.begin(np.array([1, 2]))
    assert future is not None
    mask = future.result(240)
    assert (mask.rows.tolist(), mask.bits.tolist(), mask.is_beam.tolist()) == ([1], [[0] * 7], [True])
    assert constraints.problem_of(2) == "no such grammar"


# Grammars.


def test_the_numbers_are_those_of_the_docs() -> None:
    assert (module.MAX_KEPT, module.MAX_KEPT_BYTES) == (32, 128 * 1024)
    assert (module.MAX_WAIT_S, module.MAX_HOLD_S, module.NUM_THREADS, module.NICENESS) == (10.0, 60.0, 2, 5)
    assert NUM_FILL_THREADS == 4


class Bounded:
    """A compiler that compiles at once, or fails."""

    def __init__(self, compile_it: Callable[[StructuredOutputsParams], Any]) -> None:
        self.compiler = object()
        self.compile = compile_it


def grammars_of(compile_it: Callable[[StructuredOutputsParams], Any]) -> Grammars:
    return Grammars(lambda: cast("Any", Bounded(compile_it)))


def copied(name: str) -> Any:
    return SimpleNamespace(deep_copy=lambda: f"copy of {name}")


def test_a_constraint_is_compiled_once_and_copied() -> None:
    seen: list[str | None] = []

    def compile_it(params: StructuredOutputsParams) -> Any:
        seen.append(params.regex)
        return copied(str(params.regex))

    kept = grammars_of(compile_it)
    assert not kept.is_loaded
    assert [kept.matcher(constraint("a")) for _ in range(2)] == ["copy of a"] * 2
    assert (seen, kept.is_loaded) == (["a"], True)
    assert kept.matcher(constraint("b")) == "copy of b"
    assert kept.forget()
    assert not kept.forget()
    kept.matcher(constraint("a"))
    assert seen == ["a", "b", "a"]


def test_what_is_held_is_not_forgotten_however_often_it_is_held() -> None:
    seen: list[str | None] = []
    kept = grammars_of(lambda params: seen.append(params.regex) or copied("x"))
    with kept.held(constraint("a")):
        with kept.held(constraint("a")):
            kept.matcher(constraint("a"))
        assert not kept.forget()
        kept.matcher(constraint("a"))
    assert seen == ["a"]
    assert kept.forget()
    assert kept._num_holders == {}


def test_the_oldest_that_no_one_holds_goes_beyond_the_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = grammars_of(lambda params: copied("x"))
    monkeypatch.setattr(module, "MAX_KEPT", 2)
    keys = {text: constraint(text).grammar_key for text in "abcd"}
    with kept.held(constraint("a")):
        for text in "bcd":
            kept.matcher(constraint(text))
        assert list(kept._templates) == [keys["a"], keys["c"], keys["d"]]
        kept.matcher(constraint("c"))
        assert list(kept._templates) == [keys["a"], keys["d"], keys["c"]]
    assert list(kept._templates) == [keys["d"], keys["c"]]
    assert set(kept._sizes) == set(kept._templates)
    size = constraint("c").num_bytes
    monkeypatch.setattr(module, "MAX_KEPT_BYTES", 2 * size)
    kept.matcher(constraint("c"))
    assert len(kept._templates) == 2
    monkeypatch.setattr(module, "MAX_KEPT_BYTES", 2 * size - 1)
    kept.matcher(constraint("c"))
    assert list(kept._templates) == [keys["c"]]


def test_what_fails_says_why_and_what_is_no_fault_of_its_own_is_tried_again() -> None:
    errors: list[BaseException] = [InvalidRequest("no such grammar")]

    def compile_it(params: StructuredOutputsParams) -> Any:
        raise errors[-1]

    kept = grammars_of(compile_it)
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="no such grammar"):
            kept.matcher(constraint("a"))
    errors.append(StaleEpoch("no model yet"))
    with pytest.raises(InvalidRequest, match="no such grammar"):
        kept.matcher(constraint("a"))
    with pytest.raises(StaleEpoch):
        kept.matcher(constraint("b"))
    errors.append(KeyError("a panic"))
    with pytest.raises(PagodaError, match="structured_outputs could not be compiled: 'a panic'"):
        kept.matcher(constraint("b"))
    with pytest.raises(ModelLoadError, match="takes no structured outputs"):
        no_compiler()


def test_one_that_takes_too_long_leaves_the_others_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_WAIT_S", 0.02)
    gate = threading.Event()

    def compile_it(params: StructuredOutputsParams) -> Any:
        if params.regex == "slow":
            assert gate.wait(240)
        return copied(str(params.regex))

    kept = grammars_of(compile_it)
    thread = kept._thread
    with pytest.raises(InvalidRequest) as caught:
        kept.matcher(constraint("slow"))
    assert (caught.value.message, caught.value.field) == (module.TOO_COMPLEX, "structured_outputs")
    assert kept._thread is not thread
    monkeypatch.setattr(module, "MAX_WAIT_S", 240)
    assert kept.matcher(constraint("quick")) == "copy of quick"
    gate.set()


async def test_a_hold_waits_for_the_compilation_and_gives_up_after_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    class Templates:
        def __init__(self) -> None:
            self.futures: list[Future[Any]] = []
            self.is_loaded = True
            self.given_up = 0

        def template(self, params: Any) -> Future[Any]:
            self.futures.append(Future())
            return self.futures[-1]

        def give_up(self) -> InvalidRequest:
            self.given_up += 1
            return InvalidRequest("too complex")

    kept = Templates()
    waiting = asyncio.create_task(compiled(cast("Any", kept), constraint()))
    await asyncio.sleep(0)
    kept.futures[0].cancel()
    await asyncio.sleep(0.01)
    assert len(kept.futures) == 2, "another one was stuck in its thread"
    kept.futures[1].set_result(None)
    await asyncio.wait_for(waiting, 240)
    failing = asyncio.create_task(compiled(cast("Any", kept), constraint()))
    await asyncio.sleep(0)
    kept.futures[2].set_exception(InvalidRequest("no such grammar"))
    with pytest.raises(InvalidRequest, match="no such grammar"):
        await failing
    monkeypatch.setattr(module, "MAX_HOLD_S", 0.005)
    with pytest.raises(InvalidRequest, match="too complex"):
        await asyncio.wait_for(compiled(cast("Any", kept), constraint()), 240)
    assert kept.given_up == 1
    kept.is_loaded = False
    loading = asyncio.create_task(compiled(cast("Any", kept), constraint()))
    await asyncio.sleep(0.03)
    assert (loading.done(), kept.given_up) == (False, 1), "the tokenizer is read first, however long that takes"
    loading.cancel()


@pytest.mark.parametrize(("niceness", "becomes"), [(0, 5), (5, 5), (10, 10), (19, 19)])
def test_a_thread_that_compiles_never_raises_its_priority(
    niceness: int, becomes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[int] = []
    monkeypatch.setattr(module.os, "getpriority", lambda which, who: niceness)
    monkeypatch.setattr(module.os, "setpriority", lambda which, who, value: given.append(value))
    module._come_last()
    assert given == [becomes]


def test_what_cannot_be_loaded_is_told_to_all_who_wait() -> None:
    kept = Grammars(no_compiler)
    for text in "ab":
        with pytest.raises(ModelLoadError, match="takes no structured outputs"):
            kept.template(constraint(text)).result(60)
    assert kept.is_loaded, "who asks gets the error"


def test_what_waits_behind_two_that_take_too_long_gets_a_new_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()

    def compile_it(params: StructuredOutputsParams) -> Any:
        if params.regex != "quick":
            assert gate.wait(240)
        return copied(str(params.regex))

    kept = grammars_of(compile_it)
    templates = [kept.template(constraint(text)) for text in ("slow", "slower", "quick")]
    monkeypatch.setattr(module, "MAX_WAIT_S", 0.02)
    try:
        with pytest.raises(InvalidRequest):
            kept.matcher(constraint("slow"))
        assert templates[2].cancelled(), "it is asked for again"
        monkeypatch.setattr(module, "MAX_WAIT_S", 60)
        assert kept.matcher(constraint("quick")) == "copy of quick"
    finally:
        gate.set()


def test_only_what_is_compiled_is_dropped() -> None:
    gate = threading.Event()
    kept = grammars_of(lambda params: gate.wait(240) and copied("x"))
    template = kept.template(constraint("a"))
    kept.drop(constraint("a"))
    assert kept.template(constraint("a")) is template, "others wait for it"
    gate.set()
    template.result(240)
    kept.drop(constraint("b"))
    kept.drop(constraint("a"))
    assert (dict(kept._templates), kept._sizes) == ({}, {})


@pytest.mark.parametrize(("num_cpus", "num_threads"), [(1, 1), (4, 1), (8, 2), (16, 4), (64, 4)])
def test_masks_are_filled_by_a_quarter_of_the_cores(
    num_cpus: int, num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(structured, "LLExecutor", lambda count: f"{count} threads")
    monkeypatch.setattr(structured.os, "sched_getaffinity", lambda pid: set(range(num_cpus)))
    assert constraints_of(Kept())._executor == f"{num_threads} threads"


def test_a_compiler_is_of_one_tokenizer_and_its_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(module, "load_tokenizer", lambda model, *, revision: (model, revision))
    monkeypatch.setattr(module, "GrammarCompiler", lambda **options: made.append(options) or "compiler")
    monkeypatch.setattr(module, "BoundedCompiler", lambda *args, **options: made.append((*args, options)))
    module.load_compiler("m", revision="r", vocab_size=9, eos_token_ids=(3, 4))
    sizes = {"vocab_size": 9, "eos_token_ids": (3, 4)}
    assert made == [
        {"tokenizer": ("m", "r"), **sizes},
        ("compiler", {"tokenizer": "m", "revision": "r", **sizes}),
    ]


async def test_who_no_longer_holds_a_constraint_leaves_its_compilation_to_others() -> None:
    template: Future[Any] = Future()
    kept: Any = SimpleNamespace(template=lambda params: template, is_loaded=True)
    holding = asyncio.create_task(compiled(kept, constraint()))
    await asyncio.sleep(0.01)
    holding.cancel()
    await asyncio.wait([holding])
    assert holding.cancelled()
    assert not template.cancelled()
