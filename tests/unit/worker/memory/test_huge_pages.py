"""Weights in huge pages: where they are, as they are."""

import os
import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch

from pagoda_worker.memory.huge_pages import MIN_BYTES, PAGE_BYTES, _ranges, use_huge_pages

FRESH = """
import re, sys
from pathlib import Path
import torch
from pagoda_worker.memory.huge_pages import PAGE_BYTES, use_huge_pages

large, small = torch.arange(40 << 20, dtype=torch.uint8), torch.arange(9)
expected = large.sum()
taken = use_huge_pages([large, small, torch.empty(1 << 20, device="meta")])
if taken == 0:
    sys.exit("this kernel collapses no pages")
assert large.numel() - 2 * PAGE_BYTES <= taken <= large.numel() + 2 * PAGE_BYTES, taken
for block in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)[1:]:
    begin, end = (int(number, 16) for number in block.split(" ", 1)[0].split("-"))
    if begin <= large.data_ptr() < end:
        huge_bytes = int(re.search(r"AnonHugePages:\\s+(\\d+) kB", block)[1]) << 10
assert huge_bytes >= taken - PAGE_BYTES, huge_bytes
assert large.sum() == expected
assert use_huge_pages([large]) == taken
"""
"""In a process of its own: in one that has run other tests for long, the kernel may find no huge page."""


def test_what_lies_in_them_stays_as_it_is() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", FRESH]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240, env=environment)
    if "collapses no pages" in done.stderr:
        pytest.skip("this kernel collapses no pages")
    assert done.returncode == 0, done.stderr


@dataclass(frozen=True)
class Place:
    """Where a tensor lies, as far as it is asked."""

    begin: int
    nbytes: int

    def data_ptr(self) -> int:
        return self.begin


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ([(PAGE_BYTES, PAGE_BYTES)], [1]),
        ([(PAGE_BYTES + 4096, PAGE_BYTES)], [1, 2]),
        ([(3 * MIN_BYTES, MIN_BYTES), (2 * MIN_BYTES, MIN_BYTES)], [1]),
        ([(MIN_BYTES, 4 * MIN_BYTES), (5 * MIN_BYTES, 2 * MIN_BYTES)], [0, 1, 2, 3]),
        ([(0, 6 * MIN_BYTES), (2 * MIN_BYTES, MIN_BYTES)], [0, 1, 2]),
        ([(0, MIN_BYTES - 1), (4 * MIN_BYTES, MIN_BYTES)], [2]),
    ],
)
def test_a_page_with_several_tensors_is_asked_for_once(places: list[tuple[int, int]], expected: list[int]) -> None:
    ranges = _ranges(Place(*place) for place in places)  # type: ignore[misc]  # no tensors
    assert [page // PAGE_BYTES for begin, end in ranges for page in range(begin, end, PAGE_BYTES)] == expected


def test_nothing_is_taken_for_small_tensors() -> None:
    assert use_huge_pages([torch.zeros(1000), torch.zeros(0)]) == 0


def test_where_the_kernel_refuses_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagoda_worker.memory.huge_pages._COLLAPSE", 12345)
    large = torch.ones(40 << 20, dtype=torch.uint8)
    assert use_huge_pages([large]) == 0
    assert large.sum() == large.numel()
