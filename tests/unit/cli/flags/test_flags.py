"""Command line to config and back."""

import argparse
from dataclasses import fields, replace

import pytest

from pagoda_common.config.engine_config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig, SchedulerConfig
from pagoda_common.config.flags.flags import (
    add_engine_flags,
    add_frontend_flags,
    add_serve_flags,
    config_errors,
    engine_config_from_args,
    engine_config_to_argv,
    frontend_config_from_args,
    frontend_config_to_argv,
)
from pagoda_common.config.flags.values import parse_bytes, parse_count
from pagoda_common.config.frontend_config import FrontendConfig
from pagoda_common.config.security_config import SecurityConfig
from pagoda_common.errors import ConfigError

ENGINE = EngineConfig(
    model=ModelConfig(
        model="some/where",
        revision="main",
        tokenizer="other",
        served_model_name=("a", "b"),
        dtype="bfloat16",
        quantization="int4-g32",
        activation_quantization="none",
        device="cuda",
        max_model_len=300,
        load_format="dummy",
        model_impl="pagoda",
        runner="pooling",
        convert="embed",
        pooler_config='{"pooling_type": "MEAN"}',
        hf_overrides='{"is_causal": false}',
        max_logprobs=-1,
        logprobs_mode="processed_logits",
        logits_processors=("some.module:One", "other:Two"),
        reference_kernels=("rms_norm", "all"),
        attention_backend="flashinfer",
        enforce_eager=True,
        generation_config="vllm",
        override_generation_config='{"temperature": 0.5}',
        structured_outputs_config='{"disable_any_whitespace": true}',
        seed=7,
    ),
    cache=CacheConfig(
        block_size=8,
        kv_cache_dtype="int8",
        kv_cache_memory_bytes=1 << 30,
        num_blocks_override=33,
        gpu_memory_utilization=0.5,
        enable_prefix_caching=False,
        kv_events_config='{"enable_kv_cache_events": true}',
        cpu_kv_cache_memory_bytes=4096,
        snapshot_interval=64,
    ),
    scheduler=SchedulerConfig(
        max_num_seqs=3,
        max_num_batched_tokens=512,
        enable_chunked_prefill=False,
        long_prefill_token_threshold=9,
        policy="priority",
        preemption_mode="swap",
        routing_policy="round_robin",
        async_scheduling=False,
        max_num_queued_reqs=5,
        max_num_queued_tokens=6,
        max_queued_share=0.25,
        step_watchdog_s=7.5,
        max_serving_groups=3,
        orphan_lease_s=5.5,
    ),
)


SECURITY = SecurityConfig(
    tls_cert="c.pem",
    tls_key="k.pem",
    tls_ca="ca.pem",
    tls_server_name="scheduler",
    service_token_file="tokens",
    insecure=True,
)


def parse_engine(argv: list[str]) -> EngineConfig:
    parser = argparse.ArgumentParser()
    add_engine_flags(parser)
    return engine_config_from_args(parser.parse_args(argv))


def parse_frontend(argv: list[str]) -> FrontendConfig:
    parser = argparse.ArgumentParser()
    add_frontend_flags(parser)
    return frontend_config_from_args(parser.parse_args(argv))


def test_no_flags_give_the_default_configs() -> None:
    assert parse_engine([]) == EngineConfig()
    assert parse_frontend([]) == FrontendConfig()


def test_every_engine_value_survives_the_way_through_a_command_line() -> None:
    engine = replace(ENGINE, security=SECURITY)
    assert parse_engine(engine_config_to_argv(engine)) == engine
    assert engine_config_to_argv(EngineConfig()) == []


def test_every_engine_field_has_a_flag() -> None:
    default = EngineConfig()
    for part in ("model", "cache", "scheduler"):
        for field in fields(getattr(default, part)):
            assert getattr(getattr(ENGINE, part), field.name) != getattr(getattr(default, part), field.name), field.name


def test_every_frontend_field_has_a_flag() -> None:
    parser = argparse.ArgumentParser()
    add_frontend_flags(parser)
    flags = set(vars(parser.parse_args([])))
    assert {field.name for field in fields(FrontendConfig)} - {"security", "observability"} <= flags
    assert {field.name for field in fields(SecurityConfig)} - {"service_token"} <= flags


def test_frontend_values_survive_the_way_through_a_command_line() -> None:
    config = FrontendConfig(
        scheduler="10.0.0.1:7",
        host="0.0.0.0",
        port=0,
        grpc_port=0,
        model="m",
        served_model_name=("x", "y"),
        api_key=("-k1", "[k2]"),
        api_key_file="keys",
        operator_key=("-k3",),
        operator_key_file="operators",
        allowed_weights=("/models", "org/model"),
        allowed_hosts=("pagoda.test",),
        forwarded_allow_ips=("10.0.0.0/8", "::1"),
        prefix_cache_isolation="tenant",
        allowed_origins=("*",),
        allowed_methods=("GET", "POST"),
        allow_credentials=True,
        uvicorn_log_level="warning",
        enable_tokenizer_info_endpoint=True,
        h11_max_header_count=12,
        ssl_keyfile="key.pem",
        ssl_certfile="certificate.pem",
        max_stored_responses=0,
        enable_prompt_tokens_details=True,
        trust_request_chat_template=True,
        enable_auto_tool_choice=True,
        tool_call_parser="hermes",
        tool_parser_plugin="tools.py",
        reasoning_parser="qwen3",
        reasoning_parser_plugin="reasoning.py",
        drain_timeout_s=1.5,
        max_request_body_bytes=99,
        sse_keep_alive_interval_s=0.0,
        send_timeout_s=7.5,
        recovery_timeout_s=2.5,
        keep_alive_timeout_s=65,
        disable_uvicorn_access_log=True,
        grpc_host="10.0.0.2",
        security=SECURITY,
    )
    assert parse_frontend(frontend_config_to_argv(config)) == config


def test_several_values_may_come_as_a_json_list() -> None:
    assert parse_frontend(["--allowed-origins", '["https://a", "https://b"]']).allowed_origins == (
        "https://a",
        "https://b",
    )
    assert parse_frontend(["--allowed-origins", "https://a", "https://b"]).allowed_origins == ("https://a", "https://b")
    assert parse_frontend(["--api-key", "[1]"]).api_key == ("[1]",)
    assert parse_frontend(["--api-key", "[x"]).api_key == ("[x",)


def test_serve_flags_fill_both_configs() -> None:
    parser = argparse.ArgumentParser()
    add_serve_flags(parser)
    args = parser.parse_args(["here", "--port", "1234", "--max-num-seqs", "4", "--max-logprobs=-1"])
    engine, frontend = engine_config_from_args(args), frontend_config_from_args(args)
    assert (engine.model.model, engine.scheduler.max_num_seqs, engine.model.max_logprobs) == ("here", 4, -1)
    assert (frontend.model, frontend.port, frontend.max_logprobs) == ("here", 1234, -1)


def test_serve_flags_say_how_many_workers_start_and_the_scheduler_is_not_told() -> None:
    parser = argparse.ArgumentParser()
    add_serve_flags(parser)
    engine = engine_config_from_args(parser.parse_args(["-dp", "2", "-tp", "4", "--threads", "3"]))
    assert engine.parallel == ParallelConfig(data_parallel_size=2, tensor_parallel_size=4, threads=3)
    assert engine_config_to_argv(engine) == []
    with pytest.raises(ConfigError, match="data_parallel_size is 0, must be at least 1"):
        engine_config_from_args(parser.parse_args(["--data-parallel-size=0"]))


def test_a_model_given_twice_must_be_the_same() -> None:
    assert parse_engine(["m", "--model", "m"]).model.model == "m"
    with pytest.raises(ConfigError, match="given twice"):
        parse_engine(["m", "--model", "n"])


@pytest.mark.parametrize(
    ("text", "tokens"), [("8192", 8192), ("8k", 8000), ("8K", 8192), ("1.5k", 1500), ("1M", 1 << 20), ("2m", 2_000_000)]
)
def test_counts_take_decimal_and_binary_suffixes(text: str, tokens: int) -> None:
    assert parse_count(text) == tokens


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("0", 0), ("100B", 100), ("512M", 512 << 20), ("512MiB", 512 << 20), ("2GB", 2 * 10**9), ("1.5GiB", 3 << 29)],
)
def test_sizes_take_the_usual_suffixes(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "x", "-5", "8kk", "1e9", "5 apples", "nan"])
def test_other_text_is_no_quantity(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        parse_bytes(text)


@pytest.mark.parametrize("text", ["-1", "auto"])
def test_max_model_len_may_be_what_fits(text: str) -> None:
    model = parse_engine([f"--max-model-len={text}"]).model
    assert (model.fits_max_model_len, model.fixed_max_model_len) == (True, None)
    without_chunks = parse_engine([f"--max-model-len={text}", "--no-enable-chunked-prefill"])
    assert without_chunks.scheduler.max_num_batched_tokens >= 1024  # the checkpoint's


@pytest.mark.parametrize(
    ("text", "name"),
    [("FLASH_ATTN", "flash_attn"), ("FlashInfer", "flashinfer"), ("TRITON_ATTN", "triton"), ("triton", "triton")],
)
def test_attention_may_have_the_names_of_vllm(text: str, name: str) -> None:
    assert parse_engine(["--attention-backend", text]).model.attention_backend == name


def test_activations_are_quantized_unless_none_are_asked_for() -> None:
    assert parse_engine([]).model.activation_quantization == "auto"
    assert parse_engine(["--activation-quantization", "none"]).model.activation_quantization == "none"


def test_it_may_be_asked_for_where_it_has_no_effect() -> None:
    for others in (["--device", "cuda"], ["--dtype", "float32"], []):
        assert parse_engine(["--activation-quantization", "none", *others]).model.activation_quantization == "none"


def test_a_config_names_the_choices_of_activation_quantization() -> None:
    with pytest.raises(ConfigError, match="activation_quantization is 'int8', must be one of auto, none") as caught:
        ModelConfig(activation_quantization="int8")  # type: ignore[arg-type]  # no choice: that is the test
    assert caught.value.field == "activation_quantization"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--max-num-seqs", "0"], ["--max-num-seqs", "0", "between 1 and 65535"]),
        (["--gpu-memory-utilization", "nan"], ["--gpu-memory-utilization", "nan", "(0, 1]"]),
        (["--dtype", "int3"], ["--dtype", "int3", "float32"]),
        (["--block-size", "many"], ["--block-size", "many"]),
        (["--kv-cache-dtype", "fp8_e5m2"], ["--kv-cache-dtype", "fp8_e5m2", "int8", "fp8"]),
        (["--kv-cache-dtype", "fp8", "--device", "cpu"], ["--kv-cache-dtype", "fp8", "auto or int8 on a CPU"]),
        (
            ["--attention-backend", "xformers"],
            ["--attention-backend", "xformers", "triton", "flashinfer", "flash_attn"],
        ),
        (["--activation-quantization", "int8"], ["--activation-quantization", "int8", "auto", "none"]),
        (["--attention-backend", "triton", "--device", "cpu"], ["--attention-backend", "triton", "auto on a CPU"]),
        (["--kv-cache-memory", "lots"], ["--kv-cache-memory", "lots", "512M"]),
        (
            ["--no-enable-chunked-prefill", "--max-model-len=4k", "--max-num-batched-tokens=1k"],
            ["--max-num-batched-tokens", "1000", "4000"],
        ),
    ],
)
def test_a_wrong_value_ends_with_code_2_and_names_field_value_and_bound(
    argv: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    parser = argparse.ArgumentParser(prog="pagoda-scheduler")
    add_engine_flags(parser)
    with pytest.raises(SystemExit) as ended, config_errors(parser):
        engine_config_from_args(parser.parse_args(argv))
    assert ended.value.code == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert all(word in message for word in words), message
