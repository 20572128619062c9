"""What every command but those that serve does without flags: each default, and each flag's name."""

import argparse
import math
from typing import Any

import pytest

from pagoda.cli import make_parser
from pagoda.commands.serve import EXAMPLE_QUESTION

DATASET = {
    "dataset_name": "random",
    "dataset_path": None,
    "random_range_ratio": 0.0,
    "random_prefix_len": 0,
    "random_input_len": 1024,
    "random_output_len": 128,
    "sharegpt_output_len": None,
    "custom_output_len": 256,
    "sonnet_input_len": 550,
    "sonnet_output_len": 150,
    "sonnet_prefix_len": 200,
    "hf_output_len": 256,
    "skip_chat_template": False,
    "disable_shuffle": False,
    "no_oversample": False,
}
SERVER = {
    "backend": "openai",
    "base_url": None,
    "host": "127.0.0.1",
    "port": 8000,
    "endpoint": None,
    "model": None,
    "served_model_name": None,
    "tokenizer": None,
    "trust_remote_code": False,
    "tokenizer_mode": "auto",
    "api_key": None,
    "header": [],
    "ready_check_timeout_sec": 600.0,
}
LOAD = {
    "num_prompts": 1000,
    "num_warmups": 0,
    "request_rate": math.inf,
    "burstiness": 1.0,
    "max_concurrency": None,
    "seed": 0,
    "ignore_eos": False,
    "temperature": None,
    "top_p": None,
    "top_k": None,
    "min_p": None,
    "frequency_penalty": None,
    "presence_penalty": None,
    "repetition_penalty": None,
    "extra_body": None,
}
REPORT = {
    "percentile_metrics": "ttft,tpot,itl",
    "metric_percentiles": "99",
    "goodput": [],
    "label": None,
    "save_result": False,
    "save_detailed": False,
    "append_result": False,
    "result_dir": None,
    "result_filename": None,
    "metadata": [],
    "disable_tqdm": False,
}
TALK = {
    "url": "http://127.0.0.1:8000/v1",
    "model_name": None,
    "api_key": None,
    "quick": None,
    "max_tokens": None,
    "temperature": None,
    "top_p": None,
    "seed": None,
}
VIEW = {"url": "http://127.0.0.1:8000", "scheduler": None, "interval": 1.0, "once": False}
LATENCY = {
    "input_len": 32,
    "output_len": 128,
    "batch_size": 8,
    "n": 1,
    "num_iters_warmup": 10,
    "num_iters": 30,
    "use_beam_search": False,
    "output_json": None,
    "disable_tqdm": False,
}
THROUGHPUT = {"num_prompts": 1000, "n": 1, "output_json": None, "disable_tqdm": False, "seed": 0}
BATCH = {"input_file": "in", "output_file": "out", "url": None, "max_concurrency": 256, "disable_tqdm": False}


def parsed(line: str) -> dict[str, Any]:
    args: argparse.Namespace = make_parser().parse_args(line.split())
    return {name: value for name, value in vars(args).items() if name not in ("command", "parser", "config")}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("bench serve", SERVER | DATASET | LOAD | REPORT),
        ("chat", TALK | {"system_prompt": None}),
        ("complete", TALK),
    ],
)
def test_a_command_for_a_running_server_has_these_flags_alone(line: str, expected: dict[str, Any]) -> None:
    assert parsed(line) == expected


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("top", VIEW),
        ("bench latency", LATENCY),
        ("bench throughput", DATASET | THROUGHPUT),
        ("run-batch -i in -o out", BATCH | {"port": 0, "grpc_port": 0}),
        ("demo", {"prompt": EXAMPLE_QUESTION, "max_tokens": 200, "port": 0, "grpc_port": 0}),
    ],
)
def test_a_command_with_flags_of_an_engine_has_these_of_its_own(line: str, expected: dict[str, Any]) -> None:
    found = parsed(line)
    assert {name: found.get(name, "missing") for name in expected} == expected


def test_short_and_second_names_mean_the_same() -> None:
    lengths = parsed("bench serve --input-len 3 --output-len 4")
    assert (lengths["random_input_len"], lengths["random_output_len"]) == (3, 4)
    assert parsed("chat --model-name m")["model_name"] == parsed("chat --model m")["model_name"] == "m"
    assert parsed("complete -q hello")["quick"] == parsed("complete --quick hello")["quick"] == "hello"
    files = parsed("run-batch --input-file a --output-file b")
    assert (files["input_file"], files["output_file"]) == ("a", "b")


def test_numbers_of_sampling_are_whole_only_where_they_must_be() -> None:
    args = parsed('bench serve --top-k 5 --top-p 0.5 --temperature 0.25 --min-p 0.125 --extra-body {"a":[1]}')
    assert (args["top_k"], args["top_p"], args["temperature"], args["min_p"]) == (5, 0.5, 0.25, 0.125)
    assert args["extra_body"] == {"a": [1]}
    with pytest.raises(SystemExit):
        parsed("bench serve --top-k 0.5")
