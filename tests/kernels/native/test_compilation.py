"""What compiles the C++ kernels ends with the process that started it, compilers included."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from pagoda_kernels.native.compilation import Compilation

BUILD = """
import subprocess, sys
from pagoda_kernels.native.compilation import end_with_stdin
end_with_stdin()
compiler = subprocess.Popen(["sleep", "600"])
open(sys.argv[1] + ".new", "w").write(str(compiler.pid))
import os; os.rename(sys.argv[1] + ".new", sys.argv[1])
compiler.wait()
"""


def wait_for(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 240
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_compilation_can_be_stopped_from_another_thread(tmp_path: Path) -> None:
    compilation, errors = Compilation(), []

    def run() -> None:
        try:
            compilation.run([sys.executable, "-c", BUILD, str(tmp_path / "pid")])
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    wait_for((tmp_path / "pid").exists)
    compilation.stop()
    thread.join(240)
    assert errors == ["stopped"]
    wait_for(lambda: is_gone(int((tmp_path / "pid").read_text())))
    with pytest.raises(RuntimeError, match="stopped"):
        compilation.run(["true"])


def test_a_compilation_ends_with_its_parent_however_that_ends(tmp_path: Path) -> None:
    parent = "import sys; from pagoda_kernels.native.compilation import Compilation; Compilation().run(sys.argv[1:])"
    command = [sys.executable, "-c", BUILD, str(tmp_path / "pid")]
    process = subprocess.Popen([sys.executable, "-c", parent, *command], env=dict(os.environ))
    wait_for((tmp_path / "pid").exists)
    process.kill()
    process.wait()
    wait_for(lambda: is_gone(int((tmp_path / "pid").read_text())))


def test_the_end_of_what_a_failed_compiler_said_is_the_reason() -> None:
    with pytest.raises(RuntimeError, match="no such header"):
        Compilation().run([sys.executable, "-c", "import sys; sys.exit('no such header')"])


def test_no_more_than_the_end_of_it_is_shown() -> None:
    said = "import sys; sys.stderr.write('a' * 9000 + 'b' * 1999 + 'c' + chr(10)); sys.exit(3)"
    with pytest.raises(RuntimeError) as caught:
        Compilation().run([sys.executable, "-c", said])
    assert str(caught.value) == "b" * 1999 + "c"


def test_what_a_compiler_prints_stays_out_of_the_output_of_the_program(capfd: pytest.CaptureFixture[str]) -> None:
    says = "import sys; print('compiling'); print('a warning', file=sys.stderr)"
    Compilation().run([sys.executable, "-c", says])
    assert tuple(capfd.readouterr()) == ("", "")


def test_a_reason_that_is_no_text_is_shown_as_far_as_it_is() -> None:
    said = "import sys; sys.stderr.buffer.write(b'no file caf\\xe9'); sys.exit(1)"
    with pytest.raises(RuntimeError, match="no file caf\ufffd"):
        Compilation().run([sys.executable, "-c", said])


def test_what_ends_well_says_nothing_and_another_may_follow() -> None:
    compilation = Compilation()
    for _ in range(2):
        compilation.run([sys.executable, "-c", "import sys; print('a warning', file=sys.stderr)"])
    compilation.stop()
    assert compilation.is_stopped, "also where nothing runs"
