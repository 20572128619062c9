"""A frontend's server as it starts and closes: order, tasks, and what a fault on the way leaves behind."""

import asyncio
import socket
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pagoda_common.config.frontend_config import FrontendConfig
from pagoda_common.config.observability_config import ObservabilityConfig
from pagoda_common.errors import PagodaError
from pagoda_frontend.http import server as servers
from pagoda_frontend.http.server import FrontendServer, _listen


class Http:
    """Stands for uvicorn's server: it listens at once, or ends with `fault`."""

    def __init__(self, fault: Exception | None = None, *, begins: bool = True) -> None:
        self.started = self.should_exit = False
        self.fault, self.begins = fault, begins
        self.sockets: list[socket.socket] = []

    async def serve(self, sockets: list[socket.socket]) -> None:
        self.sockets = sockets
        if self.fault is not None:
            raise self.fault
        self.started = self.begins
        while self.begins and not self.should_exit:  # noqa: ASYNC110  # as uvicorn's own loop does
            await asyncio.sleep(0.001)


class Started:
    """Stands for models, engines and gRPC as a server starts and closes; notes the order."""

    is_ready, is_draining, num_open, num_requests, not_ready_reason = False, False, 0, 0, "why"

    def __init__(self, fault: Exception | None = None, *, are_several: bool = False) -> None:
        self.told: list[Any] = []
        self.fault, self.are_several = fault, are_several
        self.arrivals = SimpleNamespace(num_late_seen=0)
        self.grpc_server = self

    def add_generic_rpc_handlers(self, handlers: Any) -> None: ...

    def add_registered_method_handlers(self, service: str, handlers: Any) -> None:
        self.told.append(service)

    async def start(self, **listen: Any) -> int:
        self.told.append(listen or "start")
        if self.fault is not None and listen:
            raise self.fault
        return 77

    async def set_serving(self, is_serving: bool) -> None: ...

    async def close(self, *reason: str) -> None:
        self.told.append(("close", *reason))

    async def stop(self, *, grace_s: float) -> None: ...


def starting(monkeypatch: pytest.MonkeyPatch, http: Http, stand_in: Started, **fields: Any) -> FrontendServer:
    server = FrontendServer(config=FrontendConfig(host="127.0.0.1", port=0, **fields))
    server.models = server._rpc = cast("Any", stand_in)
    for part in server._parts:
        part.engine = cast("Any", stand_in)
    monkeypatch.setattr(servers, "make_app", lambda models, engines: None)
    monkeypatch.setattr(servers, "_HttpServer", lambda config: http)
    return server


@pytest.mark.parametrize(
    ("fields", "tasks"),
    [
        ({}, ["history", "statistics"]),
        ({"disable_status_page": True}, ["statistics"]),
        ({"observability": ObservabilityConfig(disable_log_stats=True)}, ["history"]),
        ({"models": ("a=127.0.0.1:1", "b=127.0.0.1:2")}, ["history", "history", "statistics", "statistics"]),
    ],
)
async def test_what_a_server_starts_and_ends(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], tasks: list[str]
) -> None:
    num_models = len(fields.get("models", "1"))
    http, stand_in = Http(), Started(are_several=num_models > 1)
    server = starting(monkeypatch, http, stand_in, grpc_host="::1", grpc_port=9, **fields)
    await server.start()
    listening = ["pagoda.v1.Inference", {"host": "[::1]", "port": 9}]
    assert stand_in.told == [*listening, *["start"] * num_models, "start"], "engines, and what is known of models"
    assert server.grpc_port == 77
    assert sorted(task.get_name() for task in server._tasks) == sorted(["http", "readiness", "idle memory", *tasks])
    assert server.port == http.sockets[0].getsockname()[1] > 0
    failed = asyncio.create_task(server.wait_failed())
    await asyncio.sleep(0.01)
    assert not failed.done()
    stand_in.told.clear()
    await server.close()
    await failed
    assert stand_in.is_draining
    assert stand_in.told == [("close",), *[("close", "why")] * num_models]
    assert all(task.done() for task in server._tasks)
    http.sockets[0].close()


async def test_a_port_that_is_taken_leaves_the_other_one_free(monkeypatch: pytest.MonkeyPatch) -> None:
    listener = _listen("127.0.0.1", 0)
    monkeypatch.setattr(servers, "_listen", lambda host, port: listener)
    server = starting(monkeypatch, Http(), Started(OSError("taken")))
    with pytest.raises(OSError, match="taken"):
        await server.start()
    assert listener.fileno() == -1


@pytest.mark.parametrize(
    ("fault", "kind", "message"),
    [(None, PagodaError, "the HTTP server did not start"), (OSError("broken"), OSError, "broken")],
)
async def test_a_server_that_ends_at_once_has_not_started(
    monkeypatch: pytest.MonkeyPatch, fault: Exception | None, kind: type[Exception], message: str
) -> None:
    http = Http(fault, begins=False)
    server = starting(monkeypatch, http, Started())
    with pytest.raises(kind, match=message):
        await server.start()
    await server.close()
    http.sockets[0].close()
