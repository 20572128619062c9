"""pagoda top: the view that refreshes itself, its keys and its interval."""

import argparse
from typing import Any, cast

import pytest

from pagoda.commands import top
from pagoda.top.sample import Sample
from pagoda_common.errors import NotReady


class Figures:
    """A source with one answer after the other."""

    name = "n"

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)

    def sample(self) -> Sample:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return Sample.parse(f"vllm:num_requests_running {answer}\n", at_s=float(answer))

    def not_ready_reason(self) -> str:
        return "loading"


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Those that are pressed, one an interval."""
    pressed: list[str] = []

    def key(timeout_s: float) -> str:
        assert timeout_s == 0.5
        return pressed.pop(0)

    monkeypatch.setattr(top, "_key", key)
    monkeypatch.setattr(top.shutil, "get_terminal_size", lambda **fallback: (80, 24))
    monkeypatch.setattr(top.time, "strftime", lambda pattern, *moment: f"<{pattern}>")
    monkeypatch.setenv("NO_COLOR", "1")
    return pressed


def follow(source: Figures) -> None:
    top._follow(cast("Any", source), 0.5)


def frames_of(printed: str) -> list[str]:
    assert printed.startswith("\x1b[H")
    frames = printed.split("\x1b[H")[1:]
    for one in frames:
        assert one.endswith("\x1b[K\x1b[J")
        assert one.count("\x1b[K\r\n") == 23
    return [one.replace("\x1b[K", "").replace("\x1b[J", "") for one in frames]


def test_the_live_view_pauses_and_ends(keys: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    keys += ["", " ", "x", " ", "q"]
    follow(Figures(1, 2, 3))
    frames = frames_of(capsys.readouterr().out)
    assert ["running 1" in frames[0], "running 2" in frames[1], "running 3" in frames[4]] == [True] * 3
    assert "running 2" in frames[2]
    assert "running 2" in frames[3]
    hints = [one.split("\r\n")[-1] for one in frames]
    plain = "q ends · space pauses"
    assert hints == [plain, plain, f"paused; {plain}", f"paused; {plain}", plain]
    assert "loading" in frames[0]


@pytest.mark.parametrize("key", ["q", "Q", "\x03", "\x04"])
def test_keys_that_end_it(keys: list[str], key: str, capsys: pytest.CaptureFixture[str]) -> None:
    keys += ["Z", key, "never read"]
    follow(Figures(1, 2))
    assert keys == ["never read"]


def test_the_live_view_says_since_when_nobody_answers(keys: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    keys += ["", "", "q"]
    follow(Figures(NotReady("gone"), 1, NotReady("away")))
    first, _, last = frames_of(capsys.readouterr().out)
    assert "no answer yet (gone)" in first
    assert "no answer since <%X>: its figures are of then (away)" in last
    assert "running 1" in last


@pytest.mark.parametrize(("interval", "is_right"), [("0.1", True), ("0.09", False), ("3600", True), ("3601", False)])
def test_the_interval_has_bounds(
    interval: str, is_right: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(top.time, "sleep", slept.append)
    monkeypatch.setattr(top, "FrontendSource", lambda url: Figures(1, 2))
    parser = argparse.ArgumentParser()
    top.add_arguments(parser)
    args = parser.parse_args(["--interval", interval, "--once"])
    if is_right:
        assert top.run(args, parser) == 0
        assert slept == [float(interval)]
        assert "running 2" in capsys.readouterr().out
        return
    with pytest.raises(SystemExit):
        top.run(args, parser)
    assert f"--interval is {interval}, must be between 0.1 and 3600 seconds" in capsys.readouterr().err
