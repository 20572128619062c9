"""HTTP/1.1 on a connection, with bounds on what a client may send before a request is complete, and on how long it may
leave an answer unread. Knows no endpoint."""

import asyncio
import logging
from typing import Any

import httptools
import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from pagoda_common.errors import PagodaError
from pagoda_frontend.budget.held_memory import HeldMemory, Hold
from pagoda_frontend.http.connection.body_watch import GRACE_S, MIN_BYTES_PER_S, BodyWatch
from pagoda_frontend.http.connection.lingering import LingeringTransport

logger = logging.getLogger(__name__)

BAD_REQUEST = (400, b"Bad Request")
TIMEOUT = (408, b"Request Timeout")
TOO_LARGE = (431, b"Request Header Fields Too Large")
OVERLOADED = (503, b"Service Unavailable")
LARGE_HEAD_BYTES = 64 * 1024
NO_TUNNEL = (405, b"Method Not Allowed")
MAX_PIPELINED = 64
"""Maximum number of pipelined requests that wait on a connection; each holds a head in memory."""
UPGRADE_HEADERS = (b"upgrade", b"http2-settings")
"""Headers that offer another protocol. A server may ignore the offer (RFC 9110, section 7.8), and this one does."""


class BoundedHttpProtocol(HttpToolsProtocol):
    """Ends a connection whose request line and headers are too long or too many (431) or do not end (408).

    The parser itself would keep them all forever. Subclasses made by `bounded` carry the bounds. A request that offers
    an upgrade (Java's HttpClient offers h2c with its first request) is answered as if it offered none. A client that is
    refused while it sends can still read the answer: its connection lingers.
    """

    max_head_bytes = 4 * 1024**2
    """Maximum bytes of request line and headers together."""
    max_headers = 256
    """Maximum number of header lines of one request."""
    open_timeout_s = 60.0
    """Maximum seconds from the connection to the first byte of its first head: clients and balancers open some
    connections ahead."""
    head_timeout_s = 10.0
    """Maximum seconds from the first byte of a head to its end."""
    held_memory: HeldMemory | None = None
    """Counts heads above LARGE_HEAD_BYTES with the other memory of requests."""
    send_timeout_s = 300.0
    """Maximum seconds for which an answer may wait for its client (asyncio's water marks: from 64 KiB down to 16 KiB).
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._is_in_head = True
        self._is_upgrade_offered = False
        self._head_bytes = 0
        self._hold: Hold | None = None
        self._refusal = BAD_REQUEST
        self._fault = ""
        self._is_refused = False
        self._timer: asyncio.TimerHandle | None = None
        self._body: BodyWatch | None = None
        self._body_timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None
        self._cycles: list[Any] = []
        """Unanswered requests, the running one first; uvicorn keeps only the last one."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn declares it
        """A client has connected."""
        super().connection_made(transport)
        self._lingering = LingeringTransport(transport, is_sending=self._is_client_sending, on_end=self._on_linger)
        self.transport = self._lingering  # type: ignore[assignment]
        self._start_timer(self.open_timeout_s)

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone."""
        self._lingering.stop()
        self._stop_timer()
        self._end_body()
        self._release_head()
        self._stop_send_timer()
        self._unset_keepalive_if_required()  # else a connection that was reset is kept as long as one that is idle
        self._disconnect_all()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """The client does not read what was sent: its handler waits."""
        super().pause_writing()
        if self.send_timeout_s and self._send_timer is None:
            self._send_timer = self.loop.call_later(self.send_timeout_s, self._cut_off)

    def resume_writing(self) -> None:
        """The client has read most of it."""
        self._stop_send_timer()
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        """Take bytes from the connection."""
        if self._lingering.is_lingering:
            self._lingering.drop(len(data))
            return
        if self._is_in_head:
            if not self._head_bytes:
                self._stop_timer()  # of the wait for it
            self._head_bytes += len(data)
            self._start_timer(self.head_timeout_s)
            if self._head_bytes > LARGE_HEAD_BYTES and not self._has_room_for(len(data)):
                return
        elif self._body is not None:
            self._body.num_received += len(data)
        self._unset_keepalive_if_required()
        self._parse(data)
        if self._body is not None and not self.transport.is_closing() and (fault := self._body.fault):
            self._refuse(TOO_LARGE, fault)
        if self._is_in_head and self._head_bytes > self.max_head_bytes and not self.transport.is_closing():
            self._refuse(TOO_LARGE, f"request line and headers have more than {self.max_head_bytes} bytes")

    def _is_client_sending(self) -> bool:
        """Whether the client is in the middle of a request, or has pipelined more of them."""
        return self._is_refused or self._body is not None or self._head_bytes > 0 or bool(self.pipeline)

    def _on_linger(self) -> None:
        """The answer is written, and nothing more is read: a request that still waits for its body ends."""
        self._stop_timer()
        self._end_body()
        self._release_head()
        self._unset_keepalive_if_required()
        self.pipeline.clear()
        self._disconnect_all()

    def _disconnect_all(self) -> None:
        """Every request ends as if its client had disconnected, even one that pipelined requests wait for."""
        for cycle in self._cycles:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self._cycles = []

    def shutdown(self) -> None:
        """The server shuts down."""
        if self._lingering.is_lingering:
            self._lingering.end()
        super().shutdown()

    def _has_room_for(self, num_bytes: int) -> bool:
        """Count `num_bytes` of a large head; whether they may be held."""
        if self.held_memory is not None and self._hold is None:
            self._hold = self.held_memory.begin()
            self._hold.owner = self.client[0] if self.client else ""
        try:
            if self._hold is not None:
                self._hold.add(num_bytes)
        except PagodaError as error:
            self._refuse(OVERLOADED, error.message)
            return False
        return True

    def _release_head(self) -> None:
        if self._hold is not None:
            self._hold.release()
            self._hold = None

    def _parse(self, data: bytes) -> None:
        """Feed `data` to the parser. It stops at a head that offers an upgrade; a new parser continues without the
        offer."""
        while not self.transport.is_closing():
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                data = self._head_without_upgrade() + data[upgrade.args[0] :]
                self._is_upgrade_offered = False
                self.parser = httptools.HttpRequestParser(self)
                continue
            except httptools.HttpParserError:
                self.send_400_response("Invalid HTTP request received.")
            return

    def _head_without_upgrade(self) -> bytes:
        lines = [self.parser.get_method() + b" " + self.url + b" HTTP/1.1"]
        for name, value in self.headers:
            if name == b"connection":
                kept = [word for word in value.split(b",") if word.strip().lower() not in UPGRADE_HEADERS]
                value = b",".join(kept)
            if name not in UPGRADE_HEADERS and (value or name != b"connection"):
                lines.append(name + b": " + value)
        return b"\r\n".join([*lines, b"", b""])

    def on_message_begin(self) -> None:
        """A request begins."""
        if len(self.pipeline) >= MAX_PIPELINED:
            self._fault = f"more than {MAX_PIPELINED} pipelined requests wait on this connection"
            raise ValueError(self._fault)
        super().on_message_begin()
        self._is_in_head = True

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header line is complete; raising ends the parsing, and `send_400_response` follows."""
        if len(self.headers) >= self.max_headers:
            self._refusal, self._fault = TOO_LARGE, f"the request has more than {self.max_headers} headers"
            raise ValueError(self._fault)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is complete."""
        if self.parser.get_method() == b"CONNECT":
            self._refuse(NO_TUNNEL, "CONNECT is not supported: this server is not a proxy")
            return
        self._is_upgrade_offered = self.parser.should_upgrade()
        if self._is_upgrade_offered:
            return  # `_parse` reads the head again without the offer
        self._is_in_head = False
        self._head_bytes = 0
        self._release_head()
        self._stop_timer()
        self._body = BodyWatch(now_s=self.loop.time())
        super().on_headers_complete()
        self._cycles = [cycle for cycle in self._cycles if not cycle.response_complete]
        self._cycles.append(self.cycle)
        self._body_timer = self.loop.call_later(GRACE_S, self._on_body_time)

    def on_body(self, body: bytes) -> None:
        """More of a body has arrived."""
        if self._body is not None:
            self._body.add(len(body))
        super().on_body(body)

    def on_chunk_header(self) -> None:
        """A chunk of a body begins."""
        if self._body is not None:
            self._body.num_chunks += 1

    def on_message_complete(self) -> None:
        """The body is complete."""
        self._end_body()
        if self._is_upgrade_offered or self.transport.is_closing():
            return
        super().on_message_complete()
        self._is_in_head = True
        self._head_bytes = 0

    def send_400_response(self, msg: str) -> None:
        """Refuse a request that cannot be parsed, is too large or does not arrive, and end the connection."""
        if self.transport.is_closing():
            return
        self._is_refused = True
        status, reason = self._refusal
        error = {"message": self._fault or msg, "type": "BadRequestError", "param": None, "code": status}
        body = orjson.dumps({"error": error})
        head = b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n"
        head += b"retry-after: 1\r\n\r\n" if status == 503 else b"\r\n"
        self.transport.write(head % (status, reason, len(body)) + body)
        self.transport.close()

    def _end_body(self) -> None:
        self._body = None
        if self._body_timer is not None:
            self._body_timer.cancel()
            self._body_timer = None

    def _on_body_time(self) -> None:
        """End a body that arrives too slowly; if its answer has begun, only the connection is closed."""
        assert self._body is not None
        now_s = self.loop.time()
        is_ours = self.flow.read_paused
        if is_ours:
            self._body.pause(now_s)
        left_s = self._body.look(now_s)
        if is_ours or left_s > 0:
            self._body_timer = self.loop.call_later(GRACE_S if is_ours else left_s, self._on_body_time)
        elif self.cycle is not None and self.cycle.response_started:
            self.transport.close()
        elif not self.transport.is_closing():
            self._refuse(TIMEOUT, f"the body arrived at less than {MIN_BYTES_PER_S} bytes per second")

    def _stop_send_timer(self) -> None:
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None

    def _cut_off(self) -> None:
        """The request ends as if its client had disconnected."""
        self._send_timer = None
        logger.warning("disconnected a client that did not read its answer for %g s", self.send_timeout_s)
        self.transport.abort()

    def _refuse(self, refusal: tuple[int, bytes], fault: str) -> None:
        self._refusal, self._fault = refusal, fault
        self.send_400_response(fault)

    def _start_timer(self, timeout_s: float) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(timeout_s, self._on_timeout, timeout_s)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timeout(self, timeout_s: float) -> None:
        self._timer = None
        if self.cycle is not None and not self.cycle.response_complete:
            self._start_timer(timeout_s)  # the head of the next request comes while this one is answered
        elif self._is_in_head and not self.transport.is_closing():
            self._refuse(TIMEOUT, f"the request did not begin within {timeout_s:g} s")


def bounded(
    *, max_head_bytes: int, max_headers: int, send_timeout_s: float, held_memory: HeldMemory | None = None
) -> type[BoundedHttpProtocol]:
    """A subclass with these bounds; uvicorn makes an instance for each connection."""
    bounds = {
        "max_head_bytes": max_head_bytes,
        "max_headers": max_headers,
        "send_timeout_s": send_timeout_s,
        "held_memory": held_memory,
    }
    return type("BoundedHttpProtocol", (BoundedHttpProtocol,), bounds)
