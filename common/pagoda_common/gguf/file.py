"""GgufFile: reads the header of a GGUF file with bounds: metadata, and the place of each tensor. Reads no weights.

Our own reader and not the package gguf, which the tests compare it with: a header of someone else must end in one
sentence whatever it holds, the vocabulary must be there within a fraction of a second, and no file is mapped.
Source: the format's specification, versions 2 and 3 (ggml's docs/gguf.md).
"""

import math
import os
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from pagoda_common.errors import ModelLoadError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_HEADER_BYTES = 1 << 28
MAX_TENSORS = 1 << 20
MAX_KEYS = 1 << 16
MAX_KEY_BYTES = 65_535
MAX_DIMS = 4
MAX_NESTED = 2
"""Arrays within arrays."""
MAX_VALUES = 1 << 23
"""In all arrays together, ten times what a large vocabulary has: a byte in the file takes up to 40 in memory."""
MAX_STACKED = 65_536
"""Matrices in one tensor."""
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""By the number of a value's type, how struct calls it."""
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class BlockType:
    """How numbers are stored: in blocks, one after the other along a row."""

    name: str
    num_values: int
    """In one block."""
    num_bytes: int
    """Size of one block."""


BLOCK_TYPES = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2),
    2: BlockType("Q4_0", 32, 18),
    3: BlockType("Q4_1", 32, 20),
    6: BlockType("Q5_0", 32, 22),
    7: BlockType("Q5_1", 32, 24),
    8: BlockType("Q8_0", 32, 34),
    10: BlockType("Q2_K", 256, 84),
    11: BlockType("Q3_K", 256, 110),
    12: BlockType("Q4_K", 256, 144),
    13: BlockType("Q5_K", 256, 176),
    14: BlockType("Q6_K", 256, 210),
    30: BlockType("BF16", 1, 2),
}
"""Types that are read, by the format's number."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where one tensor lies."""

    name: str
    shape: tuple[int, ...]
    """Rows first, as torch has it."""
    type: BlockType
    offset: int
    """Offset of its first byte from the beginning of the file."""

    @property
    def num_bytes(self) -> int:
        """In the file."""
        return math.prod(self.shape) // self.type.num_values * self.type.num_bytes


@dataclass(frozen=True, slots=True)
class GgufFile:
    """The header of one file."""

    path: Path
    metadata: dict[str, Any]
    """Numbers, booleans, texts, and lists of these, by key."""
    tensors: dict[str, GgufTensor] = field(default_factory=dict)
    """By name."""

    @classmethod
    def read(cls, path: Path) -> "GgufFile":
        """Read a header.

        Raises:
            ModelLoadError: it is not a GGUF file, of another version, damaged, or cut off; the message names
                file, key or tensor.
        """
        try:
            with path.open("rb") as file:
                return _read(path, _Header(path, file, os.fstat(file.fileno()).st_size))
        except OSError as error:
            raise ModelLoadError(f"{path} cannot be read: {error.strerror or error}") from error


class _Header:
    """Takes one value after the other from the beginning of a file."""

    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self.path = path
        self.size = size
        self.at = 0
        self.num_values = 0
        self._file = file

    def fail(self, what: str) -> ModelLoadError:
        return ModelLoadError(f"{self.path} {what}")

    def take(self, count: int, what: str) -> bytes:
        """The next bytes, if the file has them."""
        if self.at + count > min(self.size, MAX_HEADER_BYTES):
            if self.at + count > self.size:
                raise self.fail(f"ends within {what}: {self.size} bytes, {self.at + count} are needed")
            raise self.fail(f"has a header of more than {MAX_HEADER_BYTES} bytes")
        self.at += count
        return self._file.read(count)

    def number(self, kind: str, what: str) -> Any:
        layout = struct.Struct("<" + kind)
        return layout.unpack(self.take(layout.size, what))[0]

    def text(self, what: str, most: int = MAX_HEADER_BYTES) -> str:
        length = self.number("Q", what)
        if length > most:
            raise self.fail(f"has {what} of {length} bytes, must be at most {most}")
        try:
            return self.take(length, what).decode("utf-8")
        except UnicodeDecodeError:
            raise self.fail(f"has {what} that is not UTF-8") from None

    def value(self, kind: int, what: str, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self.number(_SCALARS[kind], what)
        if kind == _STRING:
            return self.text(what)
        if kind == _ARRAY and depth < MAX_NESTED:
            return self._array(what, depth)
        raise self.fail(f"has {what} of type {kind}, must be one of 0 to 12")

    def _array(self, what: str, depth: int) -> list[Any]:
        kind, count = self.number("I", what), self.number("Q", what)
        self.num_values += min(count, MAX_VALUES + 1)
        if self.num_values > MAX_VALUES:
            raise self.fail(f"has {count} values of {what}, must have at most {MAX_VALUES} in all arrays")
        if kind in _SCALARS:
            layout = struct.calcsize("<" + _SCALARS[kind])
            if count > self.size:
                raise self.fail(f"has {count} values of {what}, more than it has bytes")
            return list(struct.unpack(f"<{count}{_SCALARS[kind]}", self.take(count * layout, what)))
        if count > self.size // 8:
            raise self.fail(f"has {count} values of {what}, more than it has room for")
        return [self.value(kind, what, depth + 1) for _ in range(count)]


def _read(path: Path, header: _Header) -> GgufFile:
    if header.take(4, "its first four bytes") != MAGIC:
        raise header.fail("is not a GGUF file: it does not begin with GGUF")
    version = header.number("I", "its version")
    if version not in VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        hint = " (its bytes are in the other order)" if swapped in VERSIONS else ""
        raise header.fail(f"is of GGUF version {version}, must be one of 2, 3{hint}")
    num_tensors, num_keys = header.number("Q", "its counts"), header.number("Q", "its counts")
    for what, count, most in (("tensors", num_tensors, MAX_TENSORS), ("metadata keys", num_keys, MAX_KEYS)):
        if count > most:
            raise header.fail(f"has {count} {what}, must be at most {most}")
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = header.text("a metadata key", MAX_KEY_BYTES)
        metadata[key] = header.value(header.number("I", key[:200]), key[:200])
    entries = [_entry(header) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20:
        raise header.fail(f"has general.alignment {alignment!r}, must be a number from 1 to {1 << 20}")
    start = -(-header.at // alignment) * alignment
    tensors: dict[str, GgufTensor] = {}
    for name, shape, kind, offset in entries:
        if name in tensors:
            raise header.fail(f"has two tensors {name}")
        tensors[name] = _placed(header, GgufTensor(name, shape, kind, start + offset))
    return GgufFile(path, metadata, tensors)


def _entry(header: _Header) -> tuple[str, tuple[int, ...], BlockType, int]:
    """Name, shape, type, and place after the header of one tensor."""
    name = header.text("a tensor's name", MAX_KEY_BYTES)
    what = f"tensor {name[:200]}"
    num_dims = header.number("I", what)
    if not 1 <= num_dims <= MAX_DIMS:
        raise header.fail(f"has {what} of {num_dims} dimensions, must be from 1 to {MAX_DIMS}")
    sizes = [header.number("Q", what) for _ in range(num_dims)]
    kind, offset = header.number("I", what), header.number("Q", what)
    if kind not in BLOCK_TYPES:
        known = ", ".join(f"{number} ({block.name})" for number, block in BLOCK_TYPES.items())
        raise header.fail(f"has {what} of type {kind}, must be one of {known}")
    block = BLOCK_TYPES[kind]
    if num_dims > 2 and math.prod(sizes[2:]) > MAX_STACKED:
        raise header.fail(f"has {what} of shape {sizes[::-1]}, must have at most {MAX_STACKED} matrices")
    if not all(1 <= size <= 1 << 40 for size in sizes) or sizes[0] % block.num_values:
        raise header.fail(
            f"has {what} of shape {sizes[::-1]}, must be positive, its rows multiples of {block.num_values} "
            f"({block.name})"
        )
    return name, tuple(reversed(sizes)), block, offset


def _placed(header: _Header, tensor: GgufTensor) -> GgufTensor:
    end = tensor.offset + tensor.num_bytes
    if end > header.size:
        raise header.fail(f"ends within tensor {tensor.name}: {header.size} bytes, {end} are needed")
    return tensor
