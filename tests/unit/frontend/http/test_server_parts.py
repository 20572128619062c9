"""A frontend's server before it listens: settings, figures, sockets, layers, and what callers learn of its end."""

import asyncio
import socket
import ssl
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pagoda.v1 import types_pb2
from pagoda_common.config.frontend_config import FrontendConfig
from pagoda_common.errors import CannotListen, ConfigError, PagodaError
from pagoda_frontend.budget.held_memory import HeldMemory
from pagoda_frontend.http import server as servers
from pagoda_frontend.http.answers.sse import EventStream, unless_disconnected
from pagoda_frontend.http.draining import CountCalls
from pagoda_frontend.http.errors import ClientDisconnected
from pagoda_frontend.http.operators.status_calls import _shown
from pagoda_frontend.http.server import FrontendServer, _bracketed, _listen, _uvicorn_config
from pagoda_frontend.http.traces import TraceHttp


def uvicorn_config(**fields: Any) -> Any:
    return _uvicorn_config(cast("Any", object()), FrontendConfig(**fields), held_memory=HeldMemory(max_bytes=5))


def test_what_uvicorn_is_told() -> None:
    plain = uvicorn_config()
    shown = {
        name: getattr(plain, name)
        for name in (
            *("ws", "lifespan", "log_config", "access_log", "backlog", "timeout_keep_alive", "server_header"),
            *("timeout_graceful_shutdown", "proxy_headers", "ssl_keyfile", "ssl_certfile", "ssl_ca_certs"),
            *("forwarded_allow_ips", "log_level", "ssl_cert_reqs"),
        )
    }
    assert shown == {
        "ws": "none",
        "lifespan": "off",
        "log_config": None,
        "access_log": True,
        "backlog": 2048,
        "timeout_keep_alive": 75,
        "server_header": False,
        "timeout_graceful_shutdown": 2,
        "proxy_headers": False,
        "ssl_keyfile": None,
        "ssl_certfile": None,
        "ssl_ca_certs": None,
        "forwarded_allow_ips": [],
        "log_level": "info",
        "ssl_cert_reqs": ssl.CERT_NONE,
    }
    bounds = plain.http
    assert (bounds.max_head_bytes, bounds.max_headers, bounds.send_timeout_s) == (4 * 1024**2, 256, 300.0)
    assert bounds.held_memory is not None


def test_what_flags_change_of_it() -> None:
    told = uvicorn_config(
        disable_uvicorn_access_log=True,
        keep_alive_timeout_s=5,
        forwarded_allow_ips=("10.0.0.1", "10.0.0.2"),
        uvicorn_log_level="error",
        h11_max_incomplete_event_size=2048,
        h11_max_header_count=7,
        send_timeout_s=3.0,
    )
    assert (told.access_log, told.timeout_keep_alive, told.log_level) == (False, 5, "error")
    assert (told.proxy_headers, told.forwarded_allow_ips) == (True, ["10.0.0.1", "10.0.0.2"])
    assert (told.http.max_head_bytes, told.http.max_headers, told.http.send_timeout_s) == (2048, 7, 3.0)
    assert uvicorn_config(forwarded_allow_ips=("10.0.0.1", "*")).forwarded_allow_ips == ["*"]


def test_a_certificate_that_is_not_there_is_named(tmp_path: Path) -> None:
    missing = str(tmp_path / "cert.pem")
    with pytest.raises(ConfigError) as caught:
        uvicorn_config(ssl_certfile=missing)
    assert str(caught.value).startswith(f"ssl_certfile {missing!r} cannot be used: ")
    assert caught.value.field == "ssl_certfile"


def test_a_listener_gives_its_connections_no_delay() -> None:
    with closing(_listen("127.0.0.1", 0)) as listener:
        assert listener.family == socket.AF_INET
        assert listener.proto == socket.IPPROTO_TCP
        assert listener.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR)
        assert listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        port = listener.getsockname()[1]
        with pytest.raises(CannotListen, match=f"cannot listen on 127.0.0.1:{port}: "):
            _listen("127.0.0.1", port)
    assert (_bracketed("127.0.0.1"), _bracketed("::1")) == ("127.0.0.1", "[::1]")


# FrontendServer before it starts.


def made(**fields: Any) -> FrontendServer:
    return FrontendServer(config=FrontendConfig(**fields))


async def test_keys_of_files_are_keys_as_well(tmp_path: Path) -> None:
    keys, operators = tmp_path / "keys", tmp_path / "operators"
    keys.write_text("b\nc\n")
    operators.write_text("e\n")
    server = made(api_key=("a",), api_key_file=str(keys), operator_key=("d",), operator_key_file=str(operators))
    assert server._config.api_key == ("a", "b", "c")
    assert server._config.operator_key == ("d", "e")
    plain = made(api_key=("a",))
    assert (plain._config.api_key, plain._config.operator_key) == (("a",), ())
    assert (plain.port, plain.grpc_port) == (0, 0)


async def test_where_grpc_listens() -> None:
    assert made(host="127.0.0.1")._grpc_host == "127.0.0.1"
    assert made(host="127.0.0.1", grpc_host="::1")._grpc_host == "::1"


async def test_the_figures_of_the_log_line() -> None:
    server = made()
    load = types_pb2.EngineLoad(
        num_running_reqs=3,
        num_waiting_reqs=4,
        num_used_blocks=25,
        num_total_blocks=100,
        prefix_cache_queries=50,
        prefix_cache_hits=20,
    )
    part = server._parts[0]
    part.engine = cast("Any", SimpleNamespace(load=load))
    metrics = SimpleNamespace(token_totals=lambda: (11, 12), latencies=lambda: ("first", "next"))
    part.metrics = cast("Any", metrics)
    totals = part.totals()
    assert (totals.num_prompt_tokens, totals.num_generation_tokens) == (11, 12)
    assert (totals.num_running_reqs, totals.num_waiting_reqs, totals.kv_cache_usage) == (3, 4, 0.25)
    assert (totals.prefix_cache_queries, totals.prefix_cache_hits) == (50, 20)
    moment = part.moment()
    assert (moment.totals, moment.first_token, moment.next_token) == (totals, "first", "next")
    load.num_total_blocks = 0
    assert part.totals().kv_cache_usage == 0.0
    collector = part._engine_collector("m")
    assert collector._load() is load


async def test_what_may_have_left_memory_to_give_back() -> None:
    server = made()
    assert server._num_events() == 0
    server.serving.num_requests = 5
    server.serving.held_memory.num_bytes_taken = 3 * 16 * 1024 - 1
    server._rpc.arrivals.num_late_seen = 7
    assert server._num_events() == 5 + 2 + 7


class Down:
    """Stands for serving and gRPC on the way down, and notes the order."""

    def __init__(self, *, is_idle: bool) -> None:
        self.told: list[Any] = []
        self.is_idle, self.is_draining = is_idle, False
        self.num_open, self.num_calls, self.not_ready_reason = 2, 3, "going"

    async def wait_until_idle(self) -> None:
        self.told.append("wait")
        if not self.is_idle:
            await asyncio.Event().wait()

    async def set_serving(self, is_serving: bool) -> None:
        self.told.append(("serving", is_serving, self.is_draining))

    async def close(self, reason: str | None = None) -> None:
        self.told.append(("close", reason))

    async def stop(self, *, grace_s: float) -> None:
        self.told.append(("stop", grace_s))


@pytest.mark.parametrize("is_idle", [True, False])
async def test_the_way_down(is_idle: bool, caplog: pytest.LogCaptureFixture) -> None:
    server, down = made(), Down(is_idle=is_idle)
    server.models = server._rpc = cast("Any", down)
    server._parts[0].engine = cast("Any", down)
    await server.drain(0.01)
    assert down.told == [("serving", False, True), "wait", ("close", None), ("close", "going"), ("stop", 2.0)]
    assert down.is_draining
    told = [] if is_idle else ["3 requests were not finished after 0.01 s"]
    assert [record.getMessage() for record in caplog.records] == told


async def test_health_follows_readiness(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    server = made()
    states = [False, True, True, False, True]
    told: list[bool] = []
    serving = SimpleNamespace(is_ready=False, is_draining=False, not_ready_reason="why")
    server.models = cast("Any", serving)

    async def set_serving(is_serving: bool) -> None:
        told.append(is_serving)

    async def sleep(time_s: float) -> None:
        assert time_s == pytest.approx(0.1)
        if not states:
            raise asyncio.CancelledError
        serving.is_ready = states.pop(0)

    server._rpc = cast("Any", SimpleNamespace(set_serving=set_serving))
    monkeypatch.setattr(servers.asyncio, "sleep", sleep)
    with caplog.at_level("INFO"), pytest.raises(asyncio.CancelledError):
        await server._follow_readiness()
    assert told == [True, False, True]
    assert [record.getMessage() for record in caplog.records] == ["ready", "not ready: why", "ready"]


# Layers and answers.


class Counted:
    """What CountCalls asks of a frontend."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.held_memory = HeldMemory(max_bytes=100)
        self.is_draining, self.not_ready_reason = False, "the server is shutting down"

    def begin_call(self) -> None:
        self.told.append("begin")

    def end_call(self) -> None:
        self.told.append("end")


async def called(layer: Any, **scope: Any) -> list[Any]:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request"}

    await layer({"type": "http", "method": "POST", "path": "/v1/x", "headers": [], **scope}, receive, send)
    return sent


async def fine(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": scope.get("status", 200), "headers": []})


async def test_posts_alone_are_counted() -> None:
    serving = Counted()
    layer = CountCalls(fine, serving=cast("Any", serving))
    await called(layer)
    await called(layer, method="GET")
    await called(layer, type="lifespan")
    assert serving.told == ["begin", "end"]


@pytest.mark.parametrize(
    ("is_draining", "begins", "is_told"), [(True, False, True), (True, True, False), (False, False, False)]
)
async def test_a_call_that_is_given_up_is_told_to_come_again(is_draining: bool, begins: bool, is_told: bool) -> None:
    serving = Counted()
    serving.is_draining = is_draining

    async def given_up(scope: Any, receive: Any, send: Any) -> None:
        if begins:
            await fine(scope, receive, send)
        raise asyncio.CancelledError

    layer = CountCalls(given_up, serving=cast("Any", serving))
    if is_told:
        head, body = await called(layer)
        assert head["status"] == 503
        assert (b"retry-after", b"1") in head["headers"]
        assert b"the server is shutting down" in body["body"]
    else:
        with pytest.raises(asyncio.CancelledError):
            await called(layer)
    assert serving.told == ["begin", "end"]


class Span:
    """Notes what becomes of it."""

    trace_id = "5" * 32

    def __init__(self) -> None:
        self.told: list[Any] = []

    def set(self, attributes: Any) -> None:
        self.told.append(attributes)

    def fail(self, message: str) -> None:
        self.told.append(f"fail {message}")

    def rename(self, name: str) -> None:
        self.told.append(f"rename {name}")

    def end(self) -> None:
        self.told.append("end")


class Tracer:
    """Begins one span."""

    def __init__(self) -> None:
        self.span = Span()
        self.asked: list[Any] = []

    def start(self, name: str, **options: Any) -> Span:
        self.asked.append((name, options))
        return self.span


@pytest.mark.parametrize(("status", "is_fault"), [(200, False), (499, False), (500, True), (503, True)])
async def test_a_call_has_a_span(status: int, is_fault: bool) -> None:
    tracer = Tracer()
    headers = [(b"traceparent", b"tp"), (b"tracestate", b"ts")]
    await called(
        TraceHttp(fine, tracer=cast("Any", tracer)), status=status, headers=headers, route=SimpleNamespace(path="/r")
    )
    attributes = {"http.request.method": "POST", "url.path": "/v1/x"}
    options = {"kind": "server", "traceparent": "tp", "tracestate": "ts", "attributes": attributes}
    assert tracer.asked == [("POST", options)]
    assert tracer.span.told == [
        {"http.response.status_code": status},
        *([f"fail status {status}"] if is_fault else []),
        "rename POST /r",
        {"http.route": "/r"},
        "end",
    ]


async def test_other_calls_have_none() -> None:
    tracer = Tracer()
    layer = TraceHttp(fine, tracer=cast("Any", tracer))
    await called(layer, method="GET")
    await called(layer, path="/metrics")
    await called(layer, type="lifespan")
    assert tracer.asked == []
    await called(layer)
    assert tracer.span.told == [{"http.response.status_code": 200}, "end"], "without a route no name"


async def test_work_ends_with_its_client() -> None:
    ended: list[str] = []

    async def work(is_long: bool) -> int:
        try:
            if is_long:
                await asyncio.Event().wait()
            return 5
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    async def stays() -> Any:
        await asyncio.Event().wait()

    messages = [{"type": "http.request"}, {"type": "http.disconnect"}]

    async def leaves() -> Any:
        return messages.pop(0)

    assert await unless_disconnected(cast("Any", SimpleNamespace(receive=stays)), work(False)) == 5
    with pytest.raises(ClientDisconnected):
        await unless_disconnected(cast("Any", SimpleNamespace(receive=leaves)), work(True))
    assert (ended, messages) == (["cancelled"], [])

    async def broken() -> None:
        raise PagodaError("no", code=cast("Any", None))

    with pytest.raises(PagodaError, match="no"):
        await unless_disconnected(cast("Any", SimpleNamespace(receive=stays)), broken())


def test_the_head_of_a_stream() -> None:
    stream = EventStream(cast("Any", None), request_id="r", keep_alive_s=5.0, timeout_s=0.5)
    assert dict(stream.headers) == {
        "cache-control": "no-cache",
        "x-accel-buffering": "no",
        "x-request-id": "r",
        "content-type": "text/event-stream; charset=utf-8",
    }
    assert (stream.status_code, stream._keep_alive_s, stream._patience_s) == (200, 5.0, 1.5)


def test_a_call_as_the_status_page_shows_it() -> None:
    call = SimpleNamespace(
        request_id="a",
        state="running",
        started_s=1.23456,
        duration_s=None,
        first_token_s=None,
        num_prompt_tokens=3,
        num_output_tokens=4,
        num_sequences=2,
        reason=None,
    )
    shown = _shown(cast("Any", call))
    assert shown == {
        "id": "a",
        "state": "running",
        "started": 1.235,
        "duration_s": None,
        "first_token_s": None,
        "prompt_tokens": 3,
        "output_tokens": 4,
        "sequences": 2,
        "reason": None,
    }
    call.duration_s, call.first_token_s, call.reason = 0.12345, 0.01234, "stop"
    again = _shown(cast("Any", call))
    assert (again["duration_s"], again["first_token_s"], again["reason"]) == (0.123, 0.0123, "stop")
