"""Names of vLLM: each is where programs import it from, and is the very object of `pagoda`."""

import os
import socket
import subprocess
import sys
from dataclasses import asdict
from importlib import import_module

import pytest

import pagoda
from pagoda.config import PoolerConfig
from pagoda.lora.request import LoRARequest
from pagoda.options.llm_options import engine_config_from_options
from pagoda.utils import Counter, FlexibleArgumentParser, get_open_port, random_uuid
from pagoda.utils.print_utils import print_embeddings
from pagoda_common.config.pooler_config import pooler_config
from pagoda_common.errors import ConfigError
from pagoda_common.process.children import GRPC_ENVIRONMENT

HOMES = {
    "pagoda.sampling_params": ["SamplingParams", "BeamSearchParams", "RequestOutputKind", "StructuredOutputsParams"],
    "pagoda.pooling_params": ["PoolingParams"],
    "pagoda.outputs": ["RequestOutput", "CompletionOutput", "EmbeddingRequestOutput", "EmbeddingOutput"],
    "pagoda.inputs": ["TextPrompt", "TokensPrompt", "PromptType"],
    "pagoda.engine.arg_utils": ["EngineArgs", "AsyncEngineArgs"],
    "pagoda.engine.async_llm_engine": ["AsyncLLMEngine"],
    "pagoda.engine.llm_engine": ["LLMEngine"],
    "pagoda.entrypoints.llm": ["LLM"],
    "pagoda.v1.engine.async_llm": ["AsyncLLM"],
    "pagoda.v1.engine.llm_engine": ["LLMEngine"],
}


def test_a_pooler_config_may_be_an_object_of_vllms_name() -> None:
    given = PoolerConfig(task="token_classify", seq_pooling_type="LAST", returned_token_ids=(1, 2))
    for value in (given, asdict(given), given.to_json()):
        config = engine_config_from_options(pooler_config=value)
        read = pooler_config(config.model.pooler_config)
        assert (read.task, read.pooling_type, read.returned_token_ids) == ("token_classify", "last", (1, 2))
    assert pagoda.EngineArgs(pooler_config=given).create_engine_config().model.pooler_config
    with pytest.raises(ConfigError, match="pooling_type 'MEDIAN', must be one of"):
        PoolerConfig(pooling_type="MEDIAN")


@pytest.mark.parametrize("module", HOMES)
def test_a_name_is_the_same_object_everywhere(module: str) -> None:
    for name in HOMES[module]:
        assert getattr(import_module(module), name) is getattr(pagoda, name)


def test_every_public_name_is_there() -> None:
    assert [name for name in pagoda.__all__ if not hasattr(pagoda, name)] == []
    assert pagoda.AsyncLLMEngine is pagoda.AsyncLLM


def test_the_engine_sets_what_grpc_reads_whichever_path_it_comes_by() -> None:
    code = "import os, pagoda.entrypoints.llm; print(os.environ['GRPC_EXPERIMENTS'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "event_engine" in done.stdout


@pytest.mark.parametrize(
    ("module", "command"),
    [
        ("pagoda.entrypoints.openai.api_server", "pagoda serve"),
        ("pagoda.entrypoints.openai.run_batch", "pagoda run-batch"),
        ("pagoda.entrypoints.cli.main", "pagoda"),
    ],
)
def test_modules_that_vllm_runs_are_commands(module: str, command: str) -> None:
    done = subprocess.run([sys.executable, "-m", module, "--nonsense"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert f"see {command} --help" in done.stderr or f"usage: {command} " in done.stderr


def test_flags_may_be_typed_with_underscores() -> None:
    parser = pagoda.EngineArgs.add_cli_args(FlexibleArgumentParser())
    args = parser.parse_args(["--model", "other", "--max_model_len=64", "--tensor_parallel_size", "2"])
    assert (
        pagoda.EngineArgs.from_cli_args(args).keywords()
        | {
            "model": "other",
            "max_model_len": 64,
            "tensor_parallel_size": 2,
        }
        == pagoda.EngineArgs.from_cli_args(args).keywords()
    )


def test_all_parsed_flags_are_arguments_of_llm() -> None:
    args = vars(pagoda.EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args([]))
    config = import_module("pagoda.options.llm_options").engine_config_from_options(**args)
    assert config.model.model == "pagoda-tiny"


def test_a_long_vector_is_printed_by_its_beginning(capsys: pytest.CaptureFixture[str]) -> None:
    print_embeddings([0.5, -1.0, 2.0, 3.0, 4.0], prefix="A")
    print_embeddings([0.5])
    assert capsys.readouterr().out == "A: [0.5, -1.0, 2.0, 3.0, ...] (size=5)\nEmbeddings: [0.5] (size=1)\n"


def test_helpers_do_what_their_names_say() -> None:
    assert len({random_uuid(), random_uuid()}) == 2
    counter = Counter(3)
    assert [next(counter), next(counter)] == [3, 4]
    adapter = LoRARequest("style", 1, "/adapters/style")
    assert (adapter.name, adapter.adapter_id, adapter.path) == ("style", 1, "/adapters/style")
    with pytest.raises(ValueError, match="lora_int_id is 0"):
        LoRARequest("style", 0, "")
    with pytest.raises(AttributeError, match="module 'pagoda' has no attribute 'Nothing'"):
        _ = pagoda.Nothing
    with socket.create_server(("127.0.0.1", get_open_port())) as server:
        assert server.getsockname()[1] > 0


@pytest.mark.parametrize("name", ["LLM", "LLMEngine", "AsyncLLM", "AsyncLLMEngine", "SamplingParams"])
def test_an_engine_sets_how_grpc_reads_unless_that_is_set(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    [(variable, value)] = GRPC_ENVIRONMENT.items()
    monkeypatch.setenv(variable, "mine")
    getattr(pagoda, name)
    assert os.environ[variable] == "mine"
    monkeypatch.delenv(variable)
    getattr(pagoda, name)
    assert os.environ.get(variable) == (None if name == "SamplingParams" else value)
