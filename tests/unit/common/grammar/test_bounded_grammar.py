"""Which constraints are tried in a process of its own first, and what becomes of one that ends the process."""

import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from pagoda_common.errors import InvalidRequest, NotReady
from pagoda_common.grammar import bounded_grammar
from pagoda_common.grammar.bounded_grammar import SMALL_BYTES, TOO_COMPLEX, BoundedCompiler
from pagoda_common.params.structured_outputs import StructuredOutputsParams

READY = "import json, sys, time; print(json.dumps({'is_ready': True}), flush=True); line = sys.stdin.readline()\n"
LARGE = StructuredOutputsParams(regex="a" * (SMALL_BYTES + 1))


def compiler_of(code: str = "") -> tuple[BoundedCompiler, list[str | None]]:
    """One that tries large constraints in a process that runs `code`, and the constraints that were compiled."""
    compiled: list[str | None] = []

    def compile_(params: StructuredOutputsParams) -> Any:
        compiled.append(params.regex)
        return SimpleNamespace(deep_copy=lambda: "copy")

    made = BoundedCompiler(
        SimpleNamespace(compile=compile_),  # type: ignore[arg-type]  # all that is asked of it
        tokenizer="t",
        revision=None,
        vocab_size=7,
        eos_token_ids=(1, 2),
    )
    assert made._command == [sys.executable, "-m", "pagoda_common.grammar.grammar_process", "t", "", "7", "1,2"]
    made._command = [sys.executable, "-c", code]
    return made, compiled


@pytest.fixture(autouse=True)
def faults(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is found wrong with the next matchers' forced text."""
    found: list[str] = []
    monkeypatch.setattr(bounded_grammar, "forced_fault", lambda copy: found.pop(0) if found else None)
    return found


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    started: list[subprocess.Popen[bytes]] = []

    def popen(*args: Any, **kwargs: Any) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(*args, **kwargs))
        return started[-1]

    monkeypatch.setattr(
        bounded_grammar, "subprocess", SimpleNamespace(Popen=popen, PIPE=subprocess.PIPE, DEVNULL=subprocess.DEVNULL)
    )
    return started


@pytest.mark.parametrize(("size", "is_tried"), [(SMALL_BYTES, False), (SMALL_BYTES + 1, True)])
def test_a_large_constraint_is_tried_apart_first(
    size: int, is_tried: bool, processes: list[subprocess.Popen[bytes]]
) -> None:
    made, compiled = compiler_of(READY + "print(json.dumps({'error': None}), flush=True); time.sleep(1000)")
    assert made.compile(StructuredOutputsParams(regex="a" * size)) is not None
    assert compiled == ["a" * size]
    assert len(processes) == is_tried
    assert all(process.returncode is not None for process in processes), "it has ended"


def test_the_process_is_given_the_constraint_and_says_what_is_wrong() -> None:
    given = "params = json.loads(line)['params']; error = params['regex'][:2] + str(params['start_after_token_ids'])\n"
    made, compiled = compiler_of(READY + given + "print(json.dumps({'error': error}), flush=True)")
    params = StructuredOutputsParams(regex=LARGE.regex, start_after_token_ids=(5,))
    with pytest.raises(InvalidRequest, match=r"^aa\[\]$") as caught:
        made.compile(params)
    assert caught.value.field == "structured_outputs"
    assert compiled == [], "it is not tried here"


def kill_itself() -> str:
    return READY + "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"


def say_nothing() -> str:
    return READY + "time.sleep(1000)"


def read_nothing() -> str:
    return "print('{}', flush=True); import os; os.close(0)"


@pytest.mark.parametrize("code", [kill_itself, say_nothing, read_nothing])
def test_what_its_process_does_not_survive_is_too_complex(
    code: Callable[[], str], processes: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded_grammar, "COMPILE_S", 0.2 if code is say_nothing else 240.0)
    made, compiled = compiler_of(code())
    with pytest.raises(InvalidRequest, match=TOO_COMPLEX):
        made.compile(LARGE)
    assert compiled == []
    assert processes[0].returncode is not None


@pytest.mark.parametrize(("code", "start_s"), [("", 240.0), ("import time; time.sleep(1000)", 0.2)])
def test_a_process_that_does_not_start_is_no_fault_of_the_constraint(
    code: str, start_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded_grammar, "START_S", start_s)
    with pytest.raises(NotReady, match="needs a process to be tried in, which does not start"):
        compiler_of(code)[0].compile(LARGE)


def test_text_that_is_forced_has_a_bound_for_small_ones_too(faults: list[str]) -> None:
    made, compiled = compiler_of()
    faults.append("it forces too much")
    with pytest.raises(InvalidRequest, match="it forces too much") as caught:
        made.compile(StructuredOutputsParams(regex="b"))
    assert (caught.value.field, compiled) == ("structured_outputs", ["b"])


def test_an_answer_may_come_in_pieces() -> None:
    pieces = """
sys.stdout.write('{"error": "' + 200000 * "e")
sys.stdout.flush()
time.sleep(0.05)
print('"}', flush=True)
"""
    with pytest.raises(InvalidRequest) as caught:
        compiler_of(READY + pieces)[0].compile(LARGE)
    assert caught.value.message == "e" * 200000
