"""A TCP proxy on loopback whose connections can be dropped without touching a process. Knows no gRPC."""

import asyncio
import contextlib
import socket
import struct

CHUNK_BYTES = 1 << 16
LINGER_NONE = struct.pack("ii", 1, 0)
"""SO_LINGER of zero seconds: closing sends a reset, and what was not read yet is lost."""


class TcpProxy:
    """Listens on a free port and forwards every connection to one port of this machine."""

    def __init__(self, *, target_port: int) -> None:
        self.port = 0
        """Where it listens, once started."""
        self._target_port = target_port
        self._server: asyncio.Server | None = None
        self._open: set[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = set()

    async def start(self) -> None:
        """Listen from now on."""
        self._server = await asyncio.start_server(self._forward, "127.0.0.1", 0)
        self.port = int(self._server.sockets[0].getsockname()[1])

    def drop(self) -> int:
        """Reset every open connection on both sides; returns how many. New ones are forwarded as before."""
        dropped = list(self._open)
        for pair in dropped:
            for writer in pair:
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_NONE)
                writer.transport.abort()
        return len(dropped)

    async def close(self) -> None:
        """Listen no more and drop what is open."""
        if self._server is not None:
            self._server.close()
            self.drop()
            await self._server.wait_closed()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        except OSError:
            writer.transport.abort()
            return
        pair = (writer, far_writer)
        self._open.add(pair)
        pumps = [asyncio.create_task(_pump(reader, far_writer)), asyncio.create_task(_pump(far_reader, writer))]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._open.discard(pair)
            for pump in pumps:
                pump.cancel()
            for end in pair:
                end.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while content := await reader.read(CHUNK_BYTES):
            writer.write(content)
            await writer.drain()
