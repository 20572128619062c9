"""The process that compiles constraints: what it answers, for good ones, for bad ones, and for those that break it."""

import io
import json
import sys
from contextlib import nullcontext
from typing import Any, cast

import pytest

from pagoda_common.errors import InvalidRequest
from pagoda_common.grammar import grammar_process
from pagoda_common.grammar.grammar_process import Checker
from pagoda_common.grammar.matcher import GrammarCompiler
from pagoda_common.params.structured_outputs import StructuredOutputsParams
from pagoda_common.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer.load("pagoda-tiny")
CHECKER = Checker(GrammarCompiler(tokenizer=TOKENIZER, vocab_size=3072, eos_token_ids=(0, 2)))


@pytest.mark.parametrize(
    "given",
    [
        {"json": {"type": "integer"}},
        {"json_object": True},
        {"regex": "a"},
        {"choice": ["a", "b"]},
        {"grammar": 'root ::= "a" root | "b"'},
        {"structural_tag": {"format": {"type": "any_text"}}},
    ],
)
def test_nothing_is_wrong(given: dict[str, Any]) -> None:
    assert CHECKER.error_of(StructuredOutputsParams(**given)) is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"grammar": "root ::= other"}, "structured_outputs.grammar cannot be read: there is no rule 'other'"),
        ({"regex": "("}, "structured_outputs.regex: at 1(8): invalid regex"),
        ({"regex": "a{20000}"}, "structured_outputs forces 20000 bytes of text at once, must be at most 8192"),
        ({"regex": "[ab]c{20000}"}, "structured_outputs forces 20000 bytes of text at once, must be at most 8192"),
    ],
)
def test_what_is_wrong_is_said(given: dict[str, Any], message: str) -> None:
    error = CHECKER.error_of(StructuredOutputsParams(**given))
    assert error is not None
    assert error.startswith(message)


class Compiler:
    """Fails in some way."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def compile(self, params: StructuredOutputsParams) -> Any:
        raise self._error


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (InvalidRequest("that is wrong"), "that is wrong"),
        (MemoryError(), "structured_outputs takes too much memory"),
        (SystemExit(), "structured_outputs cannot be compiled"),
    ],
)
def test_faults_of_compiling(error: BaseException, message: str) -> None:
    checker = Checker(cast("GrammarCompiler", Compiler(error)))
    assert checker.error_of(StructuredOutputsParams(regex="a")) == message


def test_lines_are_answered_in_their_order(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    memory, seconds, stacks = [], [], []

    def limit_cpu(limit_s: float) -> Any:
        seconds.append(limit_s)
        return nullcontext()

    monkeypatch.setattr(grammar_process, "limit_memory", memory.append)
    monkeypatch.setattr(grammar_process, "limit_cpu", limit_cpu)
    monkeypatch.setattr(grammar_process.threading, "stack_size", stacks.append)
    monkeypatch.setattr(sys, "argv", ["x", "pagoda-tiny", "", "3072", "0,2"])
    jobs = [{"regex": "a"}, {"regex": "a", "json_object": True}, {"choice": ["a"]}]
    lines = "".join(json.dumps({"params": params}) + "\n" for params in jobs)
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    grammar_process.main()
    ready, first, second, third = map(json.loads, capsys.readouterr().out.splitlines())
    assert (ready, first, third) == ({"is_ready": True}, {"error": None}, {"error": None})
    assert "structured_outputs" in second["error"]
    assert (memory, seconds, stacks) == ([1 << 30], [1.0] * 3, [4 << 20])
