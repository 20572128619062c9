"""The frontend as a process, without one: exit codes, the way down, and where its keys come from."""

import asyncio
import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from pagoda_common.config.frontend_config import API_KEY_VARIABLE, OPERATOR_KEY_VARIABLE, FrontendConfig
from pagoda_common.errors import CannotListen
from pagoda_frontend import __main__ as process
from pagoda_frontend.http import server

CHILD = "--die-with-parent=77"
"""What makes lines of a variable keys, as `pagoda serve` hands them on; else it is a flag's list."""


class Server:
    """Starts, ends or fails as the test sets it; records its calls."""

    told: list[Any]
    fault: OSError | None
    ends: bool

    def __init__(self, *, config: FrontendConfig) -> None:
        self.told.append("made")

    async def start(self) -> None:
        if self.fault is not None:
            raise self.fault
        self.told.append("start")

    async def wait_failed(self) -> None:
        if not self.ends:
            await asyncio.Event().wait()

    async def close(self) -> None:
        self.told.append("close")

    async def drain(self, timeout_s: float) -> None:
        self.told.append(("drain", timeout_s))


@pytest.fixture
def stop(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    event = asyncio.Event()

    @contextlib.contextmanager
    def signals() -> Iterator[asyncio.Event]:
        try:
            yield event
        finally:
            Server.told.append("no signals")

    monkeypatch.setattr(server, "FrontendServer", Server)
    monkeypatch.setattr(process, "stop_signals", signals)
    Server.told, Server.fault, Server.ends = [], None, False
    return event


async def test_a_signal_drains(stop: asyncio.Event, caplog: pytest.LogCaptureFixture) -> None:
    stop.set()
    with caplog.at_level("DEBUG"):
        assert await process.serve(FrontendConfig(drain_timeout_s=7.0)) == 0
    assert Server.told == ["made", "start", ("drain", 7.0), "no signals"]
    shown = [record.getMessage() for record in caplog.records if record.name == process.logger.name]
    assert shown == ["draining, up to 7 s", "bye"]


async def test_a_server_that_ends_by_itself_is_a_fault(stop: asyncio.Event, caplog: pytest.LogCaptureFixture) -> None:
    Server.ends = True
    assert await process.serve(FrontendConfig()) == 1
    assert Server.told == ["made", "start", "close", "no signals"]
    assert [record.getMessage() for record in caplog.records] == ["the HTTP server ended"]


async def test_a_port_that_is_taken_is_a_fault(stop: asyncio.Event) -> None:
    Server.fault = CannotListen("cannot listen on 0.0.0.0:80: in use")
    with pytest.raises(CannotListen):
        await process.serve(FrontendConfig())
    assert Server.told == ["made", "no signals"]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What `main` does, in order."""
    told: list[Any] = []
    for name in (API_KEY_VARIABLE, OPERATOR_KEY_VARIABLE, "VLLM_API_KEY", "PAGODA_LOG_LEVEL"):
        monkeypatch.delenv(name, raising=False)
    for name in ("die_with_parent", "raise_file_limit", "run_plugins"):
        monkeypatch.setattr(process, name, lambda *given, name=name: told.append((name, *given)))
    monkeypatch.setattr(process, "enable_marks", lambda environment: told.append("marks"))
    monkeypatch.setattr(
        process, "configure_logging", lambda *given, **options: told.append(("logging", *given, options))
    )
    monkeypatch.setattr(process, "serve", lambda config: told.append(config))
    monkeypatch.setattr(process.uvloop, "run", lambda coroutine: 5)
    return told


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["pagoda-frontend", *words])
    return process.main()


def test_what_a_process_does_first(monkeypatch: pytest.MonkeyPatch, started: list[Any]) -> None:
    assert run(monkeypatch) == 5
    assert [one if isinstance(one, tuple | str) else "serve" for one in started] == [
        ("raise_file_limit",),
        "marks",
        ("logging", "frontend", "info", "text", {"is_child": False}),
        ("run_plugins",),
        "serve",
    ]
    started.clear()
    monkeypatch.setenv("PAGODA_LOG_LEVEL", "debug")
    run(monkeypatch, "--die-with-parent=77", "--log-format=json")
    assert started[0] == ("die_with_parent", 77)
    assert started[3] == ("logging", "frontend", "debug", "json", {"is_child": True})


@pytest.mark.parametrize(
    ("words", "environment", "keys", "operators"),
    [
        ((), {}, (), ()),
        ((CHILD,), {API_KEY_VARIABLE: "a\nb,c", OPERATOR_KEY_VARIABLE: "o\np"}, ("a", "b,c"), ("o", "p")),
        ((), {API_KEY_VARIABLE: "a,b", OPERATOR_KEY_VARIABLE: "o,p"}, ("a", "b"), ("o", "p")),
        ((CHILD,), {"VLLM_API_KEY": "v\nw"}, ("v", "w"), ()),
        ((), {"VLLM_API_KEY": "v"}, ("v",), ()),
        ((), {API_KEY_VARIABLE: "a", "VLLM_API_KEY": "v"}, ("a",), ()),
        (("--api-key", "k"), {API_KEY_VARIABLE: "a", OPERATOR_KEY_VARIABLE: "o"}, ("k",), ("o",)),
        (("--operator-key", "k"), {API_KEY_VARIABLE: "a", OPERATOR_KEY_VARIABLE: "o"}, ("a",), ("k",)),
    ],
)
def test_where_keys_come_from(
    monkeypatch: pytest.MonkeyPatch,
    started: list[Any],
    words: tuple[str, ...],
    environment: dict[str, str],
    keys: tuple[str, ...],
    operators: tuple[str, ...],
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    run(monkeypatch, *words)
    config = started[-1]
    assert (config.api_key, config.operator_key) == (keys, operators)
