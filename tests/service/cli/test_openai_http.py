"""The terminal commands' HTTP client against a server with canned answers."""

import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from pagoda.http.openai_http import OpenAIServer
from pagoda_common.errors import NotReady, PagodaError
from pagoda_common.process.children import free_port

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture
def serve() -> Iterator[Callable[[int, bytes], OpenAIServer]]:
    """Starts a server that answers everything with one status and body."""
    servers: list[ThreadingHTTPServer] = []

    def start(status: int, body: bytes) -> OpenAIServer:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                self.do_GET()

            def do_GET(self) -> None:
                self.send_response(status)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        return OpenAIServer(base_url=f"http://127.0.0.1:{server.server_port}/v1", api_key="k")

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def chat(server: OpenAIServer) -> list[str]:
    return list(server.stream_chat(messages=MESSAGES, model="m"))


def test_pieces_of_a_stream_come_out_as_text(serve: Callable[[int, bytes], OpenAIServer]) -> None:
    body = (
        b': keep-alive\n\ndata: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\n\n'
        b'data: {"choices": [{"delta": {"content": "Hel"}}]}\n\ndata: {"choices": [{"delta": {"content": "lo"}}]}\n\n'
        b'data: {"choices": [{"delta": {}, "finish_reason": "stop"}]}\n\ndata: {"choices": []}\n\ndata: [DONE]\n\n'
    )
    assert "".join(chat(serve(200, body))) == "Hello"


def test_a_stream_that_breaks_off_is_an_error(serve: Callable[[int, bytes], OpenAIServer]) -> None:
    with pytest.raises(PagodaError, match="too early"):
        chat(serve(200, b'data: {"choices": [{"delta": {"content": "Hel"}}]}\n\n'))


def test_an_error_within_a_stream_is_raised(serve: Callable[[int, bytes], OpenAIServer]) -> None:
    with pytest.raises(PagodaError, match="worker lost"):
        chat(serve(200, b'data: {"error": {"message": "worker lost"}}\n\ndata: [DONE]\n\n'))


def test_a_connection_that_breaks_within_a_chunk_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nff\r\ndata: ")

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(PagodaError, match="connection broke"):
            chat(OpenAIServer(base_url=f"http://127.0.0.1:{listener.getsockname()[1]}/v1"))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "no such model"}}', "HTTP 404: no such model"),
        (b'{"error": "Unauthorized"}', "HTTP 404: Unauthorized"),
        (b"<html>", "HTTP 404: <html>"),
    ],
)
def test_refusals_say_why(serve: Callable[[int, bytes], OpenAIServer], body: bytes, message: str) -> None:
    with pytest.raises(PagodaError) as refused:
        chat(serve(404, body))
    assert refused.value.message == message


def test_the_first_model_is_the_default(serve: Callable[[int, bytes], OpenAIServer]) -> None:
    assert serve(200, b'{"data": [{"id": "a"}, {"id": "b"}]}').first_model() == "a"


def test_nobody_at_the_address_is_not_ready() -> None:
    with pytest.raises(NotReady, match="no answer"):
        chat(OpenAIServer(base_url=f"http://127.0.0.1:{free_port()}/v1"))
