"""What the allocator keeps, seen in a process of its own: its choices hold for all of a process's life."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import resource
import sys
import threading

import numpy as np

from pagoda_common.process.memory import keep_freed_memory, trim_memory

if sys.argv[1] == "keep":
    keep_freed_memory()


def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        np.ones(2 << 20, dtype=np.uint8)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def work():
    faults()
    print(faults())
    trim_memory()
    print(faults())


thread = threading.Thread(target=work)
thread.start()
thread.join()
"""


def page_faults(what: str, **env: str) -> list[int]:
    """Of 20 arrays of 2 MiB one after the other on a second thread, warm and after a trim."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, what], env=ours | env, capture_output=True, text=True, check=True
    )
    return [int(line) for line in run.stdout.split()]


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_freed_memory_is_kept_until_it_is_trimmed() -> None:
    warm, trimmed = page_faults("keep")
    assert warm < 50, "the pages were there"
    assert trimmed > 400, "and had been given back: 512 of 4 KiB"


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_the_environment_goes_before() -> None:
    warm, _ = page_faults("keep", MALLOC_MMAP_THRESHOLD_="65536", MALLOC_ARENA_MAX="1", MALLOC_TRIM_THRESHOLD_="65536")
    assert warm > 20 * 400, "each array is mapped again"
