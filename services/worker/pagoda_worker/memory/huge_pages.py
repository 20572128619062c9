"""Moves weights into huge pages. Knows their addresses, and nothing else of them."""

import ctypes
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

from torch import Tensor

from pagoda_worker.threads import num_usable_cores

PAGE_BYTES = 2 << 20
"""Huge pages of x86-64 and most other machines."""
MIN_BYTES = 1 << 20
"""Smallest tensor that is moved."""
_COLLAPSE = 25
"""Advice for madvise, since Linux 6.1; works with any setting of huge pages, unless the memory refuses them."""
_HUGE_PAGE = 14
"""Advice for madvise: memory that is touched from now on; not where the machine's setting of huge pages is `never`."""


def ask_for_huge_pages(memory: Tensor) -> None:
    """Have memory that is touched later lie in huge pages. Where that cannot be, nothing changes.

    Args:
        memory: contiguous, in host memory; its begin is that of a page.
    """
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    if madvise is not None and sys.platform == "linux":
        madvise(ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(memory.nbytes), _HUGE_PAGE)


def use_huge_pages(tensors: Iterable[Tensor]) -> int:
    """Have these lie in huge pages, in the place where they are. What cannot, stays as it is.

    A step reads every weight once. A processor that looks up an address for every 4 KiB of them, in a virtual machine
    on two levels, reads 24 GB/s where it reads 28 with an address for every 2 MiB (two cores of Granite Rapids). Moving
    takes 1 to 2 s a GiB, most of it for memory that is new to a virtual machine.

    Returns:
        Bytes in pieces that the kernel took; other memory that shares a page with a tensor is among them.
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
    """First address and end of whole pages with these in them, ascending, each page once."""
    sizes = {tensor.data_ptr(): tensor.nbytes for tensor in tensors}
    end = 0
    for address in sorted(sizes):
        if sizes[address] >= MIN_BYTES:
            begin = max(end, address // PAGE_BYTES * PAGE_BYTES)
            end = max(end, -(-(address + sizes[address]) // PAGE_BYTES) * PAGE_BYTES)
            yield begin, end
