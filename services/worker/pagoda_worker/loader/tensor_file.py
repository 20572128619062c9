"""Reads tensors of safetensors files by position into separate memory, some ahead of their use.

A mapped file would count as the process's memory until its pages are released, in addition to the weights.
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
from pagoda_worker.threads import num_usable_cores

MIN_READERS, MAX_READERS = 2, 16
"""Number of threads that read, and mostly pack what they read: the number of cores."""
MAX_AHEAD_BYTES = 64 << 20
"""Maximum total bytes read ahead; a larger tensor is read alone."""
MAX_AHEAD = 64
"""Maximum number of entries read ahead."""
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
    """One open file, for any thread."""

    def __init__(self, path: Path, *, max_header_bytes: int | None = None) -> None:
        """
        Args:
            max_header_bytes: bound on the list of tensors; the library's is 100 MB.

        Raises:
            SafetensorError, OSError: the file is damaged, or cannot be read.
        """
        if max_header_bytes is not None:
            with path.open("rb") as file:
                size = int.from_bytes(file.read(8), "little")
            if size > max_header_bytes:
                raise OSError(f"{path} has a header of {size} bytes, must have at most {max_header_bytes}")
        with safe_open(str(path), framework="pt", device="cpu"):
            pass  # the library checks the header: names, shapes, places
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
        header.pop("__metadata__", None)
        self.path = path
        self._start = 8 + size
        self.entries: dict[str, tuple[str, list[int], int, int]] = {
            name: (entry["dtype"], entry["shape"], *entry["data_offsets"]) for name, entry in header.items()
        }
        """By name: data type as safetensors calls it, shape, first byte and end, counted from the end of the header."""
        self._descriptor = os.open(path, os.O_RDONLY)

    def read(self, name: str, buffers: ReadBuffers | None = None) -> Tensor:
        """A tensor in new host memory, or in memory from `buffers`.

        Raises:
            OSError: the file ends too early, or torch does not know the data type.
        """
        dtype, shape, begin, end = self.entries[name]
        if dtype not in DTYPES:
            raise OSError(f"{self.path}: {name} has data type {dtype}, must be one of {', '.join(DTYPES)}")
        if_short = f"{self.path} ends within {name}"
        buffer = read_bytes(self._descriptor, self._start + begin, end - begin, if_short, buffers)
        try:
            return buffer.view(DTYPES[dtype]).view(shape)
        except (RuntimeError, TypeError, ValueError) as error:  # a size of nothing, and one that no tensor has
            raise OSError(f"{self.path}: {name} has shape {str(shape)[:200]}, which no tensor has") from error

    def read_into(self, name: str, target: Tensor, first_byte: int = 0) -> None:
        """Read a part of a tensor into existing host memory.

        Args:
            target: contiguous, of the size of the part.
            first_byte: of the tensor.

        Raises:
            OSError: the file ends too early.
        """
        _, _, begin, _ = self.entries[name]
        memory = target.detach().view(-1).view(torch.uint8)
        _read(self._descriptor, self._start + begin + first_byte, memory, f"{self.path} ends within {name}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._descriptor)


def read_bytes(descriptor: int, offset: int, count: int, if_short: str, buffers: ReadBuffers | None = None) -> Tensor:
    """[count] uint8 of an open file from `offset`, in new memory or in memory from `buffers`.

    Raises:
        OSError: the file ends too early; the message is `if_short`.
    """
    buffer = torch.empty(count, dtype=torch.uint8) if buffers is None else buffers.take(count)
    _read(descriptor, offset, buffer, if_short)
    return buffer


def _read(descriptor: int, offset: int, memory: Tensor, if_short: str) -> None:
    """`memory`: [count] uint8."""
    view, done = memory.numpy().data, 0
    while done < len(view):
        got = os.preadv(descriptor, [view[done:]], offset + done)
        if got == 0:
            raise OSError(if_short)
        done += got


def in_halves(tensor: Tensor, head_dim: int) -> Tensor:
    """Reorder rows of each head from adjacent pairs of a rotation to two halves. [heads * head_dim, ...]."""
    paired = tensor.view(-1, head_dim // 2, 2, *tensor.shape[1:])
    return paired.transpose(1, 2).reshape(tensor.shape)


def _compute_alone() -> None:
    """Use one thread in kernels called from this thread, because many threads call them."""
    torch.set_num_threads(1)


class Readable(Protocol[T_co]):
    """An entry for `read_ahead`."""

    @property
    def num_bytes(self) -> int:
        """Bytes of what was read, until its use."""

    def read(self) -> T_co:
        """Read and return the content."""


def read_ahead(entries: Iterable[Readable[T]]) -> Iterator[T]:
    """The content of each entry, in order, while threads read the following ones.

    Raises:
        What `read` raises, in that entry's turn.
    """
    coming = iter(entries)
    reading: deque[tuple[Future[T], int]] = deque()
    held = 0
    num_readers = min(max(MIN_READERS, num_usable_cores()), MAX_READERS)
    with ThreadPoolExecutor(num_readers, "weights", _compute_alone) as pool:
        try:
            entry = next(coming, None)
            while entry is not None or reading:
                while entry is not None and (
                    not reading or (held + entry.num_bytes <= MAX_AHEAD_BYTES and len(reading) < MAX_AHEAD)
                ):
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
