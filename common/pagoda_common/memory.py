"""Memory that a process holds without need."""

import ctypes


def trim_memory() -> None:
    """Let glibc's allocator return its free pages; elsewhere nothing: other allocators do so by themselves."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
