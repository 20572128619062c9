"""Every bounded field takes its bounds and refuses what lies beyond them, with the field's name."""

import argparse
import math
from dataclasses import fields
from typing import Any

import pytest

from pagoda_common.config.engine_config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig, SchedulerConfig
from pagoda_common.config.flags.flags import add_observability_flags, add_security_flags
from pagoda_common.config.frontend_config import FrontendConfig
from pagoda_common.config.observability_config import ObservabilityConfig
from pagoda_common.config.security_config import SecurityConfig
from pagoda_common.errors import ConfigError

BOUNDS: list[tuple[type, str, tuple[Any, ...], tuple[Any, ...]]] = [
    (ModelConfig, "max_model_len", (None, -1, 1, 10**9), (0, -2)),
    (ModelConfig, "max_logprobs", (-1, 0, 20), (-2,)),
    (ModelConfig, "logits_processors", ((), ("a:B",), ("a.b:C", "d:E")), (("a",), ("a:",), (":B",), ("a:B", "c"))),
    (CacheConfig, "block_size", (1, 256), (0, 257)),
    (CacheConfig, "kv_cache_memory_bytes", (None, 1), (0, -1)),
    (CacheConfig, "num_blocks_override", (None, 1), (0,)),
    (CacheConfig, "gpu_memory_utilization", (0.01, 1, 1.0), (0, 1.01, math.nan)),
    (CacheConfig, "cpu_kv_cache_memory_bytes", (0, 1), (-1,)),
    (CacheConfig, "snapshot_interval", (1, 512), (0, -1)),
    (SchedulerConfig, "max_num_seqs", (1, 65535), (0, 65536)),
    (SchedulerConfig, "max_num_batched_tokens", (1, 2**20), (0,)),
    (SchedulerConfig, "long_prefill_token_threshold", (0, 1), (-1,)),
    (SchedulerConfig, "step_watchdog_s", (0, 0.5), (-0.1,)),
    (SchedulerConfig, "orphan_lease_s", (0, 0.5), (-0.1,)),
    (SchedulerConfig, "max_serving_groups", (None, 1), (0,)),
    (SchedulerConfig, "max_num_queued_reqs", (0, 1), (-1,)),
    (SchedulerConfig, "max_num_queued_tokens", (0, 1), (-1,)),
    (SchedulerConfig, "max_queued_share", (0.001, 1), (0, 1.001, -1, math.nan)),
    (ParallelConfig, "tensor_parallel_size", (1, 8), (0,)),
    (ParallelConfig, "data_parallel_size", (1, 8), (0,)),
    (ParallelConfig, "standby_workers", (0, 1), (-1,)),
    (ParallelConfig, "threads", (None, 1), (0,)),
    (FrontendConfig, "port", (0, 65535), (-1, 65536)),
    (FrontendConfig, "grpc_port", (0, 65535), (-1, 65536)),
    (FrontendConfig, "max_logprobs", (-1, 0), (-2,)),
    (FrontendConfig, "drain_timeout_s", (0, 0.5), (-0.1,)),
    (FrontendConfig, "recovery_timeout_s", (0, 0.5), (-0.1,)),
    (FrontendConfig, "max_request_body_bytes", (1,), (0,)),
    (FrontendConfig, "max_request_values", (1,), (0,)),
    (FrontendConfig, "max_unadmitted_bytes", (1,), (0,)),
    (FrontendConfig, "send_timeout_s", (0, 0.5), (-0.1,)),
    (FrontendConfig, "keep_alive_timeout_s", (1,), (0,)),
    (FrontendConfig, "sse_keep_alive_interval_s", (0, 0.5), (-0.1,)),
    (FrontendConfig, "h11_max_incomplete_event_size", (1024,), (1023,)),
    (FrontendConfig, "h11_max_header_count", (1,), (0,)),
    (FrontendConfig, "max_log_len", (None, 0), (-1,)),
    (FrontendConfig, "max_stored_responses", (0, 1), (-1,)),
    (FrontendConfig, "scheduler", ("localhost:1", "127.0.0.1:50052"), ("localhost", ":1", "localhost:x")),
]
SHORT = {
    "drain_timeout_s": "drain_timeout",
    "recovery_timeout_s": "recovery_timeout",
    "send_timeout_s": "send_timeout",
    "keep_alive_timeout_s": "keep_alive_timeout",
    "sse_keep_alive_interval_s": "sse_keep_alive_interval",
}
"""Names in messages, where they are the flag's."""


@pytest.mark.parametrize(
    ("config", "name", "good", "bad"), BOUNDS, ids=[f"{config.__name__}.{name}" for config, name, *_ in BOUNDS]
)
def test_a_field_takes_its_bounds_and_nothing_beyond(
    config: type, name: str, good: tuple[Any, ...], bad: tuple[Any, ...]
) -> None:
    for value in good:
        assert getattr(config(**{name: value}), name) == value
    for value in bad:
        with pytest.raises(ConfigError) as caught:
            config(**{name: value})
        assert caught.value.field == SHORT.get(name, name), value


def test_every_number_of_a_config_is_in_the_table_of_bounds() -> None:
    tested = {(config, name) for config, name, *_ in BOUNDS}
    for config in (ModelConfig, CacheConfig, SchedulerConfig, ParallelConfig, FrontendConfig):
        for each in fields(config):
            is_number = isinstance(each.default, int | float) and not isinstance(each.default, bool)
            assert not is_number or (config, each.name) in tested or each.name == "seed", each.name


@pytest.mark.parametrize(
    ("config", "name"),
    [
        *((ModelConfig, name) for name in ("dtype", "activation_quantization", "device", "load_format")),
        *((ModelConfig, name) for name in ("attention_backend", "logprobs_mode", "quantization")),
        (CacheConfig, "kv_cache_dtype"),
        *((SchedulerConfig, name) for name in ("preemption_mode", "routing_policy")),
    ],
)
def test_a_field_with_choices_refuses_others(config: type, name: str) -> None:
    with pytest.raises(ConfigError, match="nonsense") as caught:
        config(**{name: "nonsense"})
    assert caught.value.field == name


def test_a_scheduling_policy_is_refused_by_the_name_of_its_flag() -> None:
    with pytest.raises(ConfigError, match="scheduling_policy is 'nonsense', must be one of fcfs, priority, fair"):
        SchedulerConfig(policy="nonsense")  # type: ignore[arg-type]  # no choice: that is the test


@pytest.mark.parametrize("config", [ModelConfig, FrontendConfig])
def test_a_model_must_be_named_and_overrides_must_be_an_object(config: type) -> None:
    for name, value in (("model", ""), ("override_generation_config", "[1]"), ("override_generation_config", "{")):
        with pytest.raises(ConfigError) as caught:
            config(**{name: value})
        assert caught.value.field == name


def test_events_of_the_cache_must_be_an_object() -> None:
    with pytest.raises(ConfigError):
        CacheConfig(kv_events_config="[1]")


def test_without_chunks_a_step_holds_the_longest_prompt() -> None:
    def config(num_tokens: int, *, is_chunked: bool = False) -> EngineConfig:
        scheduler = SchedulerConfig(max_num_batched_tokens=num_tokens, enable_chunked_prefill=is_chunked)
        return EngineConfig(model=ModelConfig(max_model_len=100), scheduler=scheduler)

    config(100)
    config(99, is_chunked=True)
    with pytest.raises(ConfigError, match="max_num_batched_tokens is 99, must be at least max_model_len"):
        config(99)


def test_what_a_cpu_lacks_is_refused_on_a_cpu_alone() -> None:
    for device in ("auto", "cuda"):
        EngineConfig(model=ModelConfig(device=device), cache=CacheConfig(kv_cache_dtype="fp8"))  # type: ignore[arg-type]  # a str
        EngineConfig(model=ModelConfig(device=device, attention_backend="triton"))  # type: ignore[arg-type]  # a str
    EngineConfig(model=ModelConfig(device="cpu"), cache=CacheConfig(kv_cache_dtype="int8"))
    with pytest.raises(ConfigError, match="attention_backend"):
        EngineConfig(model=ModelConfig(device="cpu", attention_backend="triton"))


def test_ports_of_a_frontend_differ_unless_they_are_free_ones() -> None:
    FrontendConfig(port=0, grpc_port=0)
    with pytest.raises(ConfigError, match="grpc_port is 9, must be another one than port"):
        FrontendConfig(port=9, grpc_port=9)


def test_fields_that_need_each_other_are_refused_alone() -> None:
    tls = SecurityConfig(tls_cert="c", tls_key="k", tls_ca="a")
    FrontendConfig(ssl_certfile="c", ssl_keyfile="k", ssl_ca_certs="a")
    FrontendConfig(ssl_ca_certs="a", security=tls)
    FrontendConfig(enable_auto_tool_choice=True, tool_call_parser="hermes")
    for alone in ({"ssl_keyfile": "k"}, {"ssl_ca_certs": "a"}, {"enable_auto_tool_choice": True}):
        (name,) = alone
        with pytest.raises(ConfigError) as caught:
            FrontendConfig(**alone)  # type: ignore[arg-type]  # of several types
        assert caught.value.field == name


def test_public_grpc_shows_the_certificate_of_https_or_else_the_service_s() -> None:
    tls = SecurityConfig(tls_cert="tc", tls_key="tk", tls_ca="ta", insecure=True)
    own = FrontendConfig(ssl_certfile="sc", ssl_keyfile="sk", ssl_ca_certs="sa", security=tls).public_grpc
    assert (own.cert_file, own.key_file, own.client_ca_file, own.insecure) == ("sc", "sk", "sa", True)
    assert FrontendConfig(ssl_certfile="sc", security=tls).public_grpc.key_file == "sc", "key and chain in one file"
    service = FrontendConfig(security=tls).public_grpc
    assert (service.cert_file, service.key_file, service.client_ca_file) == ("tc", "tk", None)
    plain = FrontendConfig().public_grpc
    assert (plain.cert_file, plain.key_file, plain.insecure) == (None, None, False)
    assert "--ssl-certfile" in plain.advice


def test_everything_is_off_that_opens_a_door() -> None:
    frontend, security, observability = FrontendConfig(), SecurityConfig(), ObservabilityConfig()
    for name in (
        "trust_request_chat_template",
        "enable_auto_tool_choice",
        "allow_credentials",
        "enable_log_requests",
        "enable_tokenizer_info_endpoint",
        "enable_sleep_mode",
        "disable_fastapi_docs",
        "disable_status_page",
        "disable_uvicorn_access_log",
        "enable_prompt_tokens_details",
        "enable_force_include_usage",
        "enable_request_id_headers",
        "return_tokens_as_token_ids",
    ):
        assert getattr(frontend, name) is False, name
    assert (frontend.allowed_origins, frontend.api_key) == ((), ())
    assert security.insecure is False
    assert observability.enable_channelz is False


def test_secrets_are_in_no_repr() -> None:
    shown = repr(FrontendConfig(api_key=("hush-1",), security=SecurityConfig(service_token="hush-2" * 4)))
    assert "hush" not in shown
    assert "hush" not in repr(SecurityConfig(service_token="hush-2" * 4).server)


def test_flags_of_security_and_logs_fill_every_field() -> None:
    parser = argparse.ArgumentParser()
    add_security_flags(parser)
    add_observability_flags(parser)
    known = set(vars(parser.parse_args([])))
    wanted = {each.name for config in (SecurityConfig, ObservabilityConfig) for each in fields(config)}
    assert wanted - {"service_token"} <= known
