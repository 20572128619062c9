"""An engine's process in the comparison: commands go in, figures come out, and what goes wrong is said."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.cpu.engines.driver import gaps
from benchmarks.cpu.runner import awake
from benchmarks.cpu.session import Driver, EngineFailure, EngineGone, child

FAKE = """
import sys, time
from benchmarks.cpu.engines.driver import main

class Fake:
    def __init__(self, args):
        print("noise that is no reply")
        if args.model == "broken":
            sys.exit("no such model")
    def prepare(self, *, num_parallel, max_len):
        self.sizes = num_parallel, max_len
    def stream(self, prompt, num_outputs):
        return [time.perf_counter() for _ in range(num_outputs)]
    def generate(self, prompts, num_outputs, concurrency):
        if num_outputs == 13:
            raise RuntimeError(f"unlucky {self.sizes}")
        if num_outputs == 14:
            time.sleep(60)
        if num_outputs == 15:
            sys.exit("had enough")
        return len(prompts) * num_outputs - (num_outputs == 16)
    def close(self):
        pass

main(Fake, ("pytest", "no-such-package"))
"""


@contextmanager
def driver(log: Path, model: str = "m") -> Iterator[tuple[Driver, subprocess.Popen[bytes]]]:
    """A fake engine in a process of its own."""
    command = [sys.executable, "-c", FAKE, "--model", model, "--max-model-len", "64", "--threads", "1"]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    with child(command, log=log, env=env) as process:
        yield Driver(process, log=log), process


def run(one: Driver, num_outputs: int, *, is_stream: bool = False, timeout_s: float = 30.0) -> dict[str, float]:
    """Two prompts, or one as a stream."""
    prompts = [[1, 2, 3]] if is_stream else [[1, 2, 3], [4]]
    return one.run(
        prompts, num_outputs=num_outputs, concurrency=0, is_stream=is_stream, max_len=16, timeout_s=timeout_s
    )


def test_a_driver_says_its_versions_and_measures(tmp_path: Path) -> None:
    with driver(tmp_path / "log") as (one, process):
        assert one.ready(30)["versions"] == {"pytest": pytest.__version__}
        assert set(run(one, 4)) == {"seconds"}
        assert set(run(one, 4, is_stream=True)) == {"seconds", "gap_s", "ttft_s"}
        assert set(run(one, 1, is_stream=True)) == {"seconds"}
        with pytest.raises(EngineFailure, match=r"RuntimeError: unlucky \(2, 16\)"):
            run(one, 13)
        with pytest.raises(EngineFailure, match="generated 31 tokens, 32 were asked for"):
            run(one, 16)
        assert set(run(one, 4)) == {"seconds"}  # a failed measurement leaves the engine as it was
    assert process.returncode is not None
    assert "noise" in (tmp_path / "log").read_text()


def test_tokens_that_came_together_share_the_gap() -> None:
    assert gaps([1.0, 1.5, 1.5, 2.5]) == [0.25, 0.25, 1.0]
    assert gaps([1.0, 1.0]) == [0.0]


def test_an_engine_that_ends_or_hangs_is_gone(tmp_path: Path) -> None:
    with driver(tmp_path / "ends") as (one, _):
        one.ready(30)
        with pytest.raises(EngineGone, match="had enough"):
            run(one, 15)
    with driver(tmp_path / "hangs") as (one, _):
        one.ready(30)
        with pytest.raises(EngineGone, match="longer than 0 s"):
            run(one, 14, timeout_s=0.2)


def test_an_engine_that_cannot_load_says_why(tmp_path: Path) -> None:
    with driver(tmp_path / "log", model="broken") as (one, _), pytest.raises(EngineGone, match="no such model"):
        one.ready(30)


def test_a_stopped_engine_goes_on_when_it_is_measured_and_ends_when_it_is_stopped(tmp_path: Path) -> None:
    with driver(tmp_path / "log") as (one, process):
        one.ready(30)
        for _ in range(2):
            with awake(process, can_stop=True):
                run(one, 4)
            stopped = os.waitid(os.P_PID, process.pid, os.WSTOPPED)  # waits until it is
            assert stopped is not None
            assert stopped.si_status == signal.SIGSTOP
    assert process.returncode is not None
