"""A gRPC server before and while it listens, over a fake of the library's server that records its calls."""

import signal
from types import SimpleNamespace
from typing import Any, cast

import pytest
from grpc_health.v1 import health_pb2

from pagoda_common.config.security_config import ServerSecurity
from pagoda_common.errors import ConfigError
from pagoda_common.rpc import service
from pagoda_common.rpc.service import LIVENESS, ErrorInterceptor, RpcServer, stop_signals

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


class Library:
    """Binds every address, unless the test makes it fail."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.bound = 5000
        self.fault: Exception | None = None

    def server(self, *, interceptors: list[Any], options: list[Any]) -> "Library":
        self.interceptors, self.options = interceptors, dict(options)
        return self

    def add_registered_method_handlers(self, *given: Any) -> None:
        pass

    def add_generic_rpc_handlers(self, *given: Any) -> None:
        pass

    def add_insecure_port(self, address: str) -> int:
        if self.fault is not None:
            raise self.fault
        self.told.append(("insecure", address))
        return self.bound

    def add_secure_port(self, address: str, credentials: Any) -> int:
        self.told.append(("secure", address, credentials))
        return self.bound

    async def start(self) -> None:
        self.told.append("start")

    async def stop(self, grace_s: float) -> None:
        self.told.append(("stop", grace_s))


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    made = Library()
    monkeypatch.setattr(service.grpc.aio, "server", made.server)
    monkeypatch.setattr(
        service.reflection, "enable_server_reflection", lambda names, server: made.told.append(("names", names))
    )
    return made


async def health_of(server: RpcServer) -> dict[str, int]:
    return dict(server._health._server_status)


async def test_health_of_a_server(library: Library) -> None:
    server = RpcServer(services=("a.A", "b.B"))
    names = ("a.A", "b.B", "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection")
    assert library.told == [("names", names)]
    library.told.clear()
    assert await server.start(host="127.0.0.1", port=7) == 5000
    assert library.told == [("insecure", "127.0.0.1:7"), "start"]
    status = await health_of(server)
    assert status[LIVENESS] == SERVING
    assert [status[name] for name in ("", "a.A", "b.B")] == [NOT_SERVING] * 3
    await server.set_serving(True)
    assert [(await health_of(server))[name] for name in ("", "a.A", "b.B", LIVENESS)] == [SERVING] * 4
    await server.set_serving(False)
    assert (await health_of(server))["a.A"] == NOT_SERVING
    await server.stop(grace_s=2.5)
    assert library.told[-1] == ("stop", 2.5)
    assert set((await health_of(server)).values()) == {NOT_SERVING}


async def test_an_address_that_cannot_be_bound(library: Library) -> None:
    library.bound = 0
    with pytest.raises(OSError, match=r"^cannot listen on 127\.0\.0\.1:7$"):
        await RpcServer(services=()).start(host="127.0.0.1", port=7)
    library.fault = RuntimeError("no")
    with pytest.raises(OSError, match=r"^cannot listen on 127\.0\.0\.1:7$"):
        await RpcServer(services=()).start(host="127.0.0.1", port=7)
    assert "start" not in library.told


async def test_where_a_server_listens(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    server = RpcServer(services=())
    await server.start(host="127.0.0.1", port=0, local_address="unix-abstract:x")
    assert library.told[-3:] == [("insecure", "127.0.0.1:0"), ("insecure", "unix-abstract:x"), "start"]
    with pytest.raises(ConfigError):
        await RpcServer(services=()).start(host="0.0.0.0", port=0)
    open_to_all = RpcServer(services=(), security=ServerSecurity(insecure=True))
    assert await open_to_all.start(host="0.0.0.0", port=0) == 5000
    monkeypatch.setattr(service, "server_credentials", lambda security: "credentials")
    guarded = RpcServer(services=())
    await guarded.start(host="127.0.0.1", port=8)
    assert library.told[-2:] == [("secure", "127.0.0.1:8", "credentials"), "start"]
    with pytest.raises(ConfigError) as caught:
        await guarded.start(host="127.0.0.1", port=8, local_address="unix-abstract:x")
    told = "local_address is 'unix-abstract:x', must not be given with TLS, which it is without"
    assert (str(caught.value), caught.value.field) == (told, "local_address")


async def test_what_calls_pass_through(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    own = cast("Any", SimpleNamespace())
    server = RpcServer(services=(), interceptors=(own,))
    errors, *rest = library.interceptors
    assert isinstance(errors, ErrorInterceptor)
    assert rest == [own]
    assert server.arrivals is errors.arrivals
    monkeypatch.setattr(service, "token_guard", lambda security: "guard")
    RpcServer(services=(), interceptors=(own,))
    assert library.interceptors[1:] == ["guard", own]


async def test_options_of_a_server(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    RpcServer(services=())
    assert library.options == dict(service.SERVER_OPTIONS) | {
        "grpc.max_receive_message_length": service.MAX_MESSAGE_BYTES
    }
    assert "grpc.enable_channelz" not in library.options
    monkeypatch.setattr(service, "_add_channelz", lambda server: "channelz")
    RpcServer(services=("a.A",), enable_channelz=True, max_message_bytes=77)
    assert (library.options["grpc.enable_channelz"], library.options["grpc.max_receive_message_length"]) == (1, 77)
    assert library.told[-1][1][-1] == "channelz"


async def test_the_second_signal_is_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []

    class Loop:
        def __init__(self) -> None:
            self.handlers: dict[Any, Any] = {}

        def add_signal_handler(self, number: Any, call: Any) -> None:
            self.handlers[number] = call

        def remove_signal_handler(self, number: Any) -> None:
            told.append(number)
            self.handlers.pop(number, None)

    loop = Loop()
    monkeypatch.setattr(service.asyncio, "get_running_loop", lambda: loop)
    with stop_signals() as stop:
        assert set(loop.handlers) == {signal.SIGTERM, signal.SIGINT}
        assert not stop.is_set()
        loop.handlers[signal.SIGINT]()
        assert stop.is_set()
        assert loop.handlers == {}
    assert told == [signal.SIGTERM, signal.SIGINT] * 2
