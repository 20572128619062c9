"""How files of weights are read: in pieces, on few threads, to their final place; and closed at the end."""

import math
import os
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from pagoda_worker.loader import parts, tensor_file
from pagoda_worker.loader.parts import CHUNK_BYTES, PART_BYTES, InBuffers, InPlace, InRows, Part, rows_of_parts
from pagoda_worker.loader.read_buffers import ReadBuffers
from pagoda_worker.loader.stored import StoredMatrix, StoredTensor
from pagoda_worker.loader.tensor_file import MAX_AHEAD, TensorFile, read_ahead
from pagoda_worker.models.weights import WeightSource

SOURCE = WeightSource(name="x", parameter="p")


def write(folder: Path, **tensors: Tensor) -> Path:
    save_file(tensors, folder / "model.safetensors")
    return folder / "model.safetensors"


def test_a_read_that_gives_less_than_was_asked_for_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel reads at most 2 GiB at once."""
    tensor = torch.randn(7, 5)
    asked: list[int] = []
    preadv = os.preadv

    def short(descriptor: int, buffers: list[Any], offset: int) -> int:
        asked.append(len(buffers[0]))
        return preadv(descriptor, [buffers[0][:64]], offset)

    with TensorFile(write(tmp_path, first=torch.ones(3), x=tensor)) as file:
        monkeypatch.setattr(os, "preadv", short)
        assert torch.equal(file.read("x"), tensor)
        assert asked == [140, 76, 12]
        target = torch.zeros(3, 5)
        file.read_into("x", target, 2 * 5 * 4)
        assert torch.equal(target, tensor[2:5])


def test_a_file_is_closed_once_it_is_read(tmp_path: Path) -> None:
    path = write(tmp_path, x=torch.ones(2))
    with TensorFile(path) as file:
        descriptor = file._descriptor
        assert os.fstat(descriptor).st_ino == path.stat().st_ino
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_a_header_may_be_as_long_as_its_bound(tmp_path: Path) -> None:
    path = write(tmp_path, x=torch.ones(2))
    size = int.from_bytes(path.read_bytes()[:8], "little")
    with TensorFile(path, max_header_bytes=size) as file:
        assert file.read("x").tolist() == [1, 1]
    with pytest.raises(OSError, match=f"has a header of {size} bytes, must have at most {size - 1}$"):
        TensorFile(path, max_header_bytes=size - 1)


class Entry:
    def __init__(self, value: int) -> None:
        self.num_bytes = 0
        self._value = value

    def read(self) -> int:
        return self._value


class Pool:
    """Threads that do at once what they are given; notes how they were asked for."""

    made: tuple[Any, ...] = ()
    submitted: int = 0

    def __init__(self, *given: Any) -> None:
        Pool.made, Pool.submitted = given, 0

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def submit(self, call: Callable[[], int]) -> "Future[int]":
        Pool.submitted += 1
        future: Future[int] = Future()
        future.set_result(call())
        return future


@pytest.mark.parametrize(("cores", "readers"), [(1, 2), (2, 2), (3, 3), (16, 16), (40, 16)])
def test_a_thread_for_each_core_reads(cores: int, readers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_file, "ThreadPoolExecutor", Pool)
    monkeypatch.setattr(tensor_file, "num_usable_cores", lambda: cores)
    assert list(read_ahead([Entry(1), Entry(2)])) == [1, 2]
    assert Pool.made[0] == readers


def test_each_reading_thread_computes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    assert list(read_ahead([Entry(1)])) == [1]
    assert asked
    assert set(asked) == {1}


def test_no_more_entries_are_read_ahead_than_their_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_file, "ThreadPoolExecutor", Pool)
    values = read_ahead([Entry(value) for value in range(2 * MAX_AHEAD)])
    for taken in range(3):
        assert next(values) == taken
        assert Pool.submitted == MAX_AHEAD + taken


# Parts.


def stored_of(file: TensorFile, name: str, dtype: str = "F32") -> StoredTensor:
    return StoredTensor(file, name, file.entries[name][1], dtype)


def test_a_tensor_is_read_to_its_place_part_by_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "PART_BYTES", 2 * 32 * 12)
    tensor = torch.randn(150, 3)
    with TensorFile(write(tmp_path, x=tensor)) as file:
        stored, place = stored_of(file, "x"), torch.full((150, 3), torch.nan)
        ranges = list(rows_of_parts(stored))
        assert ranges == [range(0, 64), range(64, 128), range(128, 150)]
        for rows in reversed(ranges):
            reading = InPlace(stored, rows.start * stored.row_bytes, place[rows.start : rows.stop])
            assert (reading.num_bytes, reading.held_bytes) == (len(rows) * 12, 0)
            made = Part(SOURCE, reading, is_last=rows.stop == 150).read()
            assert made == (SOURCE, None, len(rows) * 12, rows.stop == 150)
    assert torch.equal(place, tensor)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ([3], [range(3)]),
        ([0, 4], [range(0, 0)]),
        ([PART_BYTES // 64 + 32, 16], [range(PART_BYTES // 64), range(PART_BYTES // 64, PART_BYTES // 64 + 32)]),
        ([64, PART_BYTES // 4], [range(32), range(32, 64)]),
        ([5, 0], [range(5)]),
    ],
)
def test_parts_are_whole_panels_of_16_mib(shape: list[int], expected: list[range]) -> None:
    assert list(rows_of_parts(StoredTensor(cast("Any", None), "x", shape, "F32"))) == expected


class Sink:
    """Keeps what it is given."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.rows = torch.full(shape, torch.nan)
        self.sizes: list[int] = []

    def fill(self, rows: Tensor, first_row: int) -> None:
        if len(self.sizes) == 3:
            raise OSError("no more")
        self.sizes.append(len(rows))
        self.rows[first_row : first_row + len(rows)] = rows

    def finish(self, layer: Any) -> bool:
        return True


def test_rows_reach_their_sink_as_many_at_a_time_as_a_cache_holds(tmp_path: Path) -> None:
    columns = CHUNK_BYTES // (32 * 2) // 2
    tensor = torch.randn(150, columns).bfloat16()
    buffers, sink = ReadBuffers(), Sink((200, columns))
    with TensorFile(write(tmp_path, x=tensor)) as file:
        stored = stored_of(file, "x", "BF16")
        reading = InRows(stored, range(64, 150), 40, cast("Any", sink), buffers)
        assert (reading.num_bytes, reading.held_bytes) == (86 * columns * 2, 0)
        assert reading.read() is None
        assert sink.sizes == [64, 22], "half a chunk is a panel"
        assert torch.equal(sink.rows[104:190], tensor[64:].float())
        assert bool(sink.rows[:104].isnan().all())
        (kept,) = buffers._free
        sink.sizes = [0, 0, 0]
        with pytest.raises(OSError, match="no more"):
            reading.read()
        assert buffers._free == [kept], "given back by a sink that fails, too"


def test_what_is_read_to_buffers_counts_until_it_is_used(tmp_path: Path) -> None:
    pairs = torch.arange(16.0).view(8, 2)
    buffers = ReadBuffers()
    with TensorFile(write(tmp_path, x=pairs)) as file:
        stored = stored_of(file, "x")
        part = Part(SOURCE, InBuffers(stored, buffers), is_last=True)
        assert part.num_bytes == 64
        made = part.read()
        assert isinstance(made.value, Tensor)
        assert torch.equal(made.value, pairs)
        assert (made.num_bytes, made.is_last, len(buffers._taken)) == (64, True, 1)
        swapped = InBuffers(stored._replace(paired_rows=4), buffers).read()
        assert isinstance(swapped, Tensor)
        assert swapped[:, 0].tolist() == [0, 4, 2, 6, 8, 12, 10, 14]


@pytest.mark.parametrize(("dtype", "size"), [("I32", 4), ("I16", 2), ("F64", 8), ("F8_E8M0", 1), ("BOOL", 1)])
def test_bytes_of_a_row(dtype: str, size: int) -> None:
    stored = StoredTensor(cast("Any", None), "x", [3, 5, 2], dtype)
    assert (stored.row_bytes, stored.num_bytes) == (10 * size, 30 * size)


def test_the_bytes_of_a_quantized_matrix_are_those_of_its_tensors() -> None:
    tensors = {
        name: StoredTensor(cast("Any", None), name, shape, dtype)
        for name, shape, dtype in (("weight", [4, 6], "I8"), ("scale", [4, 1], "BF16"))
    }
    matrix = StoredMatrix(format=cast("Any", SimpleNamespace()), stored_name="a.weight", parts=tensors)
    assert matrix.num_bytes == math.prod((4, 6)) + 4 * 2
