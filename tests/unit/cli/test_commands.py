"""The command as a whole: what there is, exit codes, completion."""

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pagoda.cli import COMMANDS, main, make_parser
from pagoda.commands import chat
from pagoda_common.errors import ConfigError, ModelLoadError, NotReady, PagodaError


@pytest.mark.parametrize("command", [command.name for command in COMMANDS])
def test_every_command_has_help_in_groups(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        make_parser().parse_args([*command.split(), "--help"])
    printed = capsys.readouterr().out
    assert ended.value.code == 0
    assert printed.startswith(f"usage: pagoda {command} ")
    assert "--config FILE" in printed


def test_a_command_that_asks_a_service_needs_no_more_than_an_image_of_a_service_has() -> None:
    heavy = ("aiohttp", "argcomplete", "yaml", "tqdm", "tokenizers", "llguidance", "transformers", "torch", "fastapi")
    code = (
        "import sys; from pagoda.cli import main; assert main(['health', '127.0.0.1:1', '--timeout', '0.1']) == 1;"
        f"print([name for name in {heavy!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=True)
    assert done.stdout.strip() == "[]"


def test_the_flags_of_serve_stand_in_groups(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        make_parser().parse_args(["serve", "--help"])
    printed = capsys.readouterr().out
    groups = (
        "addresses:",
        "model:",
        "cache:",
        "scheduling:",
        "workers:",
        "frontend:",
        "processes:",
        "accepted for compatibility",
    )
    assert printed.startswith("usage: pagoda serve [model] [flags]\n\n")
    places = [printed.index(f"\n{group}") for group in groups]
    assert places == sorted(places)


@pytest.mark.parametrize(
    ("word", "shown", "hidden"),
    [
        ("cache", "--block-size", "--max-num-seqs"),
        ("scheduling", "--max-num-seqs", "--block-size"),
        ("max_model_len", "--max-model-len", "--block-size"),
        ("lora", "--max-loras", "--block-size"),
        ("vllm", "--swap-space", "--block-size"),
    ],
)
def test_help_may_be_of_a_group_or_a_flag(
    capsys: pytest.CaptureFixture[str], word: str, shown: str, hidden: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        make_parser().parse_args(["serve", f"--help={word}"])
    printed = capsys.readouterr().out
    assert ended.value.code == 0
    assert shown in printed
    assert hidden not in printed
    with pytest.raises(SystemExit) as ended:
        make_parser().parse_args(["serve", "--help=xyzzy"])
    assert ended.value.code == 2
    message = capsys.readouterr().err
    assert "'xyzzy'; the groups are: addresses, model, cache," in message
    assert "positional" not in message


def test_errors_end_with_code_1_and_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(args: object) -> object:
        raise NotReady("no server is there")

    monkeypatch.setattr(chat, "open_server", fail)
    assert main(["chat", "-q", "hi"]) == 1
    assert capsys.readouterr().err == "pagoda chat: error: no server is there\n"


def test_ctrl_c_ends_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(args: object) -> object:
        raise KeyboardInterrupt

    monkeypatch.setattr(chat, "open_server", interrupt)
    assert main(["complete", "-q", "hi"]) == 130


def test_a_flag_that_no_command_has_ends_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["complete", "-q", "hi", "--no-such-flag"])
    assert ended.value.code == 2
    assert "--no-such-flag" in capsys.readouterr().err


def test_an_output_that_no_one_reads_ends_with_141(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(args: object) -> object:
        raise BrokenPipeError

    monkeypatch.setattr(chat, "open_server", broken)
    monkeypatch.setattr(sys, "stdout", sys.stdout)  # put back afterwards
    assert main(["complete", "-q", "hi"]) == 141
    assert sys.stdout is None, "its end would fail to write to it"


@pytest.mark.parametrize(
    ("error", "code"),
    [(PagodaError("x"), 1), (NotReady("x"), 1), (ConfigError("x"), 2), (ModelLoadError("x"), 2)],
)
def test_what_cannot_be_served_ends_with_2(monkeypatch: pytest.MonkeyPatch, error: PagodaError, code: int) -> None:
    def fail(args: object) -> object:
        raise error

    monkeypatch.setattr(chat, "open_server", fail)
    assert main(["complete", "-q", "hi"]) == code


@pytest.mark.parametrize(
    ("shell", "marker"), [("bash", "complete "), ("zsh", "compdef"), ("fish", "function __fish_pagoda_complete")]
)
def test_each_shell_gets_its_completion(shell: str, marker: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    assert marker in capsys.readouterr().out


@pytest.mark.parametrize("is_asked", [True, False])
def test_a_shell_that_asks_finds_the_flags_of_every_command(monkeypatch: pytest.MonkeyPatch, is_asked: bool) -> None:
    monkeypatch.delenv("_ARGCOMPLETE", raising=False)
    if is_asked:
        monkeypatch.setenv("_ARGCOMPLETE", "1")
    for command in COMMANDS:
        parser: Any = make_parser()
        for word in command.name.split():
            [subparsers] = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
            parser = subparsers.choices[word]
        assert ("--config" in parser._option_string_actions) is is_asked, command.name


@pytest.mark.parametrize(
    ("line", "expected"),
    [("pagoda ser", {"serve "}), ("pagoda serve --max-num-s", {"--max-num-seqs "}), ("pagoda bench ", {"latency"})],
)
def test_a_shell_that_asks_gets_commands_and_flags(line: str, expected: set[str], tmp_path: Path) -> None:
    answer = tmp_path / "completions"
    environment = os.environ | {
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_IFS": "\n",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(answer),
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
    }
    command = [sys.executable, "-m", "pagoda"]
    subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, check=True, timeout=240)
    assert expected <= set(answer.read_text().split("\n"))
