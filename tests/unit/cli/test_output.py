"""Output that cannot be written does not change how a server ends."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pagoda.server.output import drop_unwritable, show

FULL = Path("/dev/full")
LOGS = "import logging, sys; logging.basicConfig(); logging.error('lost'); sys.stdout.write('lost'); "


@pytest.mark.skipif(not FULL.exists(), reason="the system has no /dev/full")
@pytest.mark.parametrize(
    ("end", "code"), [("", 120), ("from pagoda.server.output import drop_unwritable as d; d()", 0)]
)
def test_what_a_full_disk_has_not_taken_is_dropped_at_the_end(end: str, code: int) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-c", LOGS + end]
    with FULL.open("wb", buffering=0) as full:
        done = subprocess.run(command, stdout=full, stderr=full, env=environment, timeout=240, check=False)
    assert done.returncode == code


def test_a_text_is_written_whole_however_little_is_taken_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write
    with (tmp_path / "log").open("w+", encoding="utf-8") as stream:
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:3]))
            show("some words – and more", stream)
        stream.seek(0)
        assert stream.read() == "some words – and more\n"


class Stream:
    """Stands for stdout or stderr: its flush fails `num_faults` times."""

    def __init__(self, path: Path, num_faults: int, fault: Exception) -> None:
        self.file = path.open("wb")
        self.num_faults, self.fault, self.num_flushed = num_faults, fault, 0

    def fileno(self) -> int:
        return self.file.fileno()

    def flush(self) -> None:
        self.num_flushed += 1
        if self.num_flushed <= self.num_faults:
            raise self.fault


@pytest.mark.parametrize(
    ("fault", "num_faults", "num_flushed", "is_diverted"),
    [(OSError(), 0, 1, False), (OSError(), 1, 2, True), (OSError(), 2, 2, True), (ValueError("closed"), 1, 1, False)],
)
def test_what_a_stream_cannot_write_goes_nowhere(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    fault: Exception,
    num_faults: int,
    num_flushed: int,
    is_diverted: bool,
) -> None:
    streams = [Stream(tmp_path / name, num_faults, fault) for name in ("out", "err")]
    monkeypatch.setattr(sys, "stdout", streams[0])
    monkeypatch.setattr(sys, "stderr", streams[1])
    drop_unwritable()
    for stream in streams:
        os.write(stream.fileno(), b"more")
        stream.file.close()
    assert [stream.num_flushed for stream in streams] == [num_flushed] * 2
    size = 0 if is_diverted else 4
    assert [(tmp_path / name).stat().st_size for name in ("out", "err")] == [size] * 2


def test_a_process_may_have_no_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    drop_unwritable()


def test_a_line_that_no_one_reads_is_lost() -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as stream:
        show("lost", stream)
