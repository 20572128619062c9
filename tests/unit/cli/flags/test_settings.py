"""Flags from command line, file and environment: which one counts, and what is said of a wrong one."""

import argparse
from collections.abc import Mapping
from pathlib import Path

import pytest

from pagoda.cli import make_parser

CONFIG = """
model: some/where
max_model_len: 8k
served-model-name: [a, 7]
--api-key: secret
enable-prefix-caching: false
no-async-scheduling: true
enable_prompt_tokens_details: true
override-generation-config: {temperature: 0.5}
revision: null
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "pagoda.yaml"
    path.write_text(CONFIG)
    return path


def parse(*words: str, environment: Mapping[str, str] | None = None) -> argparse.Namespace:
    parser = make_parser()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pagoda.commands.arguments.CommandParser.environment", environment or {})
        args, unknown = parser.parse_known_args(["serve", *words])
    if unknown:
        args.parser.refuse_unknown(unknown)
    assert isinstance(args, argparse.Namespace)
    return args


def test_a_file_gives_flags_by_their_names_with_dash_or_underscore(config: Path) -> None:
    args = parse("--config", str(config))
    assert (args.model, args.max_model_len) == ("some/where", 8000)
    assert args.served_model_name == ["a", "7"]
    assert args.api_key == ["secret"]
    assert (args.enable_prefix_caching, args.async_scheduling, args.enable_prompt_tokens_details) == (
        False,
        False,
        True,
    )
    assert args.override_generation_config == '{"temperature": 0.5}'
    assert args.revision is None


def test_the_command_line_beats_the_file_beats_the_environment_beats_the_defaults(config: Path) -> None:
    environment = {"PAGODA_MAX_MODEL_LEN": "100", "PAGODA_MAX_NUM_SEQS": "3", "PAGODA_BLOCK_SIZE": "32"}
    args = parse(f"--config={config}", "--block-size", "64", environment=environment)
    assert (args.max_model_len, args.max_num_seqs, args.block_size) == (8000, 3, 64)
    assert args.max_num_batched_tokens == 2048
    assert parse("--config", str(config), "--max-model-len=5").max_model_len == 5
    assert parse("--config", str(config), "--enable-prefix-caching").enable_prefix_caching


def test_a_model_as_first_argument_beats_the_file_and_the_environment(config: Path) -> None:
    for args in (parse("other", "--config", str(config)), parse("other", environment={"PAGODA_MODEL": "third"})):
        assert (args.model_argument, args.model) == ("other", "pagoda-tiny")
    assert parse("--model", "other", "--config", str(config)).model == "other"


def test_variables_hold_switches_and_lists() -> None:
    environment = {
        "PAGODA_ENABLE_PREFIX_CACHING": "No",
        "PAGODA_ALLOW_CREDENTIALS": "1",
        "PAGODA_API_KEY": "a, b,",
        "PAGODA_HOST": "",
        "PAGODA_LOG_LEVEL": "debug",
    }
    args = parse(environment=environment)
    assert (args.enable_prefix_caching, args.allow_credentials) == (False, True)
    assert args.api_key == ["a", "b"]
    assert args.host == "127.0.0.1"


def test_what_kubernetes_sets_for_a_service_called_pagoda_is_no_flag() -> None:
    assert parse(environment={"PAGODA_PORT": "tcp://10.0.0.1:8000"}).port == 8000
    assert parse(environment={"PAGODA_PORT": "9000"}).port == 9000


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("max-modle-len: 5", "unknown key 'max-modle-len'; did you mean max-model-len"),
        ("config: other.yaml", "unknown key 'config'"),
        ("max_model_len: lots", "max_model_len: 'lots' is not a number"),
        ("port: eighty", "port is 'eighty', must be a int"),
        ("port: true", "port is True, must not be true or false"),
        ("dtype: float8", "dtype is 'float8', must be one of auto, float32"),
        ("enable-prefix-caching: 1", "enable-prefix-caching is 1, must be true or false"),
        ("- a\n- b", "must hold a mapping of flags to values, got a list"),
        ("a: [", "cannot read the config file"),
    ],
)
def test_a_wrong_file_ends_the_process_with_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, message: str
) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(content)
    with pytest.raises(SystemExit) as ended:
        parse("--config", str(path))
    printed = capsys.readouterr().err
    assert ended.value.code == 2
    assert message in printed
    assert printed.count("\n") == 1
    assert str(path) in printed


def test_an_empty_file_changes_nothing_and_a_missing_one_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    assert parse("--config", str(tmp_path / "empty.yaml")).port == 8000
    with pytest.raises(SystemExit):
        parse("--config", "/nowhere.yaml")
    assert "cannot read the config file /nowhere.yaml" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("PAGODA_MAX_MODEL_LEN", "lots", "PAGODA_MAX_MODEL_LEN: 'lots' is not a number"),
        ("PAGODA_ENABLE_PREFIX_CACHING", "maybe", "PAGODA_ENABLE_PREFIX_CACHING is 'maybe', must be true or false"),
        ("PAGODA_DTYPE", "float8", "PAGODA_DTYPE is 'float8', must be one of"),
    ],
)
def test_a_wrong_variable_is_named(capsys: pytest.CaptureFixture[str], name: str, value: str, message: str) -> None:
    with pytest.raises(SystemExit):
        parse(environment={name: value})
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--max-modl-len", "5"), "unknown argument '--max-modl-len'; did you mean --max-model-len"),
        (("--max-modl-len=5",), "did you mean --max-model-len"),
        (("--uds", "/tmp/x"), "--uds is not supported: HTTP listens on"),
        (("a", "b"), "unknown argument 'b'"),
        (("--max-model-len", "lots"), "'lots' is not a number"),
        (("--port",), "expected one argument"),
    ],
)
def test_a_wrong_command_line_is_one_line(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(*words)
    printed = capsys.readouterr().err
    assert ended.value.code == 2
    assert printed.startswith("pagoda serve: error: ")
    assert message in printed
    assert printed.count("\n") == 1


def test_options_required_on_the_command_line_may_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "batch.yaml"
    path.write_text("input-file: in.jsonl\noutput_file: out.jsonl\n")
    args = make_parser().parse_args(["run-batch", "--config", str(path)])
    assert (args.input_file, args.output_file) == ("in.jsonl", "out.jsonl")


def test_a_variable_that_is_almost_a_flag_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    parse(environment={"PAGODA_MAX_MODEL_LENGTH": "100", "PAGODA_LOGGING_LEVEL": "INFO", "PAGODA_HOME": "/tmp"})
    said = capsys.readouterr().err
    assert "PAGODA_MAX_MODEL_LENGTH sets nothing; did you mean PAGODA_MAX_MODEL_LEN?" in said
    assert said.count("warning") == 1
