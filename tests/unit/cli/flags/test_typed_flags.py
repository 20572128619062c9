"""Flags as users type them: underscores, vLLM's values, and messages in their own words."""

import socket

import pytest

from pagoda.cli import make_parser
from pagoda.commands.serve import plan
from pagoda.options.llm_options import engine_config_from_options
from pagoda_common.config.flags.flags import engine_config_from_args
from pagoda_common.config.flags.words import as_typed, dashed


def test_underscores_are_dashes_but_in_values_and_known_flags() -> None:
    words, typed = dashed(["--max_model_len=a_b", "--odd_one", "x_y", "--", "--p_q"], {"--odd_one"})
    assert words == ["--max-model-len=a_b", "--odd_one", "x_y", "--", "--p_q"]
    assert typed == {"--max-model-len": "--max_model_len"}
    assert as_typed("--max-model-len is 0, no --max-model-len-x", typed) == "--max_model_len is 0, no --max-model-len-x"


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["--one.a", "1", "-x"], ["-x", '--one={"a": 1}']),
        (["--one.a_b=c d", "--one.d.e", "true"], ['--one={"a_b": "c d", "d": {"e": true}}']),
        (["--one.a", "--two.b", "[1]"], ['--one={"a": true}', '--two={"b": [1]}']),
        (["--one", '{"a": 1, "b": 2}', "--one.b", "3"], ["--one", '{"a": 1, "b": 2}', '--one={"a": 1, "b": 3}']),
        (["--one.known", "x", "--three.a", "1"], ["--one.known", "x", "--three.a", "1"]),
        (["--one.a", "1", "--", "--one.b", "2"], ['--one={"a": 1}', "--", "--one.b", "2"]),
    ],
)
def test_keys_after_dots_are_an_object(words: list[str], wanted: list[str]) -> None:
    assert dashed(words, {"--one", "--two", "--one.known"})[0] == wanted


def test_objects_of_vllms_commands_are_read() -> None:
    words = ["--speculative_config.method", "ngram", "--speculative-config.num_speculative_tokens=3"]
    words += ["--structured-outputs-config.disable_any_whitespace", "true"]
    engine = engine_config_from_args(make_parser().parse_args(["serve", *words]))
    assert engine.speculative.num_speculative_tokens == 3
    assert engine.model.structured_outputs_config == '{"disable_any_whitespace": true}'


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["serve", "--max_num_seqs", "0"], "error: --max_num_seqs is 0, must be between 1 and 65535"),
        (["serve", "--max-num-seqs", "0"], "error: --max-num-seqs is 0, must be between 1 and 65535"),
        (["serve", "--block_size", "x"], "argument --block_size: invalid int value: 'x'"),
        (["serve", "--kv_cache_memory=-1"], "--kv_cache_memory"),
        (["serve", "--speculative_config", '{"model": "m", "num_speculative_tokens": 2}'], "is not supported"),
        (["srve"], "there is no command 'srve'; did you mean serve?"),
        (["bench", "latncy"], "there is no command 'latncy'; did you mean latency?"),
        (["serve", "-tp", "7"], "error: -tp is 7"),
        (["serve", "-tp=7"], "error: -tp is 7"),
        (["serve", "--kv_cache_memory_bytes=1", "--max_num_seqs", "0"], "--max_num_seqs is 0"),
    ],
)
def test_a_message_names_what_was_typed(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    def parse() -> None:
        args = make_parser().parse_args(words)
        plan(args, args.parser)

    with pytest.raises(SystemExit) as ended:
        parse()
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("given", "dtype"), [("half", "float16"), ("float", "float32"), ("bfloat16", "bfloat16")])
def test_data_types_have_vllms_other_names(given: str, dtype: str) -> None:
    args = make_parser().parse_args(["serve", "--dtype", given])
    assert engine_config_from_args(args).model.dtype == dtype == engine_config_from_options(dtype=given).model.dtype


def test_a_load_format_has_vllms_other_name() -> None:
    args = make_parser().parse_args(["serve", "--load-format", "hf"])
    assert engine_config_from_args(args).model.load_format == "auto"
    assert engine_config_from_options(load_format="hf").model.load_format == "auto"


def test_without_chunked_prefill_a_prompt_fits_a_step() -> None:
    for words, budget in ((["--max-model-len", "9000"], 9000), ([], 2048)):
        args = make_parser().parse_args(["serve", "--no-enable-chunked-prefill", *words])
        assert engine_config_from_args(args).scheduler.max_num_batched_tokens == budget
    config = engine_config_from_options(enable_chunked_prefill=False, max_model_len=9000)
    assert config.scheduler.max_num_batched_tokens == 9000


def test_a_taken_port_for_grpc_is_another_one_unless_it_was_named(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        args = make_parser().parse_args(["serve", "--port", "0"])
        args.grpc_port = port  # as if it were the default
        assert plan(args, args.parser).frontend.grpc_port not in (0, port)
        named = make_parser().parse_args(["serve", "--port=0", f"--grpc_port={port}"])
        with pytest.raises(SystemExit):
            plan(named, named.parser)
    assert f"--grpc_port is {port}, must be free" in capsys.readouterr().err
