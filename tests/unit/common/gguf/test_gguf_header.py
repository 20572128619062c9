"""The header of a GGUF file, byte by byte: values of every type, alignment, bounds, and what is cut off where."""

import struct
from pathlib import Path
from typing import Any

import pytest

from pagoda_common.errors import ModelLoadError
from pagoda_common.gguf import file as gguf_file
from pagoda_common.gguf.file import BLOCK_TYPES, GgufFile

UINT32, STRING, ARRAY = 4, 8, 9
F32, Q4_0 = 0, 2


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def number(value: int) -> bytes:
    return struct.pack("<I", value)


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + number(kind) + value


def array(kind: int, *values: bytes) -> bytes:
    return struct.pack("<IQ", kind, len(values)) + b"".join(values)


def tensor(name: str, *sizes: int, kind: int = F32, offset: int = 0) -> bytes:
    dims = struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)
    return text(name) + dims + struct.pack("<IQ", kind, offset)


def write(path: Path, *keys: bytes, tensors: tuple[bytes, ...] = (), data: int = 0, version: int = 3) -> Path:
    """A file with these keys and tensors, and `data` bytes from the first multiple of 32 on."""
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(keys)) + b"".join(keys) + b"".join(tensors)
    path.write_bytes(head + (b"\0" * (-len(head) % 32 + data) if tensors else b""))
    return path


def read(path: Path, *keys: bytes, **more: Any) -> GgufFile:
    return GgufFile.read(write(path / "m.gguf", *keys, **more))


@pytest.mark.parametrize(
    ("kind", "raw", "value"),
    [
        (0, b"\xff", 255),
        (1, b"\xff", -1),
        (2, b"\xff\xff", 65535),
        (3, b"\xff\xff", -1),
        (4, b"\x01\x02\x03\x04", 0x04030201),
        (5, b"\xff" * 4, -1),
        (6, struct.pack("<f", 0.5), 0.5),
        (7, b"\x01", True),
        (8, text("é"), "é"),
        (10, b"\xff" * 8, 2**64 - 1),
        (11, b"\xff" * 8, -1),
        (12, struct.pack("<d", 0.1), 0.1),
        (ARRAY, array(UINT32, number(1), number(2)), [1, 2]),
        (ARRAY, array(UINT32), []),
        (ARRAY, array(STRING, text("a"), text("")), ["a", ""]),
        (ARRAY, array(ARRAY, array(UINT32, number(1)), array(STRING, text("b"))), [[1], ["b"]]),
    ],
)
def test_a_value_of_each_type(tmp_path: Path, kind: int, raw: bytes, value: Any) -> None:
    for version in (2, 3):
        found = read(tmp_path, key("a", kind, raw), key("after", UINT32, number(7)), version=version)
        assert (found.metadata, found.tensors) == ({"a": value, "after": 7}, {})
        assert type(found.metadata["a"]) is type(value)


@pytest.mark.parametrize("kind", [13, 99])
def test_a_type_that_there_is_not(tmp_path: Path, kind: int) -> None:
    with pytest.raises(ModelLoadError, match=rf"m\.gguf has a of type {kind}, must be one of 0 to 12"):
        read(tmp_path, key("a", kind, b""))


def test_arrays_within_arrays_are_bounded(tmp_path: Path) -> None:
    deep = array(ARRAY, array(ARRAY, array(UINT32, number(1))))
    with pytest.raises(ModelLoadError, match="has a of type 9, must be one of 0 to 12"):
        read(tmp_path, key("a", ARRAY, deep))


@pytest.mark.parametrize(("alignment", "start"), [(None, 32), (1, 1), (32, 32), (64, 64), (4096, 4096)])
def test_tensors_lie_after_the_header_at_a_multiple(tmp_path: Path, alignment: int | None, start: int) -> None:
    keys = () if alignment is None else (key("general.alignment", UINT32, number(alignment)),)
    entries = (tensor("a", 8, 3, offset=96), tensor("b", 64, kind=Q4_0, offset=0))
    path = write(tmp_path / "m.gguf", *keys, tensors=entries, data=9000)
    found = GgufFile.read(path).tensors
    header = 24 + sum(map(len, (*keys, *entries)))
    begin = -(-header // start) * start
    assert (found["a"].shape, found["a"].type, found["a"].offset) == ((3, 8), BLOCK_TYPES[F32], begin + 96)
    assert (found["b"].shape, found["b"].type, found["b"].offset) == ((64,), BLOCK_TYPES[Q4_0], begin)
    assert [found[name].num_bytes for name in "ab"] == [96, 36]


@pytest.mark.parametrize("alignment", [0, (1 << 20) + 1])
def test_an_alignment_that_is_none(tmp_path: Path, alignment: int) -> None:
    with pytest.raises(ModelLoadError, match=f"has general.alignment {alignment}, must be a number from 1 to 1048576"):
        read(tmp_path, key("general.alignment", UINT32, number(alignment)))
    assert read(tmp_path, key("general.alignment", UINT32, number(1 << 20))).tensors == {}


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (tensor("a"), "has tensor a of 0 dimensions, must be from 1 to 4"),
        (tensor("a", 1, 1, 1, 1, 1), "has tensor a of 5 dimensions, must be from 1 to 4"),
        (tensor("a", 0), r"has tensor a of shape \[0\], must be positive"),
        (tensor("a", (1 << 40) + 1), "has tensor a of shape .*, must be positive"),
        (tensor("a", 31, 2, kind=Q4_0), r"shape \[2, 31\], must be positive, its rows multiples of 32 \(Q4_0\)"),
        (tensor("a", 1, 1, 1 << 20), r"has tensor a of shape \[1048576, 1, 1\], must have at most 65536 matrices"),
        (tensor("a", 1, 1, 300, 300), r"has tensor a of shape \[300, 300, 1, 1\], must have at most 65536 matrices"),
        (tensor("a", 4, offset=2**64 - 1), r"ends within tensor a: \d+ bytes, \d+ are needed"),
        (tensor("a", 1 << 40, 1 << 40), r"ends within tensor a: \d+ bytes, \d+ are needed"),
        (tensor("a", 4, kind=4), r"has tensor a of type 4, must be one of 0 \(F32\), 1 \(F16\), 2 "),
    ],
)
def test_a_tensor_that_is_none(tmp_path: Path, entry: bytes, message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        read(tmp_path, tensors=(entry,), data=100)


def test_names_are_there_once_and_tensors_end_with_the_file(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="has two tensors a"):
        read(tmp_path, tensors=(tensor("a", 4), tensor("a", 4)), data=100)
    assert read(tmp_path, tensors=(tensor("a", 4),), data=16).tensors["a"].num_bytes == 16
    with pytest.raises(ModelLoadError, match=r"ends within tensor a: \d+ bytes, \d+ are needed"):
        read(tmp_path, tensors=(tensor("a", 4),), data=15)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (key("a", STRING, text(b"\xff")), "has a that is not UTF-8"),
        (key("a", STRING, struct.pack("<Q", (1 << 28) + 1)), "has a of 268435457 bytes, must be at most 268435456"),
        (key("a", STRING, struct.pack("<Q", 100) + b"x"), "ends within a"),
        (key("x" * 65_536, UINT32, number(1)), "has a metadata key of 65536 bytes, must be at most 65535"),
        (key("a", ARRAY, struct.pack("<IQ", UINT32, 1000)), "has 1000 values of a, more than it has bytes"),
        (key("a", ARRAY, struct.pack("<IQ", STRING, 1000)), "has 1000 values of a, more than it has room for"),
        (key("a", ARRAY, struct.pack("<IQ", STRING, 1 << 60)), "has 1152921504606846976 values of a, must have at mo"),
        (key("a", ARRAY, struct.pack("<IQ", ARRAY, 1 << 60)), "has 1152921504606846976 values of a, must have at mo"),
        (key("a", UINT32, b"\x01"), "ends within a"),
    ],
)
def test_a_key_that_is_none(tmp_path: Path, value: bytes, message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        read(tmp_path, value)


def test_counts_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_file, "MAX_KEYS", 2)
    monkeypatch.setattr(gguf_file, "MAX_TENSORS", 1)
    keys = [key(name, UINT32, number(1)) for name in "abc"]
    assert read(tmp_path, *keys[:2], tensors=(tensor("t", 4),), data=16).metadata == {"a": 1, "b": 1}
    with pytest.raises(ModelLoadError, match="has 3 metadata keys, must be at most 2"):
        read(tmp_path, *keys)
    with pytest.raises(ModelLoadError, match="has 2 tensors, must be at most 1"):
        read(tmp_path, tensors=(tensor("t", 4), tensor("u", 4)), data=100)


def test_values_of_all_arrays_together_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_file, "MAX_VALUES", 10)
    inner = [array(0, b"\1") for _ in range(3)]
    keys = [key("a", ARRAY, array(UINT32, *[number(1)] * 4)), key("b", ARRAY, array(ARRAY, *inner))]
    assert read(tmp_path, *keys).metadata["b"] == [[1]] * 3
    with pytest.raises(ModelLoadError, match="has 1 values of c, must have at most 10 in all arrays"):
        read(tmp_path, *keys, key("c", ARRAY, array(0, b"\1")))
