"""The scheduler's process from its first port to its end: what is served, what runs beside it, and who stops when."""

import asyncio
import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import generate_latest

from pagoda_common.config.engine_config import EngineConfig
from pagoda_common.config.lora_config import LoraConfig
from pagoda_common.config.security_config import UNGUARDED, SecurityConfig
from pagoda_common.rpc.service import RpcServer
from pagoda_scheduler import __main__ as command
from pagoda_scheduler.engine.engine import Engine
from pagoda_scheduler.groups.worker_groups import WorkerGroups

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


class Life:
    """Runs `serve` in this process, and notes what ends in which order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ends: list[Any] = []
        self.said: list[str] = []
        self.stopped = asyncio.Event()
        self.address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.engine: Engine
        self.idle: dict[str, Any] = {}
        self.background: list[asyncio.Task[Any]] = []
        self.metrics: list[tuple[Any, str, int]] = []
        life = self

        class Server(RpcServer):
            async def start(self, **options: Any) -> int:
                bound = await super().start(**options)
                life.address.set_result(f"{options['host']}:{bound}")
                return bound

            async def set_serving(self, is_serving: bool) -> None:
                life.ends.append(("serving", is_serving))
                await super().set_serving(is_serving)

            async def stop(self, *, grace_s: float) -> None:
                life.ends.append(("server", grace_s))
                await super().stop(grace_s=grace_s)

        @contextlib.contextmanager
        def stop_signals() -> Iterator[asyncio.Event]:
            yield self.stopped

        async def release_memory_when_idle(**calls: Any) -> None:
            life.idle = calls
            await life._stay()

        async def close_groups(groups: WorkerGroups) -> None:
            self.ends.append("groups")

        async def drain(engine: Engine, timeout_s: float) -> None:
            engine.is_draining = True
            self.ends.append(("drain", timeout_s))

        def make_engine(*, config: EngineConfig) -> Engine:
            self.engine = Engine(config=config)
            return self.engine

        def start_kv_events(engine: Engine) -> Any:
            assert engine is self.engine
            return SimpleNamespace(close=lambda: self.ends.append("events"))

        def serve_metrics(registry: Any, *, host: str, port: int) -> int:
            self.metrics.append((registry, host, port))
            return port

        monkeypatch.setattr(Engine, "drain", drain)
        monkeypatch.setattr(Engine, "hand_over", lambda engine: self.ends.append("hand over"))
        monkeypatch.setattr(WorkerGroups, "close", close_groups)
        monkeypatch.setattr(command, "Engine", make_engine)
        monkeypatch.setattr(command, "RpcServer", Server)
        monkeypatch.setattr(command, "stop_signals", stop_signals)
        monkeypatch.setattr(command, "start_kv_events", start_kv_events)
        monkeypatch.setattr(command, "release_memory_when_idle", release_memory_when_idle)
        monkeypatch.setattr(command, "beat", self._stay)
        monkeypatch.setattr(command, "serve_metrics", serve_metrics)
        monkeypatch.setattr(command, "exempt_what_exists", lambda: None)
        monkeypatch.setattr(command, "log_life", lambda logger, text, *args: self.said.append(text % args))
        monkeypatch.setattr(command, "HEALTH_PERIOD_S", 0.001)
        tracer = SimpleNamespace(close=lambda: self.ends.append("tracer"))
        monkeypatch.setattr(
            command, "make_tracer", lambda name, config: tracer if config.otlp_traces_endpoint is not None else None
        )

    async def _stay(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.background.append(task)
        await asyncio.Event().wait()

    def start(self, config: EngineConfig, **options: Any) -> asyncio.Task[None]:
        given = {"host": "127.0.0.1", "port": 0, "drain_timeout_s": 7.0} | options
        return asyncio.create_task(command.serve(config, **given))


@pytest.fixture
async def life(monkeypatch: pytest.MonkeyPatch) -> Life:
    return Life(monkeypatch)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 (what it waits for tells no one)
        await asyncio.sleep(0.001)


async def health_of(address: str, *services: str) -> list[int]:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        asked = [stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=240) for name in services]
        return [answer.status for answer in await asyncio.gather(*asked)]


async def test_what_ends_last_is_what_others_end_with(life: Life) -> None:
    config = EngineConfig()
    traced = replace(config, observability=replace(config.observability, otlp_traces_endpoint="http://127.0.0.1:1"))
    served = life.start(traced)
    await asyncio.wait_for(life.address, 240)
    await until(lambda: len(life.background) == 2)
    assert life.engine.traces is not None
    life.ends.clear()
    life.stopped.set()
    await asyncio.wait_for(served, 240)
    assert life.ends == [
        ("serving", False),  # no one comes any more
        ("drain", 7.0),
        "hand over",
        "groups",  # workers keep their weights for the next scheduler
        "events",
        ("server", 0.5),
        "tracer",  # spans of the last requests
    ]
    await asyncio.wait(life.background)
    assert all(task.cancelled() for task in life.background)
    assert any("draining, up to 7 s" in text for text in life.said)


async def test_health_is_told_by_name_and_follows_the_engine(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    served = life.start(EngineConfig())
    address = await asyncio.wait_for(life.address, 240)
    assert await health_of(address, "", command.SERVICE, "liveness") == [NOT_SERVING, NOT_SERVING, SERVING]
    monkeypatch.setattr(Engine, "is_ready", property(lambda engine: True))
    await until(lambda: ("serving", True) in life.ends)
    assert await health_of(address, "", command.SERVICE, "liveness") == [SERVING] * 3
    life.stopped.set()
    await asyncio.wait_for(served, 240)
    assert life.metrics == [], "no port was given"
    assert life.engine.traces is None


@pytest.mark.parametrize("enable_lora", [False, True])
async def test_metrics_are_those_of_the_engine_and_of_the_process(life: Life, enable_lora: bool) -> None:
    config = replace(EngineConfig(), lora=LoraConfig(enable_lora=enable_lora))
    named = replace(config, model=replace(config.model, served_model_name=("first", "second")))
    served = life.start(named, metrics_port=9)
    await asyncio.wait_for(life.address, 240)
    life.stopped.set()
    await asyncio.wait_for(served, 240)
    ((registry, host, port),) = life.metrics
    assert (host, port) == ("127.0.0.1", 9)
    text = generate_latest(registry).decode()
    assert re.search(r'^vllm:num_requests_waiting\{.*model_name="first".*\} 0\.0$', text, re.MULTILINE)
    assert re.search(r'^vllm:iteration_tokens_total_count\{.*model_name="first".*\} 0', text, re.MULTILINE), "of steps"
    assert "# TYPE pagoda:step_seconds histogram" in text
    assert "# TYPE pagoda:group_info gauge" in text
    for name in ("process_resident_memory_bytes", "python_gc_"):
        assert name in text
    assert ("vllm:lora_requests_info" in text) is enable_lora


async def test_memory_is_released_by_what_the_engine_says(life: Life, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    monkeypatch.setattr(Engine, "compact", lambda engine: called.append("compact"))
    monkeypatch.setattr(Engine, "forget_constraints", lambda engine: called.append("forget") or True)
    served = life.start(EngineConfig())
    await asyncio.wait_for(life.address, 240)
    await until(lambda: bool(life.idle))
    life.engine.num_submitted = 5
    assert (life.idle["count"](), life.idle["is_idle"]()) == (5, True)
    life.engine.requests["a"] = None  # type: ignore[assignment]  # that there is one is all that counts
    assert not life.idle["is_idle"]()
    life.engine.requests.clear()
    life.idle["compact"]()
    assert life.idle["forget"]()
    assert called == ["compact", "forget"]
    life.stopped.set()
    await asyncio.wait_for(served, 240)


@pytest.mark.parametrize("is_guarded", [False, True])
async def test_a_scheduler_that_anyone_may_call_says_so(
    life: Life, is_guarded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SecurityConfig, "is_guarded", property(lambda security: is_guarded))
    served = life.start(EngineConfig())
    address = await asyncio.wait_for(life.address, 240)
    life.stopped.set()
    await asyncio.wait_for(served, 240)
    assert f"scheduler listening on {address}" in life.said
    assert (UNGUARDED in life.said) is not is_guarded
