"""The step loop of one group: how many steps are in flight, what the watchdog and the timeline hear, and adapters."""

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from pagoda_common.config.engine_config import CacheConfig, EngineConfig, SchedulerConfig
from pagoda_common.config.lora_config import LoraConfig
from pagoda_common.config.speculative_config import SpeculativeConfig
from pagoda_common.errors import Code, InvalidRequest, ModelLoadError, NotReady, PagodaError
from pagoda_common.params.lora_adapter import LoraAdapter
from pagoda_common.params.structured_outputs import StructuredOutputsParams
from pagoda_scheduler.core.request import Request
from pagoda_scheduler.core.step import BadSlot, ModelRunnerOutput, SchedulerOutput, StepTimings
from pagoda_scheduler.core.step_result import StepResult
from pagoda_scheduler.engine import engine_core
from pagoda_scheduler.engine.engine_core import SHORT_STEP_NS, EngineCore
from pagoda_scheduler.kv.cache_group import CacheGroup, CacheSizes
from pagoda_scheduler.observability.timeline import Timeline
from tests.unit.scheduler.stories import make_request


class Group:
    """A worker group whose answers the test releases."""

    def __init__(self) -> None:
        self.sent: list[SchedulerOutput] = []
        self.answers: asyncio.Queue[ModelRunnerOutput] = asyncio.Queue()
        self.read: list[tuple[int, str]] = []
        self.errors: list[PagodaError] = []
        """What reading an adapter fails with, one after the other."""
        self.gate = asyncio.Event()
        self.gate.set()

    def send(self, output: SchedulerOutput) -> None:
        self.sent.append(output)

    async def receive(self) -> ModelRunnerOutput:
        return await self.answers.get()

    async def add_lora(self, number: int, adapter: LoraAdapter) -> None:
        self.read.append((number, adapter.name))
        await self.gate.wait()
        if self.errors:
            raise self.errors.pop(0)


class Compiler:
    """Compiles a constraint when the test releases it."""

    def __init__(self, error: PagodaError | None = None) -> None:
        self.error = error
        self.held: list[StructuredOutputsParams] = []
        self.released: list[StructuredOutputsParams] = []

    async def hold_constraint(self, params: StructuredOutputsParams) -> None:
        self.held.append(params)
        if self.error is not None:
            raise self.error

    def release_constraint(self, params: StructuredOutputsParams) -> None:
        self.released.append(params)


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


def core_of(
    group: Group, delivered: list[StepResult] | None = None, *, config: EngineConfig | None = None, **more: Any
) -> EngineCore:
    return EngineCore(
        config=config or config_of(),
        executor=group,
        sizes=CacheSizes(100),
        max_model_len=64,
        deliver=(delivered if delivered is not None else []).append,
        **more,
    )


def config_of(*, lora: LoraConfig | None = None, **scheduler: Any) -> EngineConfig:
    return EngineConfig(
        cache=CacheConfig(block_size=4), scheduler=SchedulerConfig(**scheduler), lora=lora or LoraConfig()
    )


def answer(output: SchedulerOutput, *, compute_ns: int | None = None, token: int = 5) -> ModelRunnerOutput:
    timings = None if compute_ns is None else StepTimings(prepare_ns=1, forward_ns=compute_ns - 3, sample_ns=2)
    return ModelRunnerOutput(output.step, None, [token] * len(output.slots), timings=timings)


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def answer_all(core: EngineCore, group: Group) -> None:
    """Answer every step that is in flight, until the group rests."""
    while len(group.sent) > core.num_steps:
        group.answers.put_nowait(answer(group.sent[core.num_steps]))
        await settle()


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

CONSTRAINT = StructuredOutputsParams(regex="[ab]+")


def constrained(name: str) -> Request:
    return make_request(name, 5, structured_outputs=CONSTRAINT)


async def test_a_sequence_enters_a_step_when_its_constraint_is_compiled() -> None:
    group, compiler = Group(), Compiler()
    core = core_of(group, compiler=compiler)
    run = asyncio.create_task(core.run())
    core.add(constrained("a"))
    core.step()
    assert (group.sent, compiler.held) == ([], [])
    await settle()
    assert compiler.held == [CONSTRAINT]
    assert [new.request_id for new in group.sent[0].new_requests] == ["a/0"]
    run.cancel()
    await asyncio.wait([run])


async def test_a_constraint_that_cannot_be_compiled_ends_those_that_wait_for_it() -> None:
    group, delivered = Group(), list[StepResult]()
    core = core_of(group, delivered, compiler=Compiler(InvalidRequest("no such grammar", field="regex")))
    requests, other = [constrained("a"), constrained("b")], make_request("c", 5)
    run = asyncio.create_task(core.run())
    for request in (*requests, other):
        core.add(request)
    await settle()
    assert [result.finished for result in delivered] == [requests]
    assert [result.step for result in delivered] == [0]
    for request in requests:
        assert (request.finish_reason, request.is_finished) == ("error", True)
        assert isinstance(request.error, InvalidRequest)
    assert not other.is_finished
    run.cancel()
    await asyncio.wait([run])


async def test_a_worker_that_has_said_nothing_of_a_constraint_meets_it_in_a_step() -> None:
    group = Group()
    core = core_of(group, compiler=Compiler(NotReady("gone")))
    run = asyncio.create_task(core.run())
    core.add(constrained("a"))
    await settle()
    assert [new.request_id for new in group.sent[0].new_requests] == ["a/0"]
    run.cancel()
    await asyncio.wait([run])


async def test_what_a_worker_forgets_at_rest_wakes_the_loop() -> None:
    group, compiler = Group(), Compiler()
    core = core_of(group, compiler=compiler, config=config_of(async_scheduling=False))
    run = asyncio.create_task(core.run())
    assert not core.forget_constraints()
    request = constrained("a")
    core.add(request)
    await settle()
    core.finish(request)
    await answer_all(core, group)
    num_sent = len(group.sent)
    assert core.forget_constraints()
    await settle()
    assert (compiler.released, len(group.sent)) == ([CONSTRAINT], num_sent + 1)
    assert group.sent[-1].slots == []
    assert not core.forget_constraints()
    run.cancel()
    await asyncio.wait([run])


# Adapters.

LORA = LoraConfig(enable_lora=True, max_loras=2, max_cpu_loras=3)
SQL = LoraAdapter(name="sql", path="/adapters/sql")
CHAT = LoraAdapter(name="chat", path="/adapters/chat")


def adapting_core(group: Group, delivered: list[StepResult] | None = None) -> EngineCore:
    return core_of(group, delivered, config=config_of(lora=LORA), can_adapt=True)


@pytest.mark.parametrize(
    ("lora", "can_adapt", "has_adapters"), [(LORA, True, True), (LORA, False, False), (None, True, False)]
)
async def test_a_group_adapts_where_it_can_and_is_to(
    lora: LoraConfig | None, can_adapt: bool, has_adapters: bool
) -> None:
    core = core_of(Group(), config=config_of(lora=lora), can_adapt=can_adapt)
    assert (core.adapters is not None, core.scheduler.adapters is core.adapters) == (has_adapters, True)
    if core.adapters is not None:
        assert (core.adapters._max_loras, core.adapters._max_host) == (2, 3)
    else:
        with pytest.raises(PagodaError, match="the worker group takes no adapters") as caught:
            await core.load_adapter(SQL)
        assert caught.value.code is Code.UNIMPLEMENTED


async def test_an_adapter_is_read_once_and_waited_for() -> None:
    group = Group()
    core = adapting_core(group)
    assert core.adapters is not None
    group.gate.clear()
    first = asyncio.create_task(core.load_adapter(SQL))
    second = asyncio.create_task(core.load_adapter(SQL))
    await settle()
    assert (group.read, first.done(), second.done(), core.adapters.is_loaded(SQL)) == (
        [(1, "sql")],
        False,
        False,
        False,
    )
    group.gate.set()
    await asyncio.wait_for(asyncio.gather(first, second), 240)
    assert core.adapters.is_loaded(SQL)
    await core.load_adapter(SQL)
    assert group.read == [(1, "sql")]
    assert core._loading == {}


async def test_who_waits_for_an_adapter_does_not_wait_for_another_one() -> None:
    group = Group()
    core = adapting_core(group)
    await core.load_adapter(SQL)
    group.gate.clear()
    slow = asyncio.create_task(core.load_adapter(CHAT))
    await settle()
    await asyncio.wait_for(core.load_adapter(SQL), 240)
    assert not slow.done()
    group.gate.set()
    await slow
    assert group.read == [(1, "sql"), (2, "chat")]


async def test_an_adapter_that_cannot_be_read_ends_the_sequences_that_wait_for_it() -> None:
    group, delivered = Group(), list[StepResult]()
    core = adapting_core(group, delivered)
    group.errors.append(ModelLoadError("no such file"))
    run = asyncio.create_task(core.run())
    waiting, other = make_request("a", 5, lora=SQL), make_request("b", 5)
    core.add(waiting)
    core.add(other)
    await settle()
    assert [(result.step, result.finished) for result in delivered] == [(0, [waiting])]
    assert waiting.error is not None
    assert (waiting.finish_reason, waiting.error.message, other.is_finished) == ("error", "no such file", False)
    with_adapter = make_request("c", 5, lora=SQL)
    core.add(with_adapter)  # a later one has it tried again
    await answer_all(core, group)
    assert group.read == [(1, "sql"), (2, "sql")]
    run.cancel()
    await asyncio.wait([run])


@pytest.mark.parametrize("code", [Code.UNAVAILABLE, Code.CANCELLED])
async def test_an_adapter_that_a_lost_worker_did_not_read_ends_nothing(
    code: Code, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert engine_core.LOAD_RETRY_S == 0.5
    monkeypatch.setattr(engine_core, "LOAD_RETRY_S", 0.0)
    group, delivered = Group(), list[StepResult]()
    core = adapting_core(group, delivered)
    group.errors.append(PagodaError("connection lost", code=code))
    run = asyncio.create_task(core.run())
    request = make_request("a", 5, lora=SQL)
    core.add(request)
    await settle()
    await settle()
    assert (delivered, request.is_finished, group.read) == ([], False, [(1, "sql"), (2, "sql")])
    assert [new.lora_number for new in group.sent[0].new_requests] == [2]
    run.cancel()
    await asyncio.wait([run])


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
