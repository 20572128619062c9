"""Tensors of safetensors files, read by position into memory of their own, some ahead of their use.

A mapped file would count as memory of the process until its pages are given back, beside the weights made of them.
"""

import json
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self, TypeVar

import torch
from safetensors import safe_open
from torch import Tensor

from pagoda_worker.loader.read_buffers import ReadBuffers

NUM_READERS = 2
MAX_AHEAD_BYTES = 128 << 20
"""Of tensors that were read and not taken; one larger tensor is read alone."""
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""By safetensors' name."""

T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")


class TensorFile:
    """One open file. Any thread may read."""

    def __init__(self, path: Path) -> None:
        """
        Raises:
            SafetensorError, OSError: it is damaged, or cannot be read.
        """
        with safe_open(str(path), framework="pt", device="cpu"):
            pass  # the library checks the header: names, shapes, places
        self.path = path
        self._descriptor = os.open(path, os.O_RDONLY)
        size = int.from_bytes(os.pread(self._descriptor, 8, 0), "little")
        header = json.loads(os.pread(self._descriptor, size, 8))
        header.pop("__metadata__", None)
        self._start = 8 + size
        self.entries: dict[str, tuple[str, list[int], int, int]] = {
            name: (entry["dtype"], entry["shape"], *entry["data_offsets"]) for name, entry in header.items()
        }
        """By name: data type as safetensors calls it, shape, first byte and end, counted from the end of the header."""

    def read(self, name: str, buffers: ReadBuffers | None = None) -> Tensor:
        """A tensor, in host memory of its own, or in memory that is taken from `buffers`.

        Raises:
            OSError: the file ends before it, or its data type is unknown to torch.
        """
        dtype, shape, begin, end = self.entries[name]
        if dtype not in DTYPES:
            raise OSError(f"{self.path}: {name} has data type {dtype}, must be one of {', '.join(DTYPES)}")
        if_short = f"{self.path} ends within {name}"
        buffer = read_bytes(self._descriptor, self._start + begin, end - begin, if_short, buffers)
        return buffer.view(DTYPES[dtype]).view(shape)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._descriptor)


def read_bytes(descriptor: int, offset: int, count: int, if_short: str, buffers: ReadBuffers | None = None) -> Tensor:
    """[count] uint8 of an open file, from `offset` on, in memory of its own or of `buffers`.

    Raises:
        OSError: it ends before; the message is `if_short`.
    """
    buffer = torch.empty(count, dtype=torch.uint8) if buffers is None else buffers.take(count)
    view, done = buffer.numpy().data, 0
    while done < len(view):
        got = os.preadv(descriptor, [view[done:]], offset + done)
        if got == 0:
            raise OSError(if_short)
        done += got
    return buffer


def in_halves(tensor: Tensor, head_dim: int) -> Tensor:
    """Rows of each head that are neighbouring pairs of a rotation, as two halves. [heads * head_dim, ...]."""
    paired = tensor.view(-1, head_dim // 2, 2, *tensor.shape[1:])
    return paired.transpose(1, 2).reshape(tensor.shape)


class Readable(Protocol[T_co]):
    """What `read_ahead` takes."""

    @property
    def num_bytes(self) -> int:
        """In the file."""

    def read(self) -> T_co:
        """What is there, in memory."""


def read_ahead(entries: Iterable[Readable[T]]) -> Iterator[T]:
    """What each entry reads, in their order, while threads read those that follow.

    Raises:
        What `read` raises, when it is that entry's turn.
    """
    coming = iter(entries)
    reading: deque[tuple[Future[T], int]] = deque()
    held = 0
    with ThreadPoolExecutor(NUM_READERS, thread_name_prefix="weights") as pool:
        try:
            entry = next(coming, None)
            while entry is not None or reading:
                while entry is not None and (not reading or held + entry.num_bytes <= MAX_AHEAD_BYTES):
                    reading.append((pool.submit(entry.read), entry.num_bytes))
                    held += entry.num_bytes
                    entry = next(coming, None)
                future, num_bytes = reading.popleft()
                held -= num_bytes
                yield future.result()
                del future
        finally:
            for future, _ in reading:
                future.cancel()
