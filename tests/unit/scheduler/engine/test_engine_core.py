"""The step loop of one group: how many steps are in flight, and what the watchdog and the timeline hear."""

import asyncio
import time
from types import SimpleNamespace

import pytest

from pagoda_common.config.engine_config import CacheConfig, EngineConfig
from pagoda_common.config.speculative_config import SpeculativeConfig
from pagoda_common.errors import Code, InvalidRequest, NotReady, PagodaError
from pagoda_scheduler.core.step import BadSlot, ModelRunnerOutput, SchedulerOutput
from pagoda_scheduler.core.step_result import StepResult
from pagoda_scheduler.engine import engine_core
from pagoda_scheduler.engine.engine_core import SHORT_STEP_NS
from pagoda_scheduler.kv.cache_group import CacheGroup
from pagoda_scheduler.observability.timeline import Timeline
from tests.unit.scheduler.engine.step_loops import Group, answer, answer_all, config_of, core_of, settle
from tests.unit.scheduler.stories import make_request


class Heard(Timeline):
    """A timeline that notes what it hears of steps."""

    def __init__(self) -> None:
        self.steps: list[tuple[str, int]] = []
        self.durations: list[int] = []

    def scheduled(self, output: SchedulerOutput, schedule_ns: int) -> None:
        self.steps.append(("scheduled", output.step))
        self.durations.append(schedule_ns)

    def answered(self, output: ModelRunnerOutput) -> None:
        self.steps.append(("answered", output.step))

    def delivered(self, output: ModelRunnerOutput, deliver_ns: int) -> None:
        self.steps.append(("delivered", output.step))
        self.durations.append(deliver_ns)


@pytest.mark.parametrize(("is_async", "num_steps"), [(True, 2), (False, 1)])
async def test_two_steps_are_in_flight_and_one_without_async_scheduling(is_async: bool, num_steps: int) -> None:
    group = Group()
    core = core_of(group, config=config_of(async_scheduling=is_async))
    core.add(make_request("a", 5, max_tokens=20))
    core.step()
    assert [output.step for output in group.sent] == list(range(1, num_steps + 1))
    core.step()
    assert len(group.sent) == num_steps


@pytest.mark.parametrize(
    ("compute_ns", "is_async", "num_in_flight"),
    [
        (SHORT_STEP_NS - 1, True, 3),
        (SHORT_STEP_NS, True, 2),
        (None, True, 2),
        (SHORT_STEP_NS - 1, False, 1),
    ],
)
async def test_of_short_steps_one_more_is_sent_ahead(
    compute_ns: int | None, is_async: bool, num_in_flight: int
) -> None:
    assert SHORT_STEP_NS == 4_000_000
    group = Group()
    core = core_of(group, config=config_of(async_scheduling=is_async))
    core.add(make_request("a", 5, max_tokens=20, ignore_eos=True))
    core.step()
    first = answer(group.sent[0], compute_ns=compute_ns)
    core._note_answer(first)
    core.step(first)
    assert len(group.sent) - 1 == num_in_flight
    assert core.num_steps == 1


async def test_a_long_step_ends_the_sending_ahead_of_one_more() -> None:
    group = Group()
    core = core_of(group)
    core.add(make_request("a", 5, max_tokens=20, ignore_eos=True))
    core.step()
    for compute_ns in (SHORT_STEP_NS - 1, SHORT_STEP_NS, SHORT_STEP_NS):
        taken = answer(group.sent[core.num_steps], compute_ns=compute_ns)
        core._note_answer(taken)
        core.step(taken)
    assert (core.num_steps, len(group.sent)) == (3, 5)


async def test_tokens_that_were_taken_before_a_failure_are_delivered(monkeypatch: pytest.MonkeyPatch) -> None:
    group, delivered, heard = Group(), list[StepResult](), Heard()
    core = core_of(group, delivered, timeline=heard)
    core.add(make_request("a", 5))
    core.step()

    def fail(output: ModelRunnerOutput, result: StepResult) -> None:
        result.token_ids.append(7)
        raise ValueError("a bug")

    monkeypatch.setattr(core.scheduler, "update", fail)
    with pytest.raises(ValueError, match="a bug"):
        core.step(answer(group.sent[0]))
    assert [(result.step, result.token_ids) for result in delivered] == [(1, [7])]
    assert heard.steps == [("scheduled", 1), ("scheduled", 2), ("answered", 1)]


async def test_a_timeline_hears_of_each_step_in_its_order() -> None:
    group, heard = Group(), Heard()
    core = core_of(group, timeline=heard, config=config_of(async_scheduling=False))
    core.add(make_request("a", 5, max_tokens=2, ignore_eos=True))
    core.step()
    for output in group.sent:  # grows meanwhile
        core._note_answer(answer(output))
        core.step(answer(output))
    told = [(what, step) for step in (1, 2) for what in ("scheduled", "answered", "delivered")]
    # An empty third step tells the worker that the slot is free.
    assert [each for each in heard.steps if each[1] < 3] == told
    assert min(heard.durations) >= 0


async def test_a_warm_up_step_is_no_ones_and_in_no_metrics() -> None:
    group, delivered, heard = Group(), list[StepResult](), Heard()
    core = core_of(group, delivered, timeline=heard)
    run = asyncio.create_task(core.run())
    warm_up = asyncio.create_task(core.warm_up())
    await settle()
    (new,) = group.sent[0].new_requests
    assert (new.request_id, list(new.prompt_token_ids), new.pooling) == ("warm-up/0", [0], None)
    params = new.sampling_params
    assert (params.temperature, params.max_tokens, params.seed, params.ignore_eos) == (0.0, 1, 0, True)
    group.answers.put_nowait(answer(group.sent[0]))
    await asyncio.wait_for(warm_up, 240)
    assert (delivered, heard.steps) == ([], [])
    core.add(make_request("a", 5, max_tokens=1))
    await settle()
    await answer_all(core, group)
    assert [request.request_id for result in delivered for request in result.finished] == ["a"]
    assert heard.steps[0][0] == "scheduled"
    assert ("delivered", core.num_steps) in heard.steps
    run.cancel()
    await asyncio.wait([run])


async def test_a_model_that_makes_no_text_is_warmed_up_by_an_embedding() -> None:
    group = Group()
    core = core_of(group, groups=(CacheGroup("none"),))
    run = asyncio.create_task(core.run())
    warm_up = asyncio.create_task(core.warm_up())
    await settle()
    assert group.sent[0].new_requests[0].pooling is not None
    slot = group.sent[0].slots[0]
    group.answers.put_nowait(ModelRunnerOutput(1, [0], [], pooled={slot: b"\0\0\0\0"}))
    await asyncio.wait_for(warm_up, 240)
    run.cancel()
    await asyncio.wait([run])


async def test_a_warm_up_that_fails_says_why() -> None:
    group = Group()
    core = core_of(group)
    run = asyncio.create_task(core.run())
    warm_up = asyncio.create_task(core.warm_up())
    await settle()
    bad = BadSlot(group.sent[0].slots[0], int(Code.INTERNAL), "logits are not numbers")
    group.answers.put_nowait(ModelRunnerOutput(1, [0], [], bad_slots=[bad]))
    with pytest.raises(PagodaError, match="logits are not numbers"):
        await asyncio.wait_for(warm_up, 240)
    run.cancel()
    await asyncio.wait([run])


# Silence, and the watchdog.


class Clock:
    """The monotonic clock, set by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ns = 10**12
        monkeypatch.setattr(engine_core.time, "monotonic_ns", lambda: self.now_ns)


async def test_silence_counts_from_the_last_answer_or_the_first_request(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, group = Clock(monkeypatch), Group()
    core = core_of(group)
    clock.now_ns += 5_000_000_000
    assert core.silence_ms == 0, "there is nothing to do"
    core.add(make_request("a", 5, max_tokens=20, ignore_eos=True))
    clock.now_ns += 7_900_000
    assert core.silence_ms == 7
    core.add(make_request("b", 5, max_tokens=20))
    assert core.silence_ms == 7, "there was work before"
    core.step()
    assert core.silence_ms == 0, "nothing was in flight before"
    clock.now_ns += 3_000_000
    taken = answer(group.sent[0])
    assert core.silence_ms == 3
    core._note_answer(taken)
    core.step(taken)
    assert core.silence_ms == 0
    clock.now_ns += 2_000_000
    assert core.silence_ms == 2


async def test_a_sequence_that_is_parked_makes_no_silence_and_begins_anew_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, group = Clock(monkeypatch), Group()
    core = core_of(group)
    request = make_request("a", 5)
    core.add(request)
    core.park(request)
    clock.now_ns += 9_000_000_000
    assert core.silence_ms == 0
    core.unpark(request)
    clock.now_ns += 1_000_000
    assert core.silence_ms == 1


async def test_the_watchdog_hears_how_long_a_step_took_and_how_many_tokens_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, group = Clock(monkeypatch), Group()
    core = core_of(group, config=config_of(step_watchdog_s=1.5, async_scheduling=False))
    assert core._watchdog is not None
    assert core._watchdog.bound_s == 300.0
    core.add(make_request("a", 10, max_tokens=20, ignore_eos=True))
    clock.now_ns += 60_000_000_000  # before the step: of no account
    core.step()
    assert list(core._watchdog._in_flight) == [10]
    clock.now_ns += 200_000_000
    taken = answer(group.sent[0])
    core._note_answer(taken)
    assert core._watchdog.bound_s == pytest.approx(20 * 0.2)
    core.step(taken)
    assert list(core._watchdog._in_flight) == [1]


async def test_without_a_watchdog_no_step_is_too_late() -> None:
    core = core_of(Group(), config=config_of(step_watchdog_s=0.0))
    assert core._watchdog is None
    await asyncio.wait_for(core._watch(), 240)


async def test_a_group_that_hangs_ends_its_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    assert engine_core.WATCH_PERIOD_S == 0.25
    monkeypatch.setattr(engine_core, "WATCH_PERIOD_S", 0.001)
    group = Group()
    core = core_of(group)
    assert core._watchdog is not None
    core._watchdog.sent(1)
    core._watchdog.answered(0.01)
    core._watchdog.sent(1)
    core._watchdog._age_s = 2.01
    with pytest.raises(NotReady, match=r"a step was not answered within 2\.0 s: the worker hangs"):
        await asyncio.wait_for(core._watch(), 240)


async def test_each_look_of_the_watchdog_counts_the_time_since_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    core = core_of(Group())
    assert core._watchdog is not None
    core._watchdog.sent(1)
    core._watchdog.answered(0.01)
    core._watchdog.sent(1)
    assert core._watchdog.bound_s == 2.0
    looks = [100.0 + 0.25 * number for number in range(100)]
    left = iter(looks)
    monkeypatch.setattr(engine_core, "WATCH_PERIOD_S", 0.0)
    monkeypatch.setattr(engine_core, "time", SimpleNamespace(monotonic=lambda: next(left)))
    with pytest.raises(NotReady):
        await core._watch()
    assert next(left) - looks[0] == 2.0 + 2 * 0.25, "the first look after its bound, and one that this line takes"


async def test_a_sequence_waits_from_its_arrival_to_its_first_step_by_the_wall_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    core, request = core_of(Group()), make_request("a", 5, arrival_ns=1_700_000_000_000_000_000)
    core.add(request)
    monkeypatch.setattr(time, "time_ns", lambda: 1_700_000_003_000_000_000)
    core.step()
    assert request.admitted_ns - request.arrival_ns == 3_000_000_000


# Constraints.


# What the parts of a group are made with.


@pytest.mark.parametrize(("can_speculate", "num_tokens"), [(True, 3), (False, 0)])
async def test_a_group_speculates_where_it_can(can_speculate: bool, num_tokens: int) -> None:
    config = EngineConfig(
        cache=CacheConfig(block_size=4), speculative=SpeculativeConfig(method="ngram", num_speculative_tokens=3)
    )
    core = core_of(Group(), config=config, can_speculate=can_speculate)
    assert core.scheduler.speculation.num_speculative_tokens == num_tokens


async def test_what_the_worker_has_measured_reaches_the_scheduler() -> None:
    core = core_of(Group(), eos_token_ids=[7, 9], vocab_size=50, swap_block_ns=11)
    assert core.eos_token_ids == (7, 9)
    assert (core.scheduler.kv.pool.num_blocks, core.scheduler.kv.block_size, core.scheduler.max_model_len) == (
        100,
        4,
        64,
    )
    with pytest.raises(InvalidRequest, match="prompt_token_ids has token 50, the vocabulary has 50"):
        core.scheduler.admission.check_fits([make_request("a", [50])])
    core.scheduler.admission.check_fits([make_request("a", [49])])


@pytest.mark.parametrize("change", ["add", "park", "unpark", "finish", "refuse"])
async def test_each_change_wakes_the_loop(change: str) -> None:
    core = core_of(Group())
    request = make_request("a", 5)
    core.add(request)
    if change == "unpark":
        core.park(request)
    core._wake.clear()
    if change == "add":
        core.add(make_request("b", 5))
    elif change == "refuse":
        core._refuse([request], InvalidRequest("no such grammar"))
    else:
        getattr(core, change)(request)
    assert core._wake.is_set()


async def test_a_sequence_that_resumes_goes_to_the_front() -> None:
    core = core_of(Group())
    requests = [make_request(name, 5) for name in "abc"]
    core.add(requests[0])
    core.add(requests[1], at_front=True)
    core.add(requests[2])
    assert list(core.scheduler.waiting) == [requests[1], requests[0], requests[2]]
