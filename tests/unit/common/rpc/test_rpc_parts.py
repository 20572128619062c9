"""Parts of gRPC's plumbing, each alone: options, details of errors, arrivals by their clock, keys and tokens."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest
from google.rpc import error_details_pb2

from pagoda_common.config.security_config import SecurityConfig, ServerSecurity
from pagoda_common.errors import Code, ConfigError, InvalidRequest, NotFound, PagodaError, QueueFull, ShareFull
from pagoda_common.rpc.arrival import Arrivals
from pagoda_common.rpc.bearer import BearerKeys, key_id, read_keys
from pagoda_common.rpc.channels import CHANNEL_OPTIONS, RETIRE_S, Connection, _TokenChannel
from pagoda_common.rpc.credentials import ClientCredentials, RequireBearer, _read_tokens, token_guard
from pagoda_common.rpc.service import SERVER_OPTIONS, _decoded, _fail, error_status

MIB = 1024**2


def test_options_of_both_ends() -> None:
    assert dict(SERVER_OPTIONS) == {
        "grpc.max_receive_message_length": 64 * MIB,
        "grpc.max_send_message_length": 1024 * MIB,
        "grpc.max_metadata_size": 32 * 1024,
        "grpc.absolute_max_metadata_size": 32 * 1024,
        "grpc.max_concurrent_streams": 4096,
        "grpc.server_handshake_timeout_ms": 10_000,
        "grpc.http2.max_ping_strikes": 0,
        "grpc.http2.min_ping_interval_without_data_ms": 5_000,
        "grpc.http2.bdp_probe": 0,
        "grpc.http2.lookahead_bytes": MIB,
        "grpc.keepalive_permit_without_calls": 1,
        "grpc.keepalive_time_ms": 30_000,
        "grpc.keepalive_timeout_ms": 10_000,
        "grpc.experimental.tcp_max_read_chunk_size": 128 * 1024,
        "grpc.so_reuseport": 0,
    }
    assert dict(CHANNEL_OPTIONS) == {
        "grpc.max_send_message_length": 64 * MIB,
        "grpc.max_receive_message_length": 1024 * MIB,
        "grpc.keepalive_time_ms": 30_000,
        "grpc.keepalive_timeout_ms": 10_000,
        "grpc.keepalive_permit_without_calls": 1,
        "grpc.http2.max_pings_without_data": 0,
        "grpc.http2.bdp_probe": 0,
        "grpc.http2.lookahead_bytes": MIB,
        "grpc.enable_retries": 0,
        "grpc.initial_reconnect_backoff_ms": 100,
        "grpc.min_reconnect_backoff_ms": 3_000,
        "grpc.max_reconnect_backoff_ms": 200,
        "grpc.use_local_subchannel_pool": 1,
        "grpc.dns_min_time_between_resolutions_ms": 500,
    }


def details_of(error: PagodaError) -> list[Any]:
    found = []
    for packed in error_status(error).details:
        for kind in (error_details_pb2.BadRequest, error_details_pb2.RetryInfo):
            detail = kind()
            if packed.Unpack(detail):
                found.append(detail)
    return found


def test_an_error_has_its_details() -> None:
    status = error_status(NotFound("no such", field="model"))
    assert (status.code, status.message) == (5, "no such")
    [request] = details_of(NotFound("no such", field="model"))
    [violation] = request.field_violations
    assert (violation.field, violation.description) == ("model", "no such")
    [retry] = details_of(QueueFull("full", retry_after_s=2.25))
    assert (retry.retry_delay.seconds, retry.retry_delay.nanos) == (2, 250_000_000)
    assert len(details_of(QueueFull("full", field="x", retry_after_s=1))) == 2
    assert details_of(QueueFull("full")) == []


@pytest.mark.parametrize(("num_bytes", "is_whole"), [(1300, True), (1301, False)])
def test_a_message_of_an_error_has_a_bound(num_bytes: int, is_whole: bool) -> None:
    text = "a" * 700 + "b" * (num_bytes - 700)
    shown = error_status(NotFound(text)).message
    assert (shown == text) is is_whole
    if not is_whole:
        assert (shown[:650], shown[650:653], len(shown)) == (text[:650], " … ", 1303)
        assert shown[653:] == text[-650:]


class Context:
    """Of a call; notes how it was aborted."""

    def __init__(self, code: grpc.StatusCode | None = None) -> None:
        self._code = code
        self.aborted: tuple[Any, ...] = ()

    def code(self) -> grpc.StatusCode | None:
        return self._code

    async def abort(self, *args: Any) -> None:
        self.aborted = args


@pytest.mark.parametrize(
    ("error", "context_code", "code", "message"),
    [
        (NotFound("gone"), None, grpc.StatusCode.NOT_FOUND, "gone"),
        (ShareFull("yours"), None, grpc.StatusCode.RESOURCE_EXHAUSTED, "yours"),
        (
            NotImplementedError(),
            grpc.StatusCode.UNIMPLEMENTED,
            grpc.StatusCode.UNIMPLEMENTED,
            "/a/B is not implemented here",
        ),
        (NotImplementedError(), None, grpc.StatusCode.INTERNAL, "internal error: NotImplementedError"),
        (ValueError("secret"), None, grpc.StatusCode.INTERNAL, "internal error: ValueError"),
    ],
)
async def test_a_failure_is_this_status(
    error: Exception, context_code: grpc.StatusCode | None, code: grpc.StatusCode, message: str
) -> None:
    context = Context(context_code)
    await _fail(context, error, "/a/B")
    assert context.aborted == (code, message, ())
    detailed = Context()
    await _fail(detailed, InvalidRequest("wrong", field="n"), "/a/B")
    [(name, value)] = detailed.aborted[2]
    assert (name, detailed.aborted[0]) == ("grpc-status-details-bin", grpc.StatusCode.INVALID_ARGUMENT)
    assert b"wrong" in value


def test_a_message_of_another_type_is_a_wrong_request() -> None:
    assert _decoded(b"x", None) == b"x"
    assert _decoded(b"x", lambda data: data + b"y") == b"xy"
    with pytest.raises(InvalidRequest, match="is not a valid protobuf message of its type"):
        _decoded(b"\xff", error_details_pb2.BadRequest.FromString)


class Clock:
    """Timers of a loop, called when their time is over."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.now = 0.0
        self.timers: list[tuple[float, Callable[[], None], Any]] = []
        self._loop = loop

    def call_later(self, delay_s: float, call: Callable[[], None]) -> Any:
        handle = SimpleNamespace(is_cancelled=False)
        handle.cancel = lambda: setattr(handle, "is_cancelled", True)
        self.timers.append((self.now + delay_s, call, handle))
        return handle

    async def pass_to(self, now: float) -> None:
        while due := [one for one in self.timers if one[0] <= now and not one[2].is_cancelled]:
            first = min(due, key=lambda one: one[0])
            self.timers.remove(first)
            self.now = first[0]
            first[1]()
        self.now = now
        for _ in range(5):
            await asyncio.sleep(0)


@pytest.fixture
async def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock(asyncio.get_running_loop())
    monkeypatch.setattr(asyncio.get_running_loop(), "call_later", made.call_later)
    return made


async def never() -> AsyncIterator[bytes]:
    await asyncio.Event().wait()
    yield b""


async def begun(arrivals: Arrivals, host: str = "ipv4:1.2.3.4") -> "asyncio.Task[Any]":
    """A message that does not end."""
    context = SimpleNamespace(peer=lambda: f"{host}:5")
    task = asyncio.create_task(arrivals.message(never(), context))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return task


async def test_a_message_is_late_after_half_a_second_and_over_after_thirty(clock: Clock) -> None:
    arrivals = Arrivals()
    task = await begun(arrivals)
    await clock.pass_to(0.49)
    assert (arrivals.num_late, task.done()) == (0, False)
    await clock.pass_to(0.5)
    assert arrivals.num_late == 1
    await clock.pass_to(29.99)
    assert not task.done()
    await clock.pass_to(30.0)
    with pytest.raises(PagodaError, match="the message was not complete within 30 s") as caught:
        await task
    assert caught.value.code is Code.DEADLINE_EXCEEDED
    assert (arrivals.num_late, arrivals.num_late_seen) == (0, 1)
    assert all(handle.is_cancelled for _, _, handle in clock.timers)


async def test_a_host_may_have_32_late_messages_and_all_hosts_64(clock: Clock) -> None:
    arrivals = Arrivals()
    tasks = [await begun(arrivals, "ipv4:1.1.1.1") for _ in range(33)]
    await clock.pass_to(1.0)
    assert arrivals.num_late == 32
    [refused] = [task for task in tasks if task.done()]
    with pytest.raises(QueueFull, match=r"32 messages have begun and not ended, at most 64 may \(32 of one host\)"):
        await refused
    tasks += [await begun(arrivals, "ipv4:2.2.2.2") for _ in range(32)]
    await clock.pass_to(2.0)
    assert arrivals.num_late == 64
    last = await begun(arrivals, "ipv4:3.3.3.3")
    await clock.pass_to(3.0)
    with pytest.raises(QueueFull) as caught:
        await last
    assert caught.value.retry_after_s == 1
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert arrivals.num_late == 0
    assert arrivals.num_late_seen == 66


async def test_a_message_in_time_is_given_and_a_call_without_one_refused(clock: Clock) -> None:
    arrivals = Arrivals()

    async def one() -> AsyncIterator[bytes]:
        yield b"it"

    async def none() -> AsyncIterator[bytes]:
        return
        yield b""

    context = SimpleNamespace(peer=lambda: "")
    assert await arrivals.message(one(), context) == b"it"
    with pytest.raises(InvalidRequest, match="the call has no message"):
        await arrivals.message(none(), context)
    task = await begun(arrivals)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (arrivals.num_late, arrivals.num_late_seen) == (0, 0)
    assert all(handle.is_cancelled for _, _, handle in clock.timers)


def test_of_a_call_eight_keys_are_looked_at() -> None:
    keys = BearerKeys(["right-key", "other-key"])
    wrong = [("authorization", f"Bearer wrong-{number}") for number in range(7)]
    right = ("authorization", "Bearer right-key")
    assert keys.accepted([*wrong, right]) == key_id("right-key")
    assert keys.accepted([*wrong, ("authorization", "Bearer wrong-7"), right]) is None
    assert keys.accepted([("x-api-key", "other-key")], key_header="x-api-key") == key_id("other-key")
    assert keys.accepted([("x-api-key", "other-key")]) is None
    assert keys.accepted([("authorization", b"Bearer right-key"), ("authorization", "Basic right-key")]) is None
    assert len(key_id("right-key")) == 16
    assert (bool(keys), bool(BearerKeys([]))) == (True, False)
    assert BearerKeys(["ä"]).accepted([("authorization", "Bearer ä".encode().decode("latin-1"))]) == key_id("ä")


def test_keys_are_lines_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# a comment\n\n  one  \ntwo\n#three\n")
    assert read_keys(str(path), field="api_key_file") == ("one", "two")
    path.write_text("# nothing\n")
    with pytest.raises(ConfigError, match=r"api_key_file .* has no key") as caught:
        read_keys(str(path), field="api_key_file")
    assert caught.value.field == "api_key_file"
    with pytest.raises(ConfigError, match="cannot be read"):
        read_keys(str(tmp_path / "none"), field="api_key_file")


def test_a_token_has_sixteen_characters_at_least(tmp_path: Path) -> None:
    assert _read_tokens(None, "a" * 16 + " " + "b" * 17) == ("a" * 16, "b" * 17)
    assert _read_tokens(None, "") == ()
    for token, message in (
        ("a" * 15, "PAGODA_SERVICE_TOKEN has a token of 15 characters, must be at least 16"),
        ("ä" * 16, "has a token with characters beyond printable ASCII"),
        ("a" * 16 + "\x7f", "has a token with characters beyond printable ASCII"),
    ):
        with pytest.raises(ConfigError, match=message) as caught:
            _read_tokens(None, token)
        assert caught.value.field == "service_token_file"
    path = tmp_path / "token"
    path.write_text("c" * 20 + "\n" + "d" * 20)
    assert _read_tokens(str(path), "a" * 16) == ("c" * 20, "d" * 20), "the file goes first"
    shown = ClientCredentials(SecurityConfig(service_token_file=str(path))).metadata()
    assert shown == (("authorization", "Bearer " + "c" * 20),)
    assert ClientCredentials(SecurityConfig()).metadata() == ()


@pytest.mark.parametrize(
    ("method", "shown", "is_let_in"),
    [
        ("/pagoda.v1.Scheduler/Session", None, False),
        ("/pagoda.v1.Scheduler/Session", "t" * 16, True),
        ("/pagoda.v1.Scheduler/Session", "u" * 16, False),
        ("/grpc.health.v1.Health/Check", None, True),
        ("/grpc.health.v1.HealthX/Check", None, False),
        ("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", None, False),
    ],
)
async def test_calls_show_the_token_but_those_of_health(method: str, shown: str | None, is_let_in: bool) -> None:
    guard = token_guard(ServerSecurity(service_token="t" * 16))
    assert isinstance(guard, RequireBearer)
    metadata = [] if shown is None else [("authorization", f"Bearer {shown}")]
    details: Any = SimpleNamespace(method=method, invocation_metadata=metadata)

    async def handler(_: Any) -> str:
        return "let in"

    found = await guard.intercept_service(handler, details)
    assert (found == "let in") is is_let_in
    if not is_let_in:
        with pytest.raises(PagodaError, match="the call has no valid service token") as caught:
            await found.stream_unary(None, None)
        assert caught.value.code is Code.UNAUTHENTICATED
    assert token_guard(ServerSecurity()) is None


async def test_a_token_goes_beside_the_metadata_of_every_kind_of_call() -> None:
    asked: list[Any] = []

    class Channel:
        def __getattr__(self, kind: str) -> Any:
            def make(*args: Any, **kwargs: Any) -> Any:
                return lambda *more, **given: asked.append((kind, args, kwargs, more, given))

            return make

    channel = _TokenChannel(cast("Any", Channel()), lambda: (("authorization", "Bearer t"),))
    for kind in ("unary_unary", "unary_stream", "stream_unary", "stream_stream"):
        getattr(channel, kind)("/m", request_serializer=1)("it", metadata=(("a", "b"),), timeout=3)
        getattr(channel, kind)("/m")("it")
    shown = (("authorization", "Bearer t"),)
    for number, kind in enumerate(("unary_unary", "unary_stream", "stream_unary", "stream_stream")):
        assert asked[2 * number] == (
            kind,
            ("/m",),
            {"request_serializer": 1},
            ("it",),
            {"metadata": (("a", "b"), *shown), "timeout": 3},
        )
        assert asked[2 * number + 1] == (kind, ("/m",), {}, ("it",), {"metadata": shown})


async def test_a_connection_is_made_once_and_ends() -> None:
    connection = Connection("127.0.0.1:1")
    assert connection.channel is None
    channel = connection.renew()
    assert connection.renew() is channel is connection.channel
    await connection.close()
    assert connection.channel is None
    assert connection.renew() is not channel
    await connection.close()
    with pytest.raises(ConfigError, match=r"address is '10\.0\.0\.1:1', must be on loopback"):
        Connection("10.0.0.1:1")


async def test_a_connection_that_ends_waits_for_no_older_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    """What replaced certificates left behind ends with it."""
    graces: list[float | None] = []

    class Channel:
        async def close(self, grace: float | None = None) -> None:
            graces.append(grace)
            if grace is not None:
                await asyncio.Event().wait()

    connection = Connection("127.0.0.1:1")
    monkeypatch.setattr("pagoda_common.rpc.channels._open", lambda address, credentials: Channel())
    first = connection.renew()
    connection._used = None  # as if other files were there
    assert connection.renew() is not first
    (retiring,) = connection._retiring
    await asyncio.sleep(0)
    await connection.close()
    await asyncio.wait([retiring])
    assert (retiring.cancelled(), graces, connection._retiring) == (True, [RETIRE_S, None], set())


async def test_peers_are_known_while_a_message_of_theirs_is_to_come() -> None:
    arrivals, whens_over = Arrivals(), []
    task = await begun(arrivals, "ipv4:1.1.1.1")
    stream = SimpleNamespace(peer=lambda: "ipv4:2.2.2.2:6", add_done_callback=whens_over.append)
    arrivals.stream_begins(stream)
    assert arrivals.peers() == {"ipv4:1.1.1.1:5", "ipv4:2.2.2.2:6"}
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert arrivals.peers() == {"ipv4:2.2.2.2:6"}
    [is_over] = whens_over
    is_over(stream)
    assert arrivals.peers() == set()
