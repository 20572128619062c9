"""``pagoda demo``: how it ends, what it shows of the services, and what it stops."""

import asyncio
import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pagoda.commands import demo

STACK = SimpleNamespace(
    url="http://a",
    frontend=SimpleNamespace(scheduler="127.0.0.1:1"),
    engine=SimpleNamespace(security="security"),
    services=lambda: ["service"],
)


class Services:
    """Stands for the supervisor: ends with `code` at once, or with 0 when it is stopped."""

    def __init__(self, code: int | None, end_code: int = 0) -> None:
        self.code, self.end_code = code, end_code
        self.is_stopped = asyncio.Event()
        self.output: Any = None

    def __call__(self, *, services: list[str], output: Any) -> "Services":
        assert services == ["service"]
        self.output = output
        return self

    async def run(self) -> int:
        for number in range(42):
            self.output("worker", f"line {number}")
        if self.code is not None:
            return self.code
        await self.is_stopped.wait()
        return self.end_code

    def stop(self) -> None:
        self.is_stopped.set()


async def never(*_: Any, **__: Any) -> str:
    await asyncio.Event().wait()
    return ""


async def at_once(*_: Any, **__: Any) -> str:
    return "no such file"


@pytest.mark.parametrize(
    ("services", "is_ready", "has_fault", "has_text", "expected"),
    [
        (Services(None), True, False, True, 0),
        (Services(None), True, False, False, 1),
        (Services(None, 5), True, False, True, 5),
        (Services(2), False, False, True, 2),
        (Services(0), False, False, True, 1),
        (Services(None), False, True, True, 1),
    ],
)
async def test_a_demo_ends_well_with_an_answer_alone(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    services: Services,
    is_ready: bool,
    has_fault: bool,
    has_text: bool,
    expected: int,
) -> None:
    asked: list[Any] = []

    @contextlib.contextmanager
    def signals(supervisor: Any) -> Iterator[None]:
        assert supervisor is services
        yield
        asked.append("signals are as before")

    def find(scheduler: str, *, security: Any) -> Any:
        assert (scheduler, security) == ("127.0.0.1:1", "security")
        return at_once() if has_fault else never()

    def talk(stack: Any, prompt: str, max_tokens: int) -> bool:
        asked.append((prompt, max_tokens))
        return has_text

    monkeypatch.setattr(demo, "Supervisor", services)
    monkeypatch.setattr(demo, "stop_on_signals", signals)
    monkeypatch.setattr(demo, "find_load_fault", find)
    monkeypatch.setattr(demo, "_talk", talk)
    stack = SimpleNamespace(**vars(STACK), wait_until_ready=lambda on_reason: at_once() if is_ready else never())
    assert await demo.demo(cast("Any", stack), prompt="why?", max_tokens=7) == expected
    assert asked == [*([("why?", 7)] if is_ready else []), "signals are as before"]
    assert services.is_stopped.is_set()
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}
    printed = capsys.readouterr()
    assert ("Ready in " in printed.out) == is_ready
    if expected == 0:
        assert printed.err == ""
        return
    lines = printed.err.splitlines()
    assert lines[:2] == ["The services' last lines:", "worker    | line 2"], "forty of them"
    assert lines[40] == "worker    | line 41"
    assert ("No answer came." in lines) == (not (is_ready and has_text))


def test_a_reason_to_wait_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    demo.print_reason("the model is being loaded")
    assert capsys.readouterr().out == "  the model is being loaded\n"
