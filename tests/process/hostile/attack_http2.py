"""Attacks by frames of HTTP/2 at every gRPC port: floods of each kind, bombs, blocks without end."""

import asyncio
import contextlib
import gzip
import struct
from collections.abc import Awaitable, Callable, Iterable, Mapping

from pagoda.v1 import inference_pb2
from tests.process.hostile.attack import Attack, Outcome, in_parallel
from tests.process.hostile.attack_streams import WATCH, generate, ports_of
from tests.process.stack import Stack

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM, ACK, END_HEADERS, PADDED = 1, 1, 4, 8
INITIAL_WINDOW_SIZE = 4
"""Number of the setting."""
MAX_FRAME_BYTES = 16_384
READ_S = 1.0
"""How long a connection is read after all is sent."""
GENERATE = "/pagoda.v1.Inference/GenerateUnary"


def frame(kind: int, payload: bytes = b"", *, flags: int = 0, stream: int = 0) -> bytes:
    """One frame."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def integer(value: int, *, bits: int, first: int) -> bytes:
    """HPACK's integer with a prefix of so many bits; `first`: the bits before it."""
    most = (1 << bits) - 1
    if value < most:
        return bytes([first | value])
    out, value = [first | most], value - most
    while value >= 128:
        out.append(value % 128 | 128)
        value //= 128
    return bytes([*out, value])


def field(name: bytes, value: bytes, *, is_kept: bool = False) -> bytes:
    """A field of a header block, as a literal; `is_kept`: the decoder puts it into its table."""
    first, bits = (0x40, 6) if is_kept else (0x00, 4)
    texts = [integer(len(text), bits=7, first=0) + text for text in (name, value)]
    return integer(0, bits=bits, first=first) + b"".join(texts)


def head(path: str, *more: tuple[bytes, bytes]) -> bytes:
    """The header block of a call."""
    fields = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", path.encode()), (b":authority", b"localhost")]
    fields += [(b"content-type", b"application/grpc"), (b"te", b"trailers"), *more]
    return b"".join(field(name, value) for name, value in fields)


def call(stream: int, path: str, message: bytes, *more: tuple[bytes, bytes], is_compressed: bool = False) -> bytes:
    """A whole call with one message."""
    content = bytes([is_compressed]) + struct.pack(">I", len(message)) + message
    pieces = [content[place : place + MAX_FRAME_BYTES] for place in range(0, len(content), MAX_FRAME_BYTES)]
    frames = [frame(HEADERS, head(path, *more), flags=END_HEADERS, stream=stream)]
    frames += [frame(DATA, piece, stream=stream) for piece in pieces[:-1]]
    return b"".join([*frames, frame(DATA, pieces[-1], flags=END_STREAM, stream=stream)])


def setting(number: int, value: int) -> bytes:
    """A frame of one setting."""
    return frame(SETTINGS, struct.pack(">HI", number, value))


async def send(port: int, pieces: Iterable[bytes], outcome: Outcome, *, reads: bool = True, hold_s: float = 0) -> None:
    """One connection: these bytes, as fast as they are taken; then what comes back for some seconds."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        outcome.add("no connection")
        return
    reading = asyncio.ensure_future(_read(reader)) if reads else None
    was_ended = False
    try:
        writer.write(PREFACE + frame(SETTINGS))
        for piece in pieces:
            writer.write(piece)
            async with asyncio.timeout(READ_S * 60):
                await writer.drain()
            await asyncio.sleep(0)  # drain returns at once while there is room
        await asyncio.sleep(hold_s)
        if reading is not None:
            was_ended = bool((await asyncio.wait({reading}, timeout=READ_S))[0])
    except (TimeoutError, OSError):
        was_ended = True
    finally:
        if reading is not None:
            reading.cancel()
        writer.transport.abort()
    outcome.add("ended" if was_ended else "taken")


async def _read(reader: asyncio.StreamReader) -> None:
    with contextlib.suppress(OSError):
        while await reader.read(2**16):
            pass


def _streams(number: int) -> range:
    return range(1, 2 * number, 2)


def rapid_resets(number: int) -> Iterable[bytes]:
    """Calls that are reset in the same packet."""
    reset = struct.pack(">I", 8)
    for stream in _streams(number):
        path = GENERATE if stream % 4 == 1 else WATCH
        opened = frame(HEADERS, head(path), flags=END_HEADERS, stream=stream)
        yield opened + frame(RST_STREAM, reset, stream=stream)


def floods(number: int) -> dict[str, Iterable[bytes]]:
    """Frames that ask for work or an answer each, and say nothing."""
    opened = frame(HEADERS, head(GENERATE), flags=END_HEADERS, stream=1)
    frames = {
        "settings": setting(INITIAL_WINDOW_SIZE, 65_535),
        "pings": frame(PING, b"12345678"),
        "empty data": frame(DATA, stream=1),
        "padded data": frame(DATA, b"\xff" + b"\x00" * 255, flags=PADDED, stream=1),
        "priorities": frame(PRIORITY, struct.pack(">IB", 0, 1), stream=3),
        "windows": frame(WINDOW_UPDATE, struct.pack(">I", 1)),
        "windows of a stream": frame(WINDOW_UPDATE, struct.pack(">I", 1), stream=1),
        "unknown frames": frame(0xFA, b"a" * 10, stream=1),
        "large unknown frames": frame(0xFA, b"a" * MAX_FRAME_BYTES, stream=1),
        "resets": frame(RST_STREAM, struct.pack(">I", 8), stream=1),
    }
    return {
        name: [opened, *[one * 100] * max(1, number // (100 if len(one) < 1000 else 4000))]
        for name, one in frames.items()
    }


def table_bombs(number: int) -> dict[str, Iterable[bytes]]:
    """Header blocks that are small on the wire and large when they are read."""
    kept = field(b"x-bomb", b"a" * 3900, is_kept=True)
    first = frame(HEADERS, head(GENERATE) + kept, flags=END_HEADERS, stream=1)
    uses = b"\xbe" * (MAX_FRAME_BYTES - 400)  # the newest entry of the table, each
    sizes = b"".join(integer(size, bits=5, first=0x20) for size in (0, 4096)) * 50
    many = [frame(HEADERS, head(GENERATE) + uses, flags=END_HEADERS, stream=stream) for stream in _streams(number)[1:]]
    changes = [frame(HEADERS, sizes + head(WATCH), flags=END_HEADERS, stream=stream) for stream in _streams(number)]
    churn = [
        frame(
            HEADERS,
            head(WATCH) + b"".join(field(b"x-%d" % place, b"%d" % stream, is_kept=True) for place in range(200)),
            flags=END_HEADERS,
            stream=stream,
        )
        for stream in _streams(number)
    ]
    return {"uses of one entry": [first, *many], "sizes of the table": changes, "entries": churn}


def long_blocks(number_bytes: int) -> Mapping[str, Iterable[bytes]]:
    """Header blocks that go on and on."""
    small = field(b"a", b"") * (MAX_FRAME_BYTES // 4)
    large = field(b"x-a", b"a" * 4000) * 4
    in_disguise = field(b"a", frame(DATA, large, stream=1)[:9]) + large  # can be read as a message's frame
    opened = frame(HEADERS, head(GENERATE), stream=1)
    return {
        name: [opened, *[frame(CONTINUATION, block, stream=1)] * (number_bytes // len(block))]
        for name, block in (("small fields", small), ("large fields", large), ("in disguise", in_disguise))
    } | {"empty": [opened, *[frame(CONTINUATION, stream=1) * 1000] * (number_bytes // 20_000)]}


def odd_frames() -> dict[str, list[bytes]]:
    """What no client sends."""
    opened = frame(HEADERS, head(GENERATE), flags=END_HEADERS, stream=1)
    return {
        "an even stream": [frame(HEADERS, head(WATCH), flags=END_HEADERS, stream=2)],
        "stream zero": [frame(HEADERS, head(WATCH), flags=END_HEADERS)],
        "a stream again": [opened, opened],
        "data of no stream": [frame(DATA, b"a" * 100, stream=77)],
        "a long frame": [b"\xff\xff\xff" + struct.pack(">BBI", DATA, 0, 1) + b"a" * 2_000_000],
        "a window that overflows": [frame(WINDOW_UPDATE, struct.pack(">I", 2**31 - 1))] * 3,
        "a window of nothing": [frame(WINDOW_UPDATE, struct.pack(">I", 0))],
        "a settings frame of 3 bytes": [frame(SETTINGS, b"abc")],
        "a promise": [frame(PUSH, struct.pack(">I", 2) + head(WATCH), flags=END_HEADERS, stream=1)],
        "a goodbye": [opened, frame(GOAWAY, struct.pack(">II", 0, 0)), opened],
        "padding that is all": [opened, frame(DATA, b"\xff", flags=PADDED, stream=1)],
        "no path": [frame(HEADERS, field(b":method", b"POST"), flags=END_HEADERS, stream=1)],
        "two paths": [frame(HEADERS, head(WATCH) + field(b":path", b"/x"), flags=END_HEADERS, stream=1)],
        "capitals": [frame(HEADERS, head(WATCH) + field(b"X-A", b"a"), flags=END_HEADERS, stream=1)],
        "line ends": [frame(HEADERS, head(WATCH) + field(b"x-a", b"a\r\nb: c"), flags=END_HEADERS, stream=1)],
        "a bad index": [frame(HEADERS, integer(4000, bits=7, first=0x80), flags=END_HEADERS, stream=1)],
        "an endless integer": [frame(HEADERS, b"\xff" * 10_000, flags=END_HEADERS, stream=1)],
        "a deadline": [call(1, GENERATE, generate(1), (b"grpc-timeout", b"99999999H"))],
        "no deadline": [call(1, GENERATE, generate(1), (b"grpc-timeout", b"0n"))],
        "a deadline without a unit": [call(1, GENERATE, generate(1), (b"grpc-timeout", b"1" * 500))],
        "an unknown encoding": [call(1, GENERATE, b"a" * 100, (b"grpc-encoding", b"x" * 900), is_compressed=True)],
        "gzip that is none": [call(1, GENERATE, b"a" * 100, (b"grpc-encoding", b"gzip"), is_compressed=True)],
        "a long path": [call(1, "/" + "a" * 9000, b"")],
        "a path with line ends": [call(1, "/pagoda.v1.Inference/\x1b[2J\nERROR forged", b"")],
        "a GET": [frame(HEADERS, head(WATCH).replace(b"\x04POST", b"\x03GET"), flags=END_HEADERS, stream=1)],
    }


def zipped_bombs(number: int) -> dict[str, Iterable[bytes]]:
    """Messages that are far larger than what is sent."""
    encodings = ((b"gzip", gzip.compress(b"\x00" * 2**26)), (b"gzip", gzip.compress(generate(1) + b"\xf2\x07" * 10**6)))
    found: dict[str, Iterable[bytes]] = {}
    for place, (encoding, content) in enumerate(encodings):
        found[f"bomb {place}"] = [
            call(stream, GENERATE, content, (b"grpc-encoding", encoding), is_compressed=True)
            for stream in _streams(number)
        ]
    return found


def closed_windows(number: int) -> Iterable[bytes]:
    """Calls whose answer the client has no room for."""
    detokenize = inference_pb2.DetokenizeRequest(token_ids=[300] * 30_000).SerializeToString()
    yield setting(INITIAL_WINDOW_SIZE, 0)
    for stream in _streams(number):
        yield call(stream, "/pagoda.v1.Inference/Detokenize", detokenize)


async def _everywhere(
    stack: Stack, outcome: Outcome, attacks: Mapping[str, Iterable[bytes]], *, each: int = 1, hold_s: float = 0
) -> None:
    ports = await asyncio.to_thread(ports_of, stack)
    works: list[Callable[[], Awaitable[None]]] = [
        lambda port=port, pieces=pieces: send(port, pieces, outcome, hold_s=hold_s)  # type: ignore[misc]  # its defaults
        for pieces in attacks.values()
        for port in ports
        for _ in range(each)
    ]
    await in_parallel(works, concurrency=24)


async def _rapid_resets(stack: Stack, outcome: Outcome, share: float) -> None:
    pieces = list(rapid_resets(max(200, round(20_000 * share))))
    await _everywhere(stack, outcome, {"resets": pieces}, each=4)


async def _floods(stack: Stack, outcome: Outcome, share: float) -> None:
    await _everywhere(stack, outcome, floods(max(2000, round(100_000 * share))), each=2)


async def _table_bombs(stack: Stack, outcome: Outcome, share: float) -> None:
    await _everywhere(stack, outcome, table_bombs(max(10, round(500 * share))), each=2)


async def _long_blocks(stack: Stack, outcome: Outcome, share: float) -> None:
    await _everywhere(stack, outcome, long_blocks(max(500_000, round(10_000_000 * share))), each=4)


async def _odd_frames(stack: Stack, outcome: Outcome, share: float) -> None:
    await _everywhere(stack, outcome, odd_frames(), each=max(1, round(20 * share)))


async def _zipped_bombs(stack: Stack, outcome: Outcome, share: float) -> None:
    await _everywhere(stack, outcome, zipped_bombs(max(3, round(60 * share))), each=2)


async def _closed_windows(stack: Stack, outcome: Outcome, share: float) -> None:
    pieces = list(closed_windows(max(10, round(500 * share))))
    await in_parallel([lambda: send(stack.grpc_port, pieces, outcome, hold_s=20 * share)] * 4, concurrency=4)


async def _open_blocks(stack: Stack, outcome: Outcome, share: float) -> None:
    """Connections that stop in the middle of a header block or a preface."""
    half = frame(HEADERS, head(GENERATE) + field(b"x-a", b"a" * 12_000), stream=1)
    works: list[Callable[[], Awaitable[None]]] = [
        lambda port=port, pieces=pieces: send(port, pieces, outcome, hold_s=20 * share)  # type: ignore[misc]  # its defaults
        for port in await asyncio.to_thread(ports_of, stack)
        for pieces in ([half], [half[:5000]], [b"\x00"])
        for _ in range(max(5, round(150 * share)))
    ]
    await in_parallel(works, concurrency=500)


ATTACKS: tuple[Attack, ...] = (
    Attack("rapid resets", _rapid_resets),
    Attack("floods of frames", _floods),
    Attack("bombs of headers", _table_bombs),
    Attack("headers that go on", _long_blocks),
    Attack("odd frames", _odd_frames),
    Attack("compressed bombs", _zipped_bombs),
    Attack("closed windows", _closed_windows),
    Attack("half headers", _open_blocks),
)
