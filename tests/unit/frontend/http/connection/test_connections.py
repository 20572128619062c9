"""What a connection may send and leave untaken, by a clock that the tests turn: bounds exactly, and timers that end."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from starlette.types import Receive, Scope, Send
from uvicorn import Config
from uvicorn.server import ServerState

from pagoda_frontend.budget.held_memory import HeldMemory
from pagoda_frontend.http.connection import lingering
from pagoda_frontend.http.connection.body_watch import FRAMING_BYTES, GRACE_S, MIN_BYTES_PER_S
from pagoda_frontend.http.connection.http_protocol import LARGE_HEAD_BYTES, MAX_PIPELINED, BoundedHttpProtocol, bounded
from pagoda_frontend.http.connection.lingering import LINGER_BYTES, LINGER_S

HEAD = b"POST /v1/x HTTP/1.1\r\nhost: a\r\n"
GET = b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n"


class Timer:
    """A call that waits."""

    def __init__(self, at_s: float, call: Callable[[], None]) -> None:
        self.at_s = at_s
        self.call = call
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


class Clock:
    """A loop whose clock the test advances."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.timers: list[Timer] = []
        self.connections: list[Connection] = []

    def time(self) -> float:
        return self.now_s

    def call_later(self, delay_s: float, call: Callable[..., None], *args: Any) -> Timer:
        timer = Timer(self.now_s + delay_s, lambda: call(*args))
        self.timers.append(timer)
        return timer

    def create_task(self, coroutine: Any) -> Any:
        return asyncio.get_running_loop().create_task(coroutine)

    @property
    def due_in_s(self) -> list[float]:
        """Of what waits."""
        return sorted(round(timer.at_s - self.now_s, 6) for timer in self.timers if not timer.is_cancelled)

    def pass_s(self, seconds: float) -> None:
        """Let time pass, and call what is due."""
        end_s = self.now_s + seconds
        while due := [one for one in self.timers if not one.is_cancelled and one.at_s <= end_s + 1e-9]:
            timer = min(due, key=lambda one: one.at_s)
            self.timers.remove(timer)
            self.now_s = timer.at_s
            timer.call()
        self.now_s = end_s


class Wire(asyncio.Transport):
    """A connection that keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.calls: list[str] = []
        self.is_closed = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return {"peername": ("10.0.0.7", 5), "sockname": ("10.0.0.1", 80)}.get(name, default)

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def close(self) -> None:
        self.is_closed = True

    def abort(self) -> None:
        self.calls.append("abort")
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.calls.append("eof")

    def pause_reading(self) -> None:
        self.calls.append("pause")

    def resume_reading(self) -> None:
        self.calls.append("resume")


class Connection:
    """One connection to an app that waits for `answer`, reads the body before it if `reads_body`, and notes its end."""

    def __init__(self, clock: Clock, **bounds: Any) -> None:
        self.clock, self.wire = clock, Wire()
        self.answer = asyncio.Event()
        self.reads_body = True
        self.paths: list[str] = []
        self.ends: list[str] = []
        limits: dict[str, Any] = {"max_head_bytes": 1000, "max_headers": 4, "send_timeout_s": 300.0} | bounds
        config = Config(
            self._app,
            lifespan="off",
            log_config=None,
            timeout_keep_alive=5,
            access_log=False,
            interface="asgi3",
            proxy_headers=False,
        )
        config.load()
        self.protocol = bounded(**limits)(config, ServerState(), {}, _loop=clock)
        self.protocol.connection_made(self.wire)
        clock.connections.append(self)

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.paths.append(scope["path"])
        message: Any = {"more_body": True}
        while self.reads_body and message.get("more_body"):
            message = await receive()
        if message["type" if "type" in message else "more_body"] == "http.disconnect":
            self.ends.append("gone")
            return
        await self.answer.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})
        self.ends.append("answered")

    async def send(self, *parts: bytes) -> None:
        for part in parts:
            self.protocol.data_received(part)
        await self.settle()

    def lose(self) -> None:
        """The client goes away."""
        self.wire.is_closed = True
        self.protocol.connection_lost(None)

    async def settle(self) -> None:
        for _ in range(10):
            await asyncio.sleep(0)

    @property
    def refusal(self) -> tuple[int, str] | None:
        """Status and message of the refusal that was written last."""
        head, _, body = self.wire.written.rpartition(b"\r\n\r\n")
        if b"BadRequestError" not in body:
            return None
        lines = head.split(b"HTTP/1.1 ")[-1].split(b"\r\n")
        status = int(lines[0].split()[0])
        error = orjson.loads(body)["error"]
        assert (error["type"], error["param"], error["code"]) == ("BadRequestError", None, status)
        assert {b"content-type: application/json", b"connection: close"} <= set(lines)
        assert b"content-length: %d" % len(body) in lines
        assert (b"retry-after: 1" in lines) == (status == 503)
        return status, str(error["message"])


@pytest.fixture
async def clock(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Clock]:
    clock = Clock()
    monkeypatch.setattr(lingering, "asyncio", SimpleNamespace(get_running_loop=lambda: clock))
    yield clock
    for connection in clock.connections:  # no handler waits when the loop ends
        connection.answer.set()
        connection.protocol.resume_writing()
        connection.lose()
        await connection.settle()


async def test_a_connection_that_sends_nothing_ends_after_a_minute(clock: Clock) -> None:
    one = Connection(clock)
    clock.pass_s(59.9)
    assert not one.wire.is_closed
    clock.pass_s(0.1)
    assert one.refusal == (408, "the request did not begin within 60 s")
    assert clock.due_in_s == [LINGER_S], "the client can read that"


async def test_a_head_has_ten_seconds_from_its_first_byte(clock: Clock) -> None:
    one = Connection(clock)
    clock.pass_s(59)
    await one.send(b"GET")
    clock.pass_s(9.9)
    await one.send(b" /health")  # which does not begin the time again
    assert one.refusal is None
    clock.pass_s(0.1)
    assert one.refusal == (408, "the request did not begin within 10 s")


async def test_a_head_that_ends_in_time_is_answered_and_the_next_has_its_time_anew(clock: Clock) -> None:
    one = Connection(clock)
    one.answer.set()
    await one.send(GET[:5])
    clock.pass_s(9.9)
    await one.send(GET[5:])
    assert one.wire.written.startswith(b"HTTP/1.1 200 ")
    assert one.ends == ["answered"]
    assert clock.due_in_s == [5.0], "the time for which an idle connection is kept"
    clock.pass_s(4)
    await one.send(GET[:5])
    assert clock.due_in_s == [10.0]
    clock.pass_s(10)
    assert one.refusal == (408, "the request did not begin within 10 s")


async def test_a_head_that_comes_while_the_request_before_is_answered_waits_for_it(clock: Clock) -> None:
    one = Connection(clock)
    await one.send(GET, GET[:5])
    clock.pass_s(35)
    assert one.refusal is None
    one.answer.set()
    await one.settle()
    assert one.ends == ["answered"]
    clock.pass_s(10)
    assert one.refusal == (408, "the request did not begin within 10 s")


@pytest.mark.parametrize("over", [0, 1])
async def test_bytes_of_a_head_are_bounded(clock: Clock, over: int) -> None:
    one = Connection(clock)
    head = HEAD + b"x: "
    await one.send(head + b"y" * (1000 - len(head) + over))
    assert one.refusal == ((431, "request line and headers have more than 1000 bytes") if over else None)
    two = Connection(clock)  # the same in pieces
    await two.send(head, b"y" * (1000 - len(head)), b"y" * over)
    assert (two.refusal is not None) == bool(over)


@pytest.mark.parametrize("over", [0, 1])
async def test_header_lines_are_bounded(clock: Clock, over: int) -> None:
    one = Connection(clock)
    one.answer.set()
    lines = b"".join(b"x%d: y\r\n" % number for number in range(3 + over))
    await one.send(b"GET / HTTP/1.1\r\nhost: a\r\n" + lines + b"\r\n")
    assert one.refusal == ((431, "the request has more than 4 headers") if over else None)
    assert one.paths == ([] if over else ["/"])


async def test_bytes_of_heads_are_counted_anew_for_each_request(clock: Clock) -> None:
    one = Connection(clock)
    one.answer.set()
    for number in range(3):
        await one.send(b"GET /%d HTTP/1.1\r\nhost: a\r\nx: %s\r\n\r\n" % (number, b"y" * 900))
    assert (one.refusal, one.paths) == (None, ["/0", "/1", "/2"])


async def test_a_large_head_is_held_until_it_ends(clock: Clock) -> None:
    memory = HeldMemory(max_bytes=10 * LARGE_HEAD_BYTES)
    one = Connection(clock, max_head_bytes=10**9, held_memory=memory)
    await one.send(HEAD + b"x: " + b"y" * (LARGE_HEAD_BYTES - len(HEAD) - 3))
    assert memory.num_bytes == 0
    await one.send(b"y" * 100)
    assert memory.num_bytes == 100
    mine = memory.begin()
    mine.owner = "10.0.0.7"
    mine.add(5 * LARGE_HEAD_BYTES - 100)  # the rest of the address's share
    await one.send(b"y")
    status, message = one.refusal or (0, "")
    assert (status, message[:28]) == (503, "requests before admission an")
    assert memory.num_bytes == 5 * LARGE_HEAD_BYTES - 100, "what was held is given back"


@pytest.mark.parametrize("is_lost", [False, True])
async def test_a_large_head_is_given_back(clock: Clock, is_lost: bool) -> None:
    memory = HeldMemory(max_bytes=10 * LARGE_HEAD_BYTES)
    one = Connection(clock, max_head_bytes=10**9, held_memory=memory)
    one.answer.set()
    await one.send(HEAD + b"x: " + b"y" * 2 * LARGE_HEAD_BYTES)
    assert memory.num_bytes > 0
    if is_lost:
        one.lose()
    else:
        await one.send(b"\r\ncontent-length: 0\r\n\r\n")
        assert one.ends == ["answered"]
    assert memory.num_bytes == 0


async def test_requests_that_wait_are_bounded(clock: Clock) -> None:
    one = Connection(clock)
    await one.send(GET * (1 + MAX_PIPELINED))
    assert one.refusal is None
    await one.send(GET)
    assert one.refusal == (
        400,
        f"more than {MAX_PIPELINED} pipelined requests wait on this connection",
    )


@pytest.mark.parametrize("is_refused", [False, True])
async def test_a_request_that_others_wait_for_ends_with_its_connection(clock: Clock, is_refused: bool) -> None:
    one = Connection(clock)
    one.reads_body = False
    await one.send(GET * (2 + MAX_PIPELINED) if is_refused else GET * 3)
    if not is_refused:
        one.lose()
    written = one.wire.written
    one.answer.set()
    await one.settle()
    assert one.paths == ["/health"], "the others are not begun"
    assert (one.wire.written, one.ends) == (written, ["answered"]), "nothing is written to a connection that has ended"


async def test_no_tunnel(clock: Clock) -> None:
    one = Connection(clock)
    await one.send(b"CONNECT a:80 HTTP/1.1\r\nhost: a\r\n\r\n")
    assert one.refusal == (405, "CONNECT is not supported: this server is not a proxy")
    assert one.paths == []


async def test_what_is_no_http_is_refused_once(clock: Clock) -> None:
    one = Connection(clock)
    await one.send(b"\x16\x03\x01 hello\r\n\r\n", b"more", b"more")
    assert one.refusal == (400, "Invalid HTTP request received.")
    assert one.wire.written.count(b"HTTP/1.1 400") == 1


async def test_an_offer_of_another_protocol_is_left_out_and_the_rest_kept(clock: Clock) -> None:
    one = Connection(clock, max_headers=9)
    seen: list[Any] = []
    one.answer.set()
    app = one.protocol.app

    async def noted(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope)
        await app(scope, receive, send)

    one.protocol.app = noted
    offer = b"connection: Upgrade, HTTP2-Settings, keep-alive\r\nupgrade: h2c\r\nhttp2-settings: AA\r\n"
    await one.send(b"POST /p?q=1 HTTP/1.1\r\nhost: a\r\n" + offer + b"content-length: 2\r\nx: y\r\n\r\nhi" + GET)
    assert one.paths == ["/p", "/health"]
    assert seen[0]["headers"] == [
        (b"host", b"a"),
        (b"connection", b" keep-alive"),
        (b"content-length", b"2"),
        (b"x", b"y"),
    ] or seen[0]["headers"] == [
        (b"host", b"a"),
        (b"connection", b"keep-alive"),
        (b"content-length", b"2"),
        (b"x", b"y"),
    ]
    assert (seen[0]["method"], seen[0]["query_string"]) == ("POST", b"q=1")
    assert one.ends == ["answered", "answered"]


async def test_a_body_that_does_not_come_ends_after_the_grace(clock: Clock) -> None:
    one = Connection(clock)
    await one.send(HEAD + b"content-length: 9000000\r\n\r\n" + b"x" * (MIN_BYTES_PER_S - 1))
    clock.pass_s(GRACE_S - 0.1)
    assert one.refusal is None
    clock.pass_s(0.1)
    assert one.refusal == (408, f"the body arrived at less than {MIN_BYTES_PER_S} bytes per second")


async def test_a_body_that_comes_is_waited_for_and_its_timer_ends_with_it(clock: Clock) -> None:
    one = Connection(clock)
    size = 20 * MIN_BYTES_PER_S
    await one.send(HEAD + b"content-length: %d\r\n\r\n" % size)
    for _ in range(10):
        clock.pass_s(1.9)
        await one.send(b"x" * (2 * MIN_BYTES_PER_S))
    assert one.refusal is None
    assert clock.due_in_s == [], "the body is whole"
    one.answer.set()
    await one.settle()
    assert one.ends == ["answered"]


@pytest.mark.parametrize("beginning", [b"0\r\nx: ", b"1;x="], ids=["trailer", "extension"])
async def test_trailers_and_framing_are_bounded_however_small_the_pieces_are(clock: Clock, beginning: bytes) -> None:
    one = Connection(clock)
    await one.send(HEAD + b"transfer-encoding: chunked\r\n\r\n", beginning)
    await one.send(*[b"y" * 500] * ((FRAMING_BYTES - len(beginning)) // 500))
    assert one.refusal is None
    await one.send(*[b"y" * 500] * 2)
    assert one.refusal == (431, f"the body has more than {FRAMING_BYTES} bytes of trailers and framing")


async def test_time_in_which_the_server_reads_nothing_is_its_own(clock: Clock) -> None:
    one = Connection(clock)
    one.reads_body = False
    await one.send(HEAD + b"content-length: 9000000\r\n\r\n" + b"x" * 100_000)
    assert "pause" in one.wire.calls
    clock.pass_s(20 * GRACE_S)
    assert one.refusal is None
    assert clock.due_in_s == [GRACE_S]


@pytest.mark.parametrize("send_timeout_s", [0.0, 7.0])
async def test_an_answer_that_is_not_taken_ends_the_connection(
    clock: Clock, send_timeout_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    one = Connection(clock, send_timeout_s=send_timeout_s)
    await one.send(GET)
    one.protocol.pause_writing()
    clock.pass_s(6.9)
    one.protocol.resume_writing()
    one.protocol.pause_writing()
    clock.pass_s(6.9)
    assert one.wire.calls == []
    with caplog.at_level(logging.WARNING):
        clock.pass_s(0.1)
    assert one.wire.calls == (["abort"] if send_timeout_s else [])
    if send_timeout_s:
        assert "disconnected a client that did not read its answer for 7 s" in caplog.text


async def test_a_lost_connection_leaves_no_timer(clock: Clock) -> None:
    one = Connection(clock)
    await one.send(GET, HEAD + b"content-length: 5\r\n\r\n1")
    one.protocol.pause_writing()
    assert len(clock.due_in_s) >= 2
    one.lose()
    assert clock.due_in_s == []


async def test_who_is_refused_while_it_sends_is_read_for_a_while(clock: Clock) -> None:
    one = Connection(clock)
    await one.send(HEAD + b"content-length: 9000000\r\n\r\n")
    clock.pass_s(GRACE_S)
    assert one.refusal is not None
    assert one.wire.calls == ["eof", "resume"]
    assert not one.wire.is_closed
    await one.settle()
    assert one.ends == ["gone"], "its handler waits for no more of the body"
    await one.send(b"x" * LINGER_BYTES)
    assert not one.wire.is_closed
    await one.send(b"x")
    assert one.wire.is_closed
    assert clock.due_in_s == []


async def test_a_body_that_stays_out_after_its_answer_has_begun_ends_the_connection_alone(clock: Clock) -> None:
    one = Connection(clock)

    async def begins(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"o", "more_body": True})
        await one.answer.wait()

    one.protocol.app = begins
    await one.send(HEAD + b"content-length: 9000000\r\n\r\n")
    written = one.wire.written
    assert written.startswith(b"HTTP/1.1 200 ")
    clock.pass_s(GRACE_S)
    assert (one.wire.calls, one.wire.written) == (["eof", "resume"], written)
    clock.pass_s(LINGER_S)
    assert (one.wire.is_closed, one.wire.written) == (True, written)


async def test_a_connection_that_is_closing_is_refused_nothing(clock: Clock) -> None:
    one = Connection(clock)
    one.wire.is_closed = True
    await one.send(b"\x16\x03\x01 hello\r\n\r\n")
    assert one.wire.written == b""


async def test_lingering_ends_with_its_time_or_the_server(clock: Clock) -> None:
    for is_shutdown in (False, True):
        one = Connection(clock)
        await one.send(HEAD + b"x: " + b"y" * 1000)
        assert (one.wire.is_closed, one.refusal is not None) == (False, True)
        clock.pass_s(LINGER_S - 0.1)
        assert not one.wire.is_closed
        if is_shutdown:
            one.protocol.shutdown()
        else:
            clock.pass_s(0.1)
        assert one.wire.is_closed


def test_bounds_are_those_given_and_the_classes_own_stay() -> None:
    memory = HeldMemory(max_bytes=1)
    made = bounded(max_head_bytes=1, max_headers=2, send_timeout_s=3.0, held_memory=memory)
    assert (made.max_head_bytes, made.max_headers, made.send_timeout_s) == (1, 2, 3.0)
    assert made.held_memory is memory
    own = BoundedHttpProtocol
    assert (own.max_head_bytes, own.max_headers, own.send_timeout_s) == (4 * 1024**2, 256, 300.0)
    assert (own.open_timeout_s, own.head_timeout_s, own.held_memory) == (60.0, 10.0, None)
