"""Limits of a process that does jobs: they hold for the job, and end with it."""

import resource
import signal
import subprocess
import sys

import pytest

from pagoda_common.process.job_limits import limit_cpu


def test_the_bound_on_processor_time_ends_with_the_job() -> None:
    for _ in range(2):
        with limit_cpu(1000.0):
            left_s, again_s = signal.getitimer(signal.ITIMER_PROF)
            assert 0 < left_s <= 1001
            assert again_s == 0
        assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)


def test_it_ends_with_a_job_that_fails() -> None:
    with pytest.raises(ValueError, match="bad job"), limit_cpu(1000.0):
        raise ValueError("bad job")
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)


def run(code: str) -> subprocess.CompletedProcess[str]:
    head = "from pagoda_common.process.job_limits import limit_cpu, limit_memory\nimport resource\n"
    return subprocess.run([sys.executable, "-c", head + code], capture_output=True, text=True, timeout=240, check=False)


def test_a_job_that_takes_too_much_time_ends_the_process() -> None:
    assert run("with limit_cpu(0.05):\n while True: pass").returncode == -signal.SIGPROF


def test_memory_is_bounded_beyond_what_the_process_has() -> None:
    code = """
limit_memory(64 << 20)
assert resource.getrlimit(resource.RLIMIT_CORE) == (0, 0)
held = bytearray(16 << 20)
try:
    bytearray(128 << 20)
except MemoryError:
    print("refused")
"""
    done = run(code)
    assert done.stdout == "refused\n", done.stderr
    assert resource.getrlimit(resource.RLIMIT_AS)[0] != 64 << 20, "of that process alone"
