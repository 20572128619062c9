"""HTTP/2 by hand, for what no gRPC client sends: frames over a socket, and as much flow control as that needs."""

import socket
import struct
import threading
from collections import defaultdict
from contextlib import suppress

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
END_STREAM, END_HEADERS, ACK = 1, 4, 1
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
FIRST_WINDOW = 65_535
MAX_FRAME = 16_384


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """One frame."""
    return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + payload


def header(name: str, value: str) -> bytes:
    """A header field without Huffman coding, kept in no table; both below 127 bytes."""
    return b"\0" + bytes((len(name),)) + name.encode() + bytes((len(value),)) + value.encode()


def call_headers(path: str, **metadata: str) -> bytes:
    """The header block of a gRPC call."""
    fields = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "x"}
    fields |= {"content-type": "application/grpc", "te": "trailers", **metadata}
    return b"".join(header(name, value) for name, value in fields.items())


class RawConnection:
    """A connection that notes what the server says of streams."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._lock = threading.Condition()
        self._window = FIRST_WINDOW
        self._stream_window = FIRST_WINDOW
        self._windows: dict[int, int] = defaultdict(int)
        """Beyond `_stream_window`."""
        self.ended: set[int] = set()
        """Streams that the server has ended."""
        self.is_closed = False
        self.farewell = b""
        """Why the server has closed it, in its words."""
        self.send(PREFACE + frame(SETTINGS, 0, 0))
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def send(self, content: bytes) -> None:
        """As it is."""
        self._socket.sendall(content)

    def begin_message(self, stream: int, path: str, *, size: int, num_bytes: int, **metadata: str) -> None:
        """Begin a call and send the first `num_bytes` of a message of `size`, as far as the server lets it."""
        self.send(frame(HEADERS, END_HEADERS, stream, call_headers(path, **metadata)))
        content = b"\0" + struct.pack(">I", size) + bytes(num_bytes)
        while content:
            with self._lock:
                ready = self._lock.wait_for(lambda: self.is_closed or stream in self.ended or self._room(stream) > 0, 5)
                if not ready or self.is_closed or stream in self.ended:
                    return
                part = content[: min(self._room(stream), MAX_FRAME)]
                self._window -= len(part)
                self._windows[stream] -= len(part)
            content = content[len(part) :]
            self.send(frame(DATA, 0, stream, part))

    def _room(self, stream: int) -> int:
        return min(self._window, self._stream_window + self._windows[stream])

    def _read(self) -> None:
        stream = self._socket.makefile("rb")
        try:
            while len(head := stream.read(9)) == 9:
                payload = stream.read(int.from_bytes(head[:3]))
                self._take(head[3], head[4], int.from_bytes(head[5:]) & 0x7FFFFFFF, payload)
        except OSError:
            pass
        with self._lock:
            self.is_closed = True
            self._lock.notify_all()

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        with self._lock:
            if kind == SETTINGS and not flags & ACK:
                for place in range(0, len(payload), 6):
                    name, value = struct.unpack(">HI", payload[place : place + 6])
                    if name == 4:
                        self._stream_window = value
                self.send(frame(SETTINGS, ACK, 0))
            elif kind == PING and not flags & ACK:
                self.send(frame(PING, ACK, 0, payload))
            elif kind == WINDOW_UPDATE and stream:
                self._windows[stream] += int.from_bytes(payload)
            elif kind == WINDOW_UPDATE:
                self._window += int.from_bytes(payload)
            elif kind == GOAWAY:
                self.farewell = payload[8:]
            elif kind == RST_STREAM or (kind == HEADERS and flags & END_STREAM):
                self.ended.add(stream)
            self._lock.notify_all()

    def close(self) -> None:
        """Hang up, for the reader as well."""
        with suppress(OSError):  # the server has done so
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
