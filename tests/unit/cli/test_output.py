"""Output that cannot be written does not change how a server ends."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pagoda.server.output import show

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
