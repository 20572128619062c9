"""A connection that sends a header block without end is ended, and none that carries calls."""

import asyncio
import contextlib
import fcntl
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagoda_common.rpc import flood_guard
from pagoda_common.rpc.channels import CHANNEL_OPTIONS
from pagoda_common.rpc.header_blocks import MAX_BLOCK_BYTES, SEEN_BYTES, can_be_messages, has_endless_block
from pagoda_common.rpc.service import RpcServer
from tests.harness.certificates import make_certificates
from tests.harness.raw_http2 import (
    CONTINUATION,
    DATA,
    HEADERS,
    MAX_FRAME,
    PREFACE,
    SETTINGS,
    call_headers,
    frame,
    header,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the guard reads /proc and the queues of Linux")

MESSAGE_BYTES = 60_000_000
LOOKS_ENDLESS = (frame(CONTINUATION, 0, 1) * (MESSAGE_BYTES // 9 + 1))[:MESSAGE_BYTES]
"""A message that would be an endless block if it were not in frames of its own."""


def disguised(num_bytes: int) -> bytes:
    """The payload of a frame whose fields can be read as the head of a message's frame and its content."""
    fields = header("x-a", "a" * 100) * (num_bytes // 106 - 1)
    head = b"\0\x01a\x09" + struct.pack(">I", len(fields))[1:] + bytes((DATA, 0)) + struct.pack(">I", 1)
    return head + fields


BLOCKS = {
    "small fields": header("a", "") * (MAX_FRAME // 4),
    "large fields": header("x-a", "a" * 120) * (MAX_FRAME // 126),
    "fields that look like messages": disguised(MAX_FRAME),
    "empty": b"",
}


async def size_of(request: bytes, _: grpc.aio.ServicerContext) -> bytes:
    return str(len(request)).encode()


async def sizes_of(requests: AsyncIterator[bytes], _: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
    async for request in requests:
        yield str(len(request)).encode()


@contextlib.asynccontextmanager
async def running_server(**options: object) -> AsyncIterator[tuple[RpcServer, int]]:
    """A server, and its port."""
    server = RpcServer(services=(), **options)  # type: ignore[arg-type]  # what the test says
    handlers = {
        "Size": grpc.unary_unary_rpc_method_handler(size_of),
        "Sizes": grpc.stream_stream_rpc_method_handler(sizes_of),
    }
    server.grpc_server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Sizes", handlers),))
    port = await server.start(host="127.0.0.1", port=0)
    try:
        yield server, port
    finally:
        await server.stop(grace_s=0)


async def flood(port: int, block: bytes) -> None:
    """Send a header block until the connection ends."""
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(PREFACE + frame(SETTINGS, 0, 0) + frame(HEADERS, 0, 1, call_headers("/test.Sizes/Size")))
    more = frame(CONTINUATION, 0, 1, block)
    with contextlib.suppress(ConnectionError):
        while True:
            writer.write(more * (2**20 // len(more)))
            await writer.drain()
    writer.close()


@pytest.mark.parametrize("kind", BLOCKS)
async def test_connections_with_an_endless_header_block_are_ended(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    async with running_server() as (server, port), grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        await watch.read()
        async with asyncio.timeout(240):
            await asyncio.gather(*(flood(port, BLOCKS[kind]) for _ in range(3)))
        await server.set_serving(True)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        assert await channel.unary_unary("/test.Sizes/Size")(b"12345") == b"5"
    assert server.flood_guard is not None
    num_ended = server.flood_guard.num_ended
    assert num_ended == 3 or kind == "empty"  # which the library ends by itself
    assert caplog.text.count("it sends a header block without end") == num_ended


def test_one_kind_of_block_looks_like_messages() -> None:
    looks = {kind for kind, block in BLOCKS.items() if can_be_messages(frame(CONTINUATION, 0, 1, block) * 12)}
    assert looks == {"fields that look like messages"}


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether the guard took what it has looked at for a block; it looks at everything."""
    results: list[bool] = []

    def note(piece: bytes) -> bool:
        results.append(has_endless_block(piece))
        return results[-1]

    monkeypatch.setattr(flood_guard, "has_endless_block", note)
    for name, value in {"REST_S": 0, "MAX_SHARE": 1, "MIN_CPU_S": 0, "MIN_QUEUED_BYTES": 1}.items():
        monkeypatch.setattr(flood_guard, name, value)
    return results


@pytest.mark.parametrize("num_calls", [1, 3])
async def test_large_messages_are_taken_whatever_they_look_like(seen: list[bool], num_calls: int) -> None:
    async with (
        running_server() as (server, port),
        grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=CHANNEL_OPTIONS) as channel,
        asyncio.timeout(240),
    ):
        size, sizes = channel.unary_unary("/test.Sizes/Size"), channel.stream_stream("/test.Sizes/Sizes")
        while not any(seen):  # the guard has to see a part
            assert await asyncio.gather(*(size(LOOKS_ENDLESS) for _ in range(num_calls))) == [b"60000000"] * num_calls
        seen.clear()
        while not any(seen):
            answers = [answer async for answer in sizes(iter([LOOKS_ENDLESS] * num_calls))]
            assert answers == [b"60000000"] * num_calls
        assert server.flood_guard is not None
        assert server.flood_guard.num_ended == 0


def test_what_may_be_a_new_call_has_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, peers = 100.0, set[str]()
    monkeypatch.setattr(flood_guard.time, "monotonic", lambda: now_s)
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as client,
        listener.accept()[0] as accepted,
    ):
        client.sendall(frame(DATA, 0, 1, LOOKS_ENDLESS[:MAX_FRAME]) * 12)
        while len(accepted.recv(SEEN_BYTES, socket.MSG_PEEK)) < MAX_BLOCK_BYTES + 2 * MAX_FRAME:
            time.sleep(0.01)
        guard = flood_guard.FloodGuard(listener.getsockname()[1], lambda: peers)

        def look(num_looks: int) -> int:
            for _ in range(num_looks):
                guard.look()
            return guard.num_ended

        assert look(2 * flood_guard.NUM_LOOKS) == 0  # in no time
        now_s += flood_guard.NEW_CALL_S
        peers.add("ipv4:{}:{}".format(*client.getsockname()))
        assert look(1) == 0  # its call is known
        peers.clear()
        assert look(1) == 0
        now_s += flood_guard.NEW_CALL_S
        assert look(flood_guard.NUM_LOOKS - 2) == 0  # a pause
        assert look(1) == 1


LOCK = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'r+b'), fcntl.LOCK_EX | fcntl.LOCK_NB)"


def test_other_descriptors_are_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(frame(CONTINUATION, 0, 1) * 2000)
    reading, writing = os.pipe()
    os.write(writing, path.read_bytes())
    one, other = socket.socketpair()
    other.send(path.read_bytes())
    listener = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(listener.getsockname())
    accepted, _ = listener.accept()
    client.sendall(path.read_bytes())
    with path.open("r+b") as file, one, other, listener, client, accepted:
        fcntl.lockf(file, fcntl.LOCK_EX)
        guard = flood_guard.FloodGuard(1, set)
        guard.look()
        num_open = len(os.listdir("/proc/self/fd"))
        for _ in range(5):
            guard.look()
        assert len(os.listdir("/proc/self/fd")) == num_open
        with pytest.raises(subprocess.CalledProcessError):  # another process does not get the lock
            subprocess.run([sys.executable, "-c", LOCK, path], check=True, stderr=subprocess.DEVNULL)
        assert file.read() == accepted.recv(18_000, socket.MSG_WAITALL)
        assert guard.num_ended == 0
    os.close(reading)
    os.close(writing)


async def test_a_server_with_tls_has_no_guard(tmp_path: Path) -> None:
    certificates = make_certificates(tmp_path, "worker")
    async with running_server(security=certificates.config("worker").server) as (server, _):
        assert server.flood_guard is None
