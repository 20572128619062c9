"""How a service is started as a child, without starting one."""

import os
import subprocess
import sys
from typing import Any

import pytest

from pagoda_common.process import children, startup_marks
from pagoda_common.process.children import service_command, service_environment, spawn_service
from pagoda_common.process.startup_marks import VARIABLE, enable_marks, mark, parse_mark


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    told: list[Any] = []
    monkeypatch.setattr(children.subprocess, "Popen", lambda command, **options: told.append((command, options)))
    return told


def test_the_command_of_a_service() -> None:
    command = service_command("pagoda_worker", ["--a=1", "--b"])
    assert command == [sys.executable, "-m", "pagoda_worker", "--a=1", "--b", f"--die-with-parent={os.getpid()}"]


def test_a_service_has_a_session_of_its_own_and_no_input(started: list[Any]) -> None:
    spawn_service("pagoda_worker", ["--a"])
    spawn_service("pagoda_worker", [], env={"PYTHONUNBUFFERED": "0", "OWN": "1"}, stdout=subprocess.PIPE)
    (command, options), (_, piped) = started
    assert command == service_command("pagoda_worker", ["--a"])
    assert options.pop("env") == service_environment(command)
    assert options == {"stdin": subprocess.DEVNULL, "stdout": None, "stderr": None, "start_new_session": True}
    assert (piped["stdout"], piped["stderr"]) == (subprocess.PIPE, subprocess.STDOUT)
    assert (piped["env"]["PYTHONUNBUFFERED"], piped["env"]["OWN"]) == ("0", "1")


def test_the_allocator_of_each_service(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTHONMALLOC", "MALLOC_ARENA_MAX", "PYTHONUNBUFFERED"):
        monkeypatch.delenv(name, raising=False)
    own = service_environment(service_command("pagoda_frontend", []))
    assert (own["PYTHONMALLOC"], own["MALLOC_ARENA_MAX"], own["PYTHONUNBUFFERED"]) == ("malloc", "1", "1")
    worker = service_environment(service_command("pagoda_worker", []))
    assert "PYTHONMALLOC" not in worker
    assert "MALLOC_ARENA_MAX" not in worker
    monkeypatch.setenv("PYTHONMALLOC", "debug")
    assert service_environment(["pagoda_scheduler"])["PYTHONMALLOC"] == "debug"


def test_marks_are_printed_where_they_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(startup_marks, "_is_on", False)
    monkeypatch.setattr(startup_marks.time, "time", lambda: 12.34567)
    mark("imports")
    enable_marks({})
    mark("imports")
    assert capsys.readouterr().err == ""
    enable_marks({VARIABLE: "1"})
    mark("tokenizer, listening")
    line = capsys.readouterr().err
    assert line == "startup mark 12.3457 tokenizer, listening\n"
    assert parse_mark(line.rstrip("\n")) == (12.3457, "tokenizer, listening")
    assert parse_mark("INFO startup mark 1 a") is None
    enable_marks({VARIABLE: ""})
    mark("imports")
    assert capsys.readouterr().err == ""
    assert VARIABLE == "PAGODA_STARTUP_MARKS"
