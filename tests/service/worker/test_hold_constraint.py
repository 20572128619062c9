"""HoldConstraint: a constraint is compiled beside the steps, and kept while the call is open."""

import asyncio
import threading
from typing import Any

import grpc
import grpc.aio
import pytest

from pagoda.v1 import types_pb2, worker_pb2
from pagoda_common.grammar.bounded_grammar import BoundedCompiler
from pagoda_worker.sampling import grammars
from tests.service.worker.conftest import Caller, Served, new_request, tokens_of, until


def hold(caller: Caller, **constraint: Any) -> Any:
    return caller.stub.HoldConstraint(
        worker_pb2.HoldConstraintRequest(
            session_epoch=caller.epoch,
            worker_incarnation=caller.incarnation,
            structured_output=types_pb2.StructuredOutput(**constraint),
        ),
        timeout=240,
    )


class Gate:
    """Compiles nothing that is called "slow" before it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_open = threading.Event()
        self.compiled: list[str] = []
        inner = BoundedCompiler.compile

        def compile(compiler: BoundedCompiler, params: Any) -> Any:
            if params.regex == "slow":
                self.is_open.wait()
            self.compiled.append(str(params.regex))
            return inner(compiler, params)

        monkeypatch.setattr(BoundedCompiler, "compile", compile)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = Gate(monkeypatch)
    yield made
    made.is_open.set()


async def test_steps_run_while_a_constraint_is_compiled(caller: Caller, gate: Gate) -> None:
    slow, quick = hold(caller, regex="slow"), hold(caller, regex="[0-9]")
    await quick.read()  # one that is slow does not keep another waiting
    reading = asyncio.create_task(slow.read())
    assert len(tokens_of(await caller.execute(caller.prefill(new_request())))) == 1
    for _ in range(20):
        assert len(tokens_of(await caller.execute(caller.request([0])))) == 1
    assert not reading.done()
    gate.is_open.set()
    assert await reading == worker_pb2.HoldConstraintResponse()
    sampling = types_pb2.StructuredOutput(regex="slow")
    step = caller.request([0, 1], [1, 5], new_requests=[new_request(1, structured_output=sampling)])
    assert len(tokens_of(await caller.execute(step))) == 2
    assert gate.compiled.count("slow") == 1


async def test_what_is_held_is_not_forgotten_until_it_is_released(
    caller: Caller, served: Served, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars, "MAX_KEPT", 1)
    kept = hold(caller, regex="kept")
    await kept.read()
    for number in range(3):
        passing = hold(caller, regex=f"passing {number}")
        await passing.read()
        passing.cancel()
    again = hold(caller, regex="kept")
    await again.read()
    assert gate.compiled.count("kept") == 1
    kept.cancel()
    again.cancel()
    await until(lambda: not served.worker.grammars._num_holders)
    for number in range(3):
        other = hold(caller, regex=f"others {number}")
        await other.read()
        other.cancel()
    await until(lambda: not served.worker.grammars._num_holders)
    await hold(caller, regex="kept").read()
    assert gate.compiled.count("kept") == 2


async def test_a_bad_constraint_and_one_that_takes_for_ever_are_refused(
    caller: Caller, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    await hold(caller, regex="[a-z]").read()
    monkeypatch.setattr(grammars, "MAX_HOLD_S", 0.3)
    for regex, text in (("(", "regex"), ("slow", "too complex")):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await hold(caller, regex=regex).read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert text in (caught.value.details() or "")
    await hold(caller, regex="[0-9]").read()


async def test_a_scheduler_of_another_epoch_is_refused(caller: Caller) -> None:
    caller.epoch -= 1
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await hold(caller, regex="[0-9]").read()
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
