"""HTTP/1.1 on a connection, with bounds on what a client may send before there is a request. Knows no endpoint."""

from typing import Any

import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

TOO_LARGE = 431
REASON = b"Request Header Fields Too Large"


class BoundedHttpProtocol(HttpToolsProtocol):
    """Ends a connection whose request line and headers are too long or too many: 431, in the shape of every error.

    The parser itself would keep them all. Subclasses carry the bounds: `bounded`.
    """

    max_head_bytes = 4 * 1024**2
    """Request line and headers together, in bytes."""
    max_headers = 256
    """Header lines of one request."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._is_in_head = True
        self._head_bytes = 0
        self._fault = ""

    def data_received(self, data: bytes) -> None:
        """Take bytes from the connection."""
        if self._is_in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._is_in_head and self._head_bytes > self.max_head_bytes and not self.transport.is_closing():
            self._fault = f"request line and headers have more than {self.max_head_bytes} bytes"
            self.send_400_response(self._fault)

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._is_in_head = True

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header line is complete; raising ends the parsing, and `send_400_response` follows."""
        if len(self.headers) >= self.max_headers:
            self._fault = f"there are more than {self.max_headers} headers"
            raise ValueError(self._fault)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is over."""
        self._is_in_head = False
        self._head_bytes = 0
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """The body is over."""
        super().on_message_complete()
        self._is_in_head = True

    def send_400_response(self, msg: str) -> None:
        """Refuse what cannot be parsed, or is too large, and end the connection."""
        status, reason = (TOO_LARGE, REASON) if self._fault else (400, b"Bad Request")
        error = {"message": self._fault or msg, "type": "BadRequestError", "param": None, "code": status}
        body = orjson.dumps({"error": error})
        head = b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        self.transport.write(head % (status, reason, len(body)) + body)
        self.transport.close()


def bounded(*, max_head_bytes: int, max_headers: int) -> type[BoundedHttpProtocol]:
    """The protocol with these bounds, as a class: uvicorn makes one of it for each connection."""
    bounds = {"max_head_bytes": max_head_bytes, "max_headers": max_headers}
    return type("BoundedHttpProtocol", (BoundedHttpProtocol,), bounds)
