"""Weights in huge pages: where they are, as they are."""

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pagoda_worker.memory.huge_pages import PAGE_BYTES, use_huge_pages


def huge_bytes(tensor: Tensor) -> int:
    """Of the mapping that the tensor begins in."""
    blocks = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)
    for block in blocks[1:]:
        begin, end = (int(number, 16) for number in block.split(" ", 1)[0].split("-"))
        if begin <= tensor.data_ptr() < end:
            return int(re.search(r"AnonHugePages:\s+(\d+) kB", block)[1]) << 10  # type: ignore[index]  # smaps has it
    raise AssertionError("the tensor lies in no mapping")


def test_what_lies_in_them_stays_as_it_is() -> None:
    large, small = torch.arange(40 << 20, dtype=torch.uint8), torch.arange(9)
    expected = large.sum()
    taken = use_huge_pages([large, small, torch.empty(1 << 20, device="meta")])
    if taken == 0:
        pytest.skip("this kernel collapses no pages")
    assert large.numel() - 2 * PAGE_BYTES <= taken <= large.numel() + 2 * PAGE_BYTES
    assert huge_bytes(large) >= taken - PAGE_BYTES
    assert large.sum() == expected
    assert use_huge_pages([large]) == taken


def test_nothing_is_taken_for_small_tensors() -> None:
    assert use_huge_pages([torch.zeros(1000), torch.zeros(0)]) == 0


def test_where_the_kernel_refuses_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagoda_worker.memory.huge_pages._COLLAPSE", 12345)
    large = torch.ones(40 << 20, dtype=torch.uint8)
    assert use_huge_pages([large]) == 0
    assert large.sum() == large.numel()
