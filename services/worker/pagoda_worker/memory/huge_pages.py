"""Moves weights into huge pages. Knows only their addresses."""

import ctypes
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

from torch import Tensor

from pagoda_worker.threads import num_usable_cores

PAGE_BYTES = 2 << 20
"""Bytes of a huge page on x86-64 and most other machines."""
MIN_BYTES = 1 << 20
"""Minimum bytes of a tensor that is moved."""
_COLLAPSE = 25
"""madvise advice since Linux 6.1; works with any huge-page setting, unless the memory does not allow them."""
_HUGE_PAGE = 14
"""madvise advice for memory that is touched later; has no effect if the machine's huge-page setting is `never`."""


def ask_for_huge_pages(memory: Tensor) -> None:
    """Use huge pages for memory that is touched later. No-op where that is not possible.

    Args:
        memory: contiguous, in host memory, beginning at a page.
    """
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    if madvise is not None and sys.platform == "linux":
        madvise(ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(memory.nbytes), _HUGE_PAGE)


def use_huge_pages(tensors: Iterable[Tensor]) -> int:
    """Move tensors into huge pages, at their addresses. Others stay as they are.

    A step reads every weight once. With a page-table lookup for every 4 KiB, on two levels in a virtual machine, a
    processor reads 24 GB/s; with one for every 2 MiB it reads 28 GB/s (two cores of Granite Rapids). Moving takes 1 to
    2 s per GiB, mostly for memory that is new to a virtual machine.

    Returns:
        Bytes that the kernel moved, including other memory that shares a page with a tensor.
    """
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    if madvise is None:
        return 0

    def take(page: int) -> bool:
        return bool(madvise(ctypes.c_void_p(page), ctypes.c_size_t(PAGE_BYTES), _COLLAPSE) == 0)

    ranges = _ranges(tensor for tensor in tensors if tensor.is_cpu)
    pages = (page for begin, end in ranges for page in range(begin, end, PAGE_BYTES))
    with ThreadPoolExecutor(num_usable_cores()) as threads:
        return sum(threads.map(take, pages)) * PAGE_BYTES


def _ranges(tensors: Iterable[Tensor]) -> Iterator[tuple[int, int]]:
    """Address ranges of whole pages that contain these tensors, ascending, each page once."""
    sizes = {tensor.data_ptr(): tensor.nbytes for tensor in tensors}
    end = 0
    for address in sorted(sizes):
        if sizes[address] >= MIN_BYTES:
            begin = max(end, address // PAGE_BYTES * PAGE_BYTES)
            end = max(end, -(-(address + sizes[address]) // PAGE_BYTES) * PAGE_BYTES)
            yield begin, end
