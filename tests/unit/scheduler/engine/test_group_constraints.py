"""Constraints and adapters of one group: who waits for them, and what ends that wait."""

import asyncio

import pytest

from pagoda_common.config.lora_config import LoraConfig
from pagoda_common.errors import Code, InvalidRequest, ModelLoadError, NotReady, PagodaError
from pagoda_common.params.lora_adapter import LoraAdapter
from pagoda_common.params.structured_outputs import StructuredOutputsParams
from pagoda_scheduler.core.request import Request
from pagoda_scheduler.core.step_result import StepResult
from pagoda_scheduler.engine import engine_core
from pagoda_scheduler.engine.engine_core import EngineCore
from tests.unit.scheduler.engine.step_loops import Group, answer_all, config_of, core_of, settle
from tests.unit.scheduler.stories import make_request


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
        with pytest.raises(PagodaError, match="the worker group does not support adapters") as caught:
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
