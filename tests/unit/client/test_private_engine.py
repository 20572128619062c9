"""LLM's own engine and its loop on a thread, without processes: what is started, awaited and reported."""

import asyncio
import logging
import threading
import time
from typing import Any, cast

import pytest

from pagoda.llm.loop_thread import LoopThread
from pagoda.server import engine_process
from pagoda.server.engine_process import PrivateEngine
from pagoda_common.config.engine_config import EngineConfig, ModelConfig, ParallelConfig
from pagoda_common.config.security_config import SecurityConfig
from pagoda_common.errors import ModelLoadError


class Client:
    """A connection that becomes ready when the test says so."""

    def __init__(self, *, address: str, security: Any) -> None:
        self.address, self.security = address, security
        self.is_started = False
        self.ready = asyncio.Event()
        self.closed: list[str] = []

    async def start(self) -> None:
        self.is_started = True

    async def wait_until_ready(self) -> None:
        await self.ready.wait()

    async def close(self, reason: str) -> None:
        self.closed.append(reason)


class Supervisor:
    """Keeps nothing running, until it is stopped."""

    def __init__(self, *, services: list[Any], output: Any) -> None:
        self.services, self.output = services, output
        self.ended = asyncio.Event()

    async def run(self) -> None:
        await self.ended.wait()

    def stop(self) -> None:
        self.ended.set()


class Faults:
    """What the scheduler says of a load, if it says anything."""

    reason: str | None = None

    async def find(self, address: str, *, security: Any) -> str:
        if self.reason is None:
            await asyncio.Event().wait()
        return str(self.reason)


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    found = Faults()
    monkeypatch.setattr(engine_process, "EngineClient", Client)
    monkeypatch.setattr(engine_process, "Supervisor", Supervisor)
    monkeypatch.setattr(engine_process, "free_port", lambda: 50123)
    monkeypatch.setattr(engine_process, "find_load_fault", found.find)
    monkeypatch.setattr(engine_process, "service_command", lambda module, argv: [module, *argv])
    monkeypatch.setattr(engine_process, "check_model", lambda config: None)
    return found


def made(**parallel: Any) -> tuple[PrivateEngine, Client, Supervisor]:
    config = EngineConfig(
        model=ModelConfig(model="m"),
        parallel=ParallelConfig(**parallel),
        security=SecurityConfig(service_token="secret"),
    )
    engine = PrivateEngine(config=config)
    return engine, cast("Client", engine.client), cast("Supervisor", engine._supervisor)


async def test_what_is_started(faults: Faults) -> None:
    _, client, supervisor = made(data_parallel_size=2, standby_workers=1)
    assert client.address == "127.0.0.1:50123"
    assert client.security.service_token == "secret"
    scheduler, *workers = supervisor.services
    assert scheduler.name == "scheduler"
    assert scheduler.command[:4] == ("pagoda_scheduler", "--host=127.0.0.1", "--port=50123", "--drain-timeout=0")
    assert "--model=m" in scheduler.command
    assert "--max-serving-groups=2" in scheduler.command
    assert scheduler.stop_timeout_s == 5.0
    assert scheduler.environment == workers[0].environment == {"PAGODA_SERVICE_TOKEN": "secret"}
    assert [worker.name for worker in workers] == ["worker-0", "worker-1", "worker-2"]
    assert {worker.stop_timeout_s for worker in workers} == {5.0}
    for worker in workers:
        for word in ("--scheduler=127.0.0.1:50123", "--host=127.0.0.1", "--drain-timeout=0.0"):
            assert word in worker.command


async def test_a_start_ends_when_the_engine_can_generate(faults: Faults) -> None:
    engine, client, supervisor = made()
    client.ready.set()
    await engine.start()
    assert client.is_started
    assert engine._is_serving
    await engine.stop()
    assert client.closed == ["the engine was shut down"]
    assert supervisor.ended.is_set()
    assert engine._task is None
    assert not engine._is_serving
    await engine.stop()
    assert client.closed == ["the engine was shut down"] * 2


async def test_a_start_that_fails_says_why_with_the_last_lines(faults: Faults) -> None:
    engine, _, supervisor = made()
    for number in range(32):
        supervisor.output("worker", f"line {number}")
    faults.reason = "no such file"
    with pytest.raises(ModelLoadError) as caught:
        await engine.start()
    tail = "\n".join(f"line {number}" for number in range(2, 32))
    assert str(caught.value) == f"the engine for model 'm' did not start: no such file\n{tail}"
    assert not engine._is_serving
    await engine.stop()
    again, _, supervisor = made()
    faults.reason = None
    supervisor.ended.set()
    with pytest.raises(ModelLoadError) as caught:
        await again.start()
    assert str(caught.value) == "the engine for model 'm' did not start: its processes do not keep running"


@pytest.mark.parametrize("line", [None, "ERROR broken"])
async def test_processes_that_end_later_close_the_connection(faults: Faults, line: str | None) -> None:
    engine, client, supervisor = made()
    client.ready.set()
    await engine.start()
    if line is not None:
        supervisor.output("worker", "before")
        supervisor.output("worker", line)
    supervisor.ended.set()
    task = engine._task
    assert task is not None
    await task
    assert client.closed == [f"the engine's processes do not keep running: {line or 'no output'}"]


@pytest.mark.parametrize(
    ("line", "is_serving", "level"),
    [
        ("WARNING 1 worker: a", True, "WARNING"),
        ("ERROR 1 worker: a", True, "WARNING"),
        ("CRITICAL 1 worker: a", True, "WARNING"),
        ("INFO 1 worker: a", True, "DEBUG"),
        ("WARNING 1 worker: a", False, "DEBUG"),
        ("INFO 1 worker: loading weights [3/4]", False, "INFO"),
        ("INFO 1 worker: loading weights [3/4]", True, "INFO"),
        ("a WARNING within", True, "DEBUG"),
    ],
)
async def test_lines_of_the_processes_have_a_level(
    faults: Faults, caplog: pytest.LogCaptureFixture, line: str, is_serving: bool, level: str
) -> None:
    engine, _, supervisor = made()
    engine._is_serving = is_serving
    with caplog.at_level(logging.DEBUG):
        supervisor.output("worker", line)
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [(level, line)]
    assert list(engine._tail) == [line]


# The loop on a thread.


@pytest.fixture
def loop() -> Any:
    loop = LoopThread(name="a loop")
    yield loop
    loop.close()


def test_a_coroutine_runs_on_the_thread(loop: LoopThread) -> None:
    async def where() -> str:
        return threading.current_thread().name

    assert loop.run(where()) == "a loop"
    assert loop._thread.daemon


def test_an_error_of_a_coroutine_is_its_callers(loop: LoopThread) -> None:
    async def broken() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        loop.run(broken())


def test_an_interrupted_wait_cancels_what_runs(loop: LoopThread, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    async def long() -> None:
        try:
            told.append("begun")
            await asyncio.Event().wait()
        finally:
            told.append("ended")

    import concurrent.futures

    def interrupted(self: Any, timeout: float | None = None) -> Any:
        while not told:
            time.sleep(0.001)
        raise KeyboardInterrupt

    monkeypatch.setattr(concurrent.futures.Future, "result", interrupted)
    with pytest.raises(KeyboardInterrupt):
        loop.run(long())
    assert told == ["begun", "ended"]


def test_a_loop_is_closed_once() -> None:
    loop = LoopThread(name="another loop")
    loop.close()
    loop.close()
    assert loop._loop.is_closed()
    assert not loop._thread.is_alive()
