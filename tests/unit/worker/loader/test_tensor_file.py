"""Tensors of safetensors files: the library's values, in memory of their own, and read ahead in their order."""

import json
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from pagoda_worker.loader import tensor_file
from pagoda_worker.loader.tensor_file import DTYPES, MAX_AHEAD_BYTES, TensorFile, read_ahead


def write(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    path = folder / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    return path


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_a_tensor_of_any_type_is_as_it_was_stored(dtype: torch.dtype, tmp_path: Path) -> None:
    stored = {
        "first": torch.arange(5, dtype=torch.uint8),
        "matrix": torch.randint(0, 2, (7, 3)).to(dtype),
        "none": torch.zeros(0, 4, dtype=dtype),
        "one": torch.ones((), dtype=dtype),
    }
    with TensorFile(write(tmp_path, stored)) as file:
        for name, tensor in stored.items():
            found = file.read(name)
            assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
            assert found.double().tolist() == tensor.double().tolist()
            assert file.entries[name][1] == list(tensor.shape)
        assert file.read("one").item() == 1


def test_no_page_of_the_file_is_mapped_while_it_is_read(tmp_path: Path) -> None:
    path = write(tmp_path, {"matrix": torch.randn(300, 400)})
    with TensorFile(path) as file:
        file.read("matrix")
        assert str(path) not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("damage", ["short", "header", "empty"])
def test_a_damaged_file_is_refused(damage: str, tmp_path: Path) -> None:
    path = write(tmp_path, {"matrix": torch.randn(30, 40)})
    content = path.read_bytes()
    path.write_bytes({"short": content[:-7], "header": b"\xff" * 8 + content[8:], "empty": b""}[damage])
    with pytest.raises(SafetensorError):
        TensorFile(path)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [30, 40], "data_offsets": [0, 4800 << 20]},
        {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 4800]},
        {"dtype": "F32", "shape": [2**63, 2], "data_offsets": [0, 0]},
        {"dtype": "F32", "shape": [-30, -40], "data_offsets": [0, 4800]},
        {"dtype": "F32", "shape": [30, 40], "data_offsets": [-4800, 0]},
        {"dtype": "F32", "shape": [30, 40], "data_offsets": [4800, 0]},
        {"dtype": "F32", "shape": [30, 40.0], "data_offsets": [0, 4800]},
        {"dtype": "F33", "shape": [30, 40], "data_offsets": [0, 4800]},
        {"dtype": "F32", "shape": [0, 2**62], "data_offsets": [0, 0]},
        {"dtype": "F4", "shape": [30, 320], "data_offsets": [0, 4800]},
    ],
    ids=str,
)
def test_a_header_that_lies_is_one_error(entry: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    header = json.dumps({"matrix": entry}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4800))
    with pytest.raises((SafetensorError, OSError)), TensorFile(path) as file:
        file.read("matrix")


def test_a_header_may_have_a_bound(tmp_path: Path) -> None:
    path = write(tmp_path, {f"matrix.{number}": torch.ones(1) for number in range(100)})
    with TensorFile(path, max_header_bytes=10_000) as file:
        assert len(file.entries) == 100
    with pytest.raises(OSError, match=r"has a header of \d+ bytes, must have at most 1000"):
        TensorFile(path, max_header_bytes=1000)


def test_a_file_that_is_cut_while_it_is_open_says_so(tmp_path: Path) -> None:
    path = write(tmp_path, {"matrix": torch.randn(30, 40)})
    with TensorFile(path) as file:
        path.write_bytes(path.read_bytes()[:-100])
        with pytest.raises(OSError, match="ends within matrix"):
            file.read("matrix")


class Entry:
    """Something to read, that notes when."""

    def __init__(self, value: int, num_bytes: int, note: Callable[[int], None] = lambda _: None) -> None:
        self.num_bytes = num_bytes
        self._value, self._note = value, note

    def read(self) -> int:
        self._note(self._value)
        if self._value < 0:
            raise OSError("cannot be read")
        return self._value


def test_entries_come_in_their_order() -> None:
    assert list(read_ahead([Entry(value, 10) for value in range(50)])) == list(range(50))
    assert list(read_ahead([])) == []


def test_no_more_is_read_ahead_than_memory_allows() -> None:
    begun: list[int] = []
    lock = threading.Lock()

    def note(value: int) -> None:
        with lock:
            begun.append(value)

    values = read_ahead([Entry(value, MAX_AHEAD_BYTES // 2, note) for value in range(10)])
    assert next(values) == 0
    with lock:
        assert max(begun) <= 1
    assert list(values) == list(range(1, 10))


class AtOnce:
    """A pool of threads that does what it is given at once."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __enter__(self) -> "AtOnce":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def submit(self, call: Callable[[], int]) -> "Future[int]":
        future: Future[int] = Future()
        future.set_result(call())
        return future


def test_as_much_is_read_ahead_later_as_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_file, "ThreadPoolExecutor", AtOnce)
    begun: list[int] = []
    values = read_ahead([Entry(value, MAX_AHEAD_BYTES // 4, begun.append) for value in range(30)])
    for taken in range(20):
        assert next(values) == taken
        assert begun == list(range(taken + 4)), "one that was taken makes room for another"


def test_an_entry_larger_than_all_that_is_read_ahead_is_read_alone() -> None:
    assert list(read_ahead([Entry(value, 3 * MAX_AHEAD_BYTES) for value in range(3)])) == [0, 1, 2]


def test_a_fault_comes_when_it_is_its_entrys_turn() -> None:
    values = read_ahead([Entry(1, 1), Entry(-1, 1), Entry(2, 1)])
    assert next(values) == 1
    with pytest.raises(OSError, match="cannot be read"):
        next(values)


class OneAtOnce(AtOnce):
    """A pool of threads that does the first of what it is given, and leaves the others in its queue."""

    def __init__(self, *_: object, **__: object) -> None:
        self.futures: list[Future[int]] = []

    def submit(self, call: Callable[[], int]) -> "Future[int]":
        self.futures.append(Future() if self.futures else super().submit(call))
        return self.futures[-1]


def test_what_was_to_be_read_ahead_is_called_off_once_no_one_reads_on(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = OneAtOnce()
    monkeypatch.setattr(tensor_file, "ThreadPoolExecutor", lambda *_: pool)
    values = read_ahead([Entry(value, 1) for value in range(10)])
    assert next(values) == 0
    assert isinstance(values, Generator)
    values.close()
    assert len(pool.futures) > 1
    assert all(future.cancelled() for future in pool.futures[1:])
