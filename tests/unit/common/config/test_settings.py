"""A service that stands alone takes flags from the environment; a child of ``pagoda serve`` does not."""

import argparse

import pytest

from pagoda_common.config.flags.flags import add_child_flags, add_engine_flags, add_listen_flags
from pagoda_common.config.flags.settings import ServiceParser, parse_service_args


@pytest.fixture
def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    add_listen_flags(parser, port=50052)
    add_child_flags(parser)
    add_engine_flags(parser)
    return parser


def test_the_environment_sets_flags_and_the_command_line_beats_it(parser: argparse.ArgumentParser) -> None:
    environment = {
        "PAGODA_HOST": "0.0.0.0",
        "PAGODA_MAX_NUM_SEQS": "7",
        "PAGODA_MODEL": "of-environment",
        "PAGODA_NO_ASYNC_SCHEDULING": "true",
        "PAGODA_SERVED_MODEL_NAME": "a, b",
        "PAGODA_PORT": "tcp://10.0.0.1:8000",  # of a Kubernetes Service called pagoda
        "PAGODA_DIE_WITH_PARENT": "1",
    }
    args = parse_service_args(parser, ["of-command-line", "--max-num-seqs", "9"], environment)
    assert (args.host, args.port, args.max_num_seqs) == ("0.0.0.0", 50052, 9)
    assert (args.model_argument, args.async_scheduling) == ("of-command-line", False)
    assert args.model != "of-environment"
    assert list(args.served_model_name) == ["a", "b"]
    assert args.die_with_parent is None


def test_a_child_takes_only_what_its_parent_hands_it(parser: argparse.ArgumentParser) -> None:
    args = parse_service_args(parser, ["--die-with-parent", "1"], {"PAGODA_PORT": "1234", "PAGODA_HOST": "0.0.0.0"})
    assert (args.host, args.port) == ("127.0.0.1", 50052)


def test_a_wrong_value_ends_the_process(parser: argparse.ArgumentParser, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_service_args(parser, [], {"PAGODA_MAX_NUM_SEQS": "many"})
    assert ended.value.code == 2
    assert "PAGODA_MAX_NUM_SEQS" in capsys.readouterr().err


def test_an_empty_variable_sets_nothing(parser: argparse.ArgumentParser) -> None:
    environment = {"PAGODA_PORT": "", "PAGODA_MAX_NUM_SEQS": "", "PAGODA_NO_ASYNC_SCHEDULING": "", "PAGODA_HOST": ""}
    args = parse_service_args(parser, [], environment)
    assert (args.host, args.port, args.async_scheduling) == ("127.0.0.1", 50052, True)


def test_an_error_of_a_service_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    parser = ServiceParser(prog="pagoda-worker")
    parser.add_argument("--max-num-seqs", type=int)
    for words, environment in ((["--max-num-seqs", "x"], {}), (["--no-such"], {}), ([], {"PAGODA_MAX_NUM_SEQS": "x"})):
        with pytest.raises(SystemExit) as ended:
            parse_service_args(parser, words, environment)
        assert ended.value.code == 2
        text = capsys.readouterr().err
        assert text.startswith("pagoda-worker: error: ")
        assert text.count("\n") == 1
    with pytest.raises(SystemExit):
        parser.error("two\nlines")
    assert capsys.readouterr().err == "pagoda-worker: error: two lines\n"
