"""Settings of glibc's allocator for free memory."""

import ctypes
import os

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_KEEPING = {
    "MALLOC_ARENA_MAX": (_M_ARENA_MAX, 1),
    "MALLOC_MMAP_THRESHOLD_": (_M_MMAP_THRESHOLD, 32 << 20),  # the most that glibc takes
    "MALLOC_TRIM_THRESHOLD_": (_M_TRIM_THRESHOLD, (1 << 31) - 1),
}
"""By the variable that would say the same."""


def trim_memory() -> None:
    """Let glibc's allocator return its free pages; elsewhere nothing: other allocators do so by themselves."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def keep_freed_memory() -> None:
    """Have glibc's allocator keep what is freed for the next allocation, until `trim_memory`; elsewhere nothing.

    Else each step's tensors would be pages that the kernel takes back, and clears again when they are touched: 5 to
    10 % of a prompt's time. To be called before there are threads: they would have arenas of their own. What the
    environment says of it stays.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for variable, (parameter, value) in _KEEPING.items():
            if variable not in os.environ:
                mallopt(parameter, value)
