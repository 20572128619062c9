"""vLLM's options that mean nothing here: accepted where they ask for nothing, refused with a reason otherwise."""

import argparse

import pytest

from pagoda.cli import make_parser
from pagoda.commands.serve import plan
from pagoda.options.vllm_options import OPTIONS, add_vllm_flags, check_vllm_args, define_vllm_flags
from pagoda_common.errors import ConfigError


def check(*words: str) -> None:
    parser = argparse.ArgumentParser()
    add_vllm_flags(parser)
    check_vllm_args(parser.parse_args(words))


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("-pp", "1"),
        ("--swap-space", "4", "--disable-log-requests", "--compilation-config", '{"level": 3}'),
        ("--show-hidden-metrics-for-version", "0.12", "--enable-metrics"),
        ("-O3", "-cc", "{}", "--structured-outputs-config.backend", "auto", "--stream-interval", "1"),
        ("--distributed-executor-backend", "mp", "--tokenizer-mode", "auto"),
        ("--trust-remote-code",),
    ],
)
def test_what_asks_for_nothing_is_accepted(words: tuple[str, ...]) -> None:
    check(*words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("-pp", "2"), "pipeline_parallel_size=2 is not supported: --tensor-parallel-size N divides every layer"),
        (("--pipeline-parallel-size", "4"), "pipeline_parallel_size=4"),
        (("--lora-dtype=float16",), "lora_dtype=float16 is not supported"),
        (
            ("--limit-mm-per-prompt", '{"image": 1}'),
            "limit_mm_per_prompt=",
        ),
    ],
)
def test_what_asks_for_something_is_refused_with_the_reason(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        check(*words)
    assert caught.value.field in {option.name for option in OPTIONS}


def test_an_option_that_pagoda_has_is_left_alone() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tensor-parallel-size", "-tp", type=int, dest="tensor_parallel_size")
    add_vllm_flags(parser)
    args = parser.parse_args(["-tp", "8"])
    check_vllm_args(args)
    assert args.tensor_parallel_size == 8


def test_what_has_no_effect_is_said_in_one_line() -> None:
    parser = argparse.ArgumentParser()
    add_vllm_flags(parser)
    words = ["--structured-outputs-config.backend", "xgrammar", "--swap-space", "4"]
    idle = check_vllm_args(parser.parse_args(words))
    assert idle.startswith("without effect here: ")
    assert "--structured-outputs-config.backend (one engine (llguidance) handles all structured outputs)" in idle
    assert "--swap-space" in idle
    assert "\n" not in idle
    assert check_vllm_args(parser.parse_args(["--pipeline-parallel-size", "1"])) == ""


def test_serve_refuses_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    args = make_parser().parse_args(["serve", "--pipeline-parallel-size", "2"])
    with pytest.raises(SystemExit) as ended:
        plan(args, args.parser)
    assert ended.value.code == 2
    assert "--pipeline-parallel-size=2 is not supported" in capsys.readouterr().err


def test_an_option_whose_name_is_taken_is_left_out_with_its_short_one() -> None:
    for option in OPTIONS:
        if option.short is None:
            continue
        parser = argparse.ArgumentParser()
        parser.add_argument(option.flags[0], dest="ours")
        added = define_vllm_flags(parser)
        assert option not in added
        assert option.short not in parser._option_string_actions
        assert len(added) == len(OPTIONS) - 1
        parser = argparse.ArgumentParser()
        parser.add_argument(option.short, dest="ours")
        assert define_vllm_flags(parser) == list(OPTIONS)
        assert parser.parse_args([option.short, "x"]).ours == "x"
