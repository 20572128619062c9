"""The worker's process around its parts, each of which is pretended: what it tells, and the order in which it ends."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import Metric
from prometheus_client.registry import Collector

from pagoda.v1 import scheduler_pb2, worker_pb2_grpc
from pagoda_common.config.observability_config import ObservabilityConfig
from pagoda_common.config.security_config import SecurityConfig
from pagoda_common.rpc import service
from pagoda_common.version import VERSION
from pagoda_kernels.native import library
from pagoda_worker import __main__ as command
from pagoda_worker import metrics, worker
from pagoda_worker.memory import device, memory_ahead
from pagoda_worker.parallel import tensor_parallel
from pagoda_worker.rpc import registration, servicer
from pagoda_worker.rpc.registration import CAPABILITIES


class NoMetrics(Collector):
    """Has none."""

    def collect(self) -> list[Metric]:
        return []


class Process:
    """All that `serve` puts together, and what is called, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[Any] = []
        self.given: dict[str, dict[str, Any]] = {}
        self.ended: list[str] = []
        self.stopped = asyncio.Event()
        self.worker = SimpleNamespace(grammars=SimpleNamespace(forget=lambda: self.calls.append("forget grammars")))
        self.servicer = SimpleNamespace(
            fence=SimpleNamespace(incarnation=77),
            last_step=5,
            describe_weights=lambda identity: None,
            close=self._async("close"),
        )
        self.server = SimpleNamespace(
            grpc_server="grpc server",
            set_serving=self._async("serving"),
            start=self._async("start", 4321),
            stop=self._async("stop server"),
        )
        self.registration = SimpleNamespace(run=lambda: self._for_ever("registration"), leave=self._async("leave"))
        for module, name, made in (
            (service, "RpcServer", self.server),
            (worker, "Worker", self.worker),
            (servicer, "WorkerServicer", self.servicer),
            (registration, "Registration", self.registration),
            (tensor_parallel, "TensorParallel", "ranks"),
            (metrics, "WorkerMetrics", "metrics"),
            (metrics, "WorkerCollector", NoMetrics()),
        ):
            monkeypatch.setattr(module, name, self._maker(name, made))
        monkeypatch.setattr(service, "stop_signals", self._signals)
        monkeypatch.setattr(library, "stop_compiling", lambda: self.calls.append("stop compiling"))
        monkeypatch.setattr(device, "claim_device", lambda kind, index: SimpleNamespace(description=f"{kind} {index}"))
        monkeypatch.setattr(memory_ahead, "touch_memory_at_rest", lambda of: self._for_ever("ahead"))
        monkeypatch.setattr(
            worker_pb2_grpc, "add_WorkerServicer_to_server", lambda *args: self.calls.append(("served", *args))
        )
        monkeypatch.setattr(command, "beat", lambda: self._for_ever("beat"))
        monkeypatch.setattr(command, "release_memory_when_idle", self._rest)
        monkeypatch.setattr(command, "exempt_what_exists", lambda *, collects: self.calls.append(("exempt", collects)))
        monkeypatch.setattr(command, "new_local_address", lambda name: f"unix-abstract:{name}")
        monkeypatch.setattr(command, "serve_metrics", self._metrics)

    def _metrics(self, registry: Any, *, host: str, port: int) -> int:
        self.calls.append((host, port))
        return 4322

    def _maker(self, name: str, made: Any) -> Any:
        def make(**given: Any) -> Any:
            self.given[name] = given
            return made

        return make

    def _async(self, name: str, result: Any = None) -> Any:
        async def call(*args: Any, **more: Any) -> Any:
            self.calls.append((name, *args, *more.values()) if args or more else name)
            await asyncio.sleep(0)
            return result

        return call

    async def _for_ever(self, name: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            self.ended.append(name)

    async def _rest(self, **given: Any) -> None:
        self.given["rest"] = given
        await self._for_ever("rest")

    @contextmanager
    def _signals(self) -> Iterator[asyncio.Event]:
        yield self.stopped

    async def run(self, *flags: str, security: SecurityConfig | None = None) -> None:
        args = command.make_parser().parse_args([*flags])
        command._count_ranks(args)
        self.stopped.set()
        given = SecurityConfig() if security is None else security
        await asyncio.wait_for(command.serve(args, given, ObservabilityConfig(enable_channelz=True)), 240)
        await asyncio.sleep(0)

    @property
    def identity(self) -> scheduler_pb2.WorkerIdentity:
        identity: scheduler_pb2.WorkerIdentity = self.given["Registration"]["identity"]
        return identity


@pytest.fixture
async def process(monkeypatch: pytest.MonkeyPatch) -> Process:
    for name in ("LWS_GROUP_INDEX", "LWS_WORKER_INDEX", "LWS_GROUP_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return Process(monkeypatch)


async def test_a_worker_tells_who_it_is(process: Process) -> None:
    await process.run("--scheduler=10.0.0.9:1", "--host=10.0.0.7", "--group=3", "--rank=1", "--world-size=2")
    identity = process.identity
    assert (identity.address, identity.local_address, identity.incarnation) == ("10.0.0.7:4321", "", 77)
    assert (identity.group, identity.rank, identity.world_size) == (3, 1, 2)
    assert (identity.device, identity.version) == ("auto 1", VERSION), "each rank has a device of its own"
    assert tuple(identity.capabilities) == CAPABILITIES
    told = process.given["Registration"]
    assert (told["scheduler"], told["last_step"](), told["refresh"]) == (
        "10.0.0.9:1",
        5,
        process.servicer.describe_weights,
    )
    assert process.given["TensorParallel"] == {"rank": 1, "world_size": 2, "host": "10.0.0.7"}
    assert process.given["Worker"] == {
        "num_threads": None,
        "shares_machine": False,
        "parallel": "ranks",
        "device_index": 1,
    }
    assert process.given["WorkerServicer"]["worker"] is process.worker
    assert process.given["WorkerServicer"]["metrics"] is None
    assert process.given["RpcServer"]["services"] == ("pagoda.v1.Worker",)
    assert process.given["RpcServer"]["enable_channelz"]


async def test_flags_go_before_what_it_finds_out(process: Process) -> None:
    await process.run(
        *("--scheduler=127.0.0.1:1", "--advertise-address=me:9", "--device-index=4", "--threads=3", "--port=8")
    )
    assert (process.identity.address, process.identity.device, process.identity.local_address) == ("me:9", "auto 4", "")
    given = process.given["Worker"]
    assert (given["num_threads"], given["shares_machine"], given["device_index"]) == (3, True, 4)
    assert ("start", "127.0.0.1", 8, None) in process.calls


async def test_a_worker_beside_its_scheduler_has_a_second_address(process: Process) -> None:
    await process.run("--scheduler=127.0.0.1:1")
    assert process.identity.local_address == "unix-abstract:worker"
    assert ("start", "127.0.0.1", 0, "unix-abstract:worker") in process.calls


async def test_metrics_are_served_where_a_port_is_named(process: Process) -> None:
    await process.run("--scheduler=127.0.0.1:1", "--metrics-port=0", "--host=0.0.0.0")
    assert ("0.0.0.0", 0) in process.calls
    assert process.given["WorkerServicer"]["metrics"] == "metrics"
    assert process.given["WorkerCollector"] == {"worker": process.worker}


async def test_what_runs_may_end_before_the_server_and_the_model_do(process: Process) -> None:
    await process.run("--scheduler=127.0.0.1:1", "--drain-timeout=12")
    end = process.calls[process.calls.index("stop compiling") :]
    assert end == ["stop compiling", ("serving", False), ("leave", 12.0), ("stop server", 1.0), "close"]
    assert sorted(process.ended) == ["ahead", "beat", "registration", "rest"], "nothing runs on"
    assert process.ended[-1] == "beat", "a supervisor hears that it lives until the end"


async def test_memory_is_given_back_at_rest_and_what_serves_is_no_garbage(process: Process) -> None:
    await process.run("--scheduler=127.0.0.1:1")
    rest = process.given["rest"]
    assert (rest["count"](), rest["is_idle"]()) == (5, True)
    rest["forget"]()
    set_serving = process.given["WorkerServicer"]["set_serving"]
    del process.calls[:]
    await set_serving(False)
    await set_serving(True)
    assert process.calls == [("serving", False), ("exempt", False), ("serving", True)]
