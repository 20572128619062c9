"""Every default of every config, and what small parts of configs make of what they are given."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from pagoda_common.config.checkpoint.model_files import context_of, resolve_model, why_no_config, with_room_for_prompts
from pagoda_common.config.engine_config import (
    EMBEDDED_MODEL,
    FIT_MEMORY,
    CacheConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
)
from pagoda_common.config.flags.settings import misspelled
from pagoda_common.config.flags.words import as_typed, dashed
from pagoda_common.config.frontend_config import FrontendConfig
from pagoda_common.config.lora_config import LoraConfig
from pagoda_common.config.observability_config import ObservabilityConfig
from pagoda_common.config.quantization import OnlineQuantization, parse_quantization
from pagoda_common.config.security_config import SecurityConfig, host_of, is_local, is_loopback
from pagoda_common.config.speculative_config import SpeculativeConfig, speculative_config, takes_drafts
from pagoda_common.errors import ConfigError, ModelLoadError
from pagoda_common.params.lora_adapter import LoraAdapter
from pagoda_common.params.sampling_params import SamplingParams
from pagoda_common.params.structured_outputs import StructuredOutputsParams

SECURITY = {
    "tls_cert": None,
    "tls_key": None,
    "tls_ca": None,
    "tls_server_name": None,
    "service_token_file": None,
    "service_token": "",
    "insecure": False,
}
OBSERVABILITY = {
    "log_format": "text",
    "otlp_traces_endpoint": None,
    "collect_detailed_traces": (),
    "enable_channelz": False,
    "disable_log_stats": False,
}
ENGINE: dict[str, dict[str, Any]] = {
    "model": {
        "model": "pagoda-tiny",
        "revision": None,
        "tokenizer": None,
        "served_model_name": (),
        "dtype": "auto",
        "quantization": None,
        "activation_quantization": "auto",
        "device": "auto",
        "max_model_len": None,
        "load_format": "auto",
        "model_impl": "auto",
        "runner": "auto",
        "convert": "auto",
        "pooler_config": "",
        "hf_overrides": "",
        "max_logprobs": 20,
        "logprobs_mode": "raw_logprobs",
        "logits_processors": (),
        "reference_kernels": (),
        "attention_backend": "auto",
        "enforce_eager": False,
        "generation_config": "auto",
        "override_generation_config": "",
        "structured_outputs_config": "",
        "seed": 0,
    },
    "cache": {
        "block_size": 16,
        "kv_cache_dtype": "auto",
        "kv_cache_memory_bytes": None,
        "num_blocks_override": None,
        "gpu_memory_utilization": 0.92,
        "enable_prefix_caching": True,
        "cpu_kv_cache_memory_bytes": 0,
        "snapshot_interval": 512,
        "kv_events_config": "",
    },
    "scheduler": {
        "max_num_seqs": 256,
        "max_num_batched_tokens": 2048,
        "enable_chunked_prefill": True,
        "long_prefill_token_threshold": 0,
        "policy": "fcfs",
        "preemption_mode": "auto",
        "routing_policy": "prefix",
        "async_scheduling": True,
        "step_watchdog_s": 2.0,
        "orphan_lease_s": 30.0,
        "max_serving_groups": None,
        "max_num_queued_reqs": 16384,
        "max_num_queued_tokens": 33554432,
        "max_queued_share": 0.5,
    },
    "speculative": {
        "method": "ngram",
        "num_speculative_tokens": 0,
        "prompt_lookup_max": 5,
        "prompt_lookup_min": 5,
    },
    "lora": {
        "enable_lora": False,
        "max_loras": 8,
        "max_lora_rank": 64,
        "max_cpu_loras": None,
        "lora_modules": (),
        "lora_target_modules": (),
        "lora_resolver_dir": "",
    },
    "parallel": {"tensor_parallel_size": 1, "data_parallel_size": 1, "standby_workers": 0, "threads": None},
    "security": SECURITY,
    "observability": OBSERVABILITY,
}
FRONTEND = {
    "scheduler": "127.0.0.1:50052",
    "models": (),
    "host": "127.0.0.1",
    "port": 8000,
    "grpc_port": 50051,
    "grpc_host": None,
    "model": "pagoda-tiny",
    "revision": None,
    "tokenizer": None,
    "served_model_name": (),
    "chat_template": None,
    "trust_request_chat_template": False,
    "enable_auto_tool_choice": False,
    "tool_call_parser": None,
    "tool_parser_plugin": None,
    "reasoning_parser": None,
    "reasoning_parser_plugin": None,
    "max_logprobs": 20,
    "generation_config": "auto",
    "override_generation_config": "",
    "structured_outputs_config": "",
    "enable_long_inputs": False,
    "enable_prompt_tokens_details": False,
    "enable_force_include_usage": False,
    "enable_request_id_headers": False,
    "return_tokens_as_token_ids": False,
    "api_key": (),
    "api_key_file": None,
    "operator_key": (),
    "operator_key_file": None,
    "prefix_cache_isolation": "auto",
    "allowed_weights": (),
    "allowed_hosts": (),
    "forwarded_allow_ips": (),
    "allowed_origins": (),
    "allowed_methods": ("*",),
    "allowed_headers": ("*",),
    "allow_credentials": False,
    "root_path": "",
    "drain_timeout_s": 30.0,
    "recovery_timeout_s": 30.0,
    "max_request_body_bytes": 16 * 1024**2,
    "max_request_values": 524288,
    "max_unadmitted_bytes": 512 * 1024**2,
    "sse_keep_alive_interval_s": 15.0,
    "keep_alive_timeout_s": 75,
    "enable_log_requests": False,
    "max_log_len": None,
    "send_timeout_s": 300.0,
    "disable_uvicorn_access_log": False,
    "uvicorn_log_level": "info",
    "enable_tokenizer_info_endpoint": False,
    "enable_sleep_mode": False,
    "enable_runtime_lora_updating": False,
    "disable_fastapi_docs": False,
    "disable_status_page": False,
    "h11_max_incomplete_event_size": 4 * 1024**2,
    "h11_max_header_count": 256,
    "ssl_keyfile": None,
    "ssl_certfile": None,
    "ssl_ca_certs": None,
    "max_stored_responses": 1024,
    "security": SECURITY,
    "observability": OBSERVABILITY,
}


def test_every_default_of_the_engine() -> None:
    assert asdict(EngineConfig()) == ENGINE


def test_every_default_of_the_frontend() -> None:
    assert asdict(FrontendConfig()) == FRONTEND


def test_parts_have_vllms_names() -> None:
    config = EngineConfig(lora=LoraConfig(enable_lora=True))
    assert config.model_config is config.model
    assert config.cache_config is config.cache
    assert config.scheduler_config is config.scheduler
    assert config.parallel_config is config.parallel
    assert config.speculative_config is config.speculative
    assert config.lora_config is config.lora
    assert EngineConfig().lora_config is None


def test_a_length_that_fits_is_no_number() -> None:
    fitting, fixed, own = ModelConfig(max_model_len=FIT_MEMORY), ModelConfig(max_model_len=7), ModelConfig()
    assert [one.fixed_max_model_len for one in (fitting, fixed, own)] == [None, 7, None]
    assert [one.fits_max_model_len for one in (fitting, fixed, own)] == [True, False, False]


@pytest.mark.parametrize("name", ["model_impl", "runner", "convert"])
def test_choices_of_a_model(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is 'nonsense', must be one of auto, ") as caught:
        ModelConfig(**{name: "nonsense"})
    assert caught.value.field == name
    with pytest.raises(ConfigError, match="hf_overrides"):
        ModelConfig(hf_overrides="[]")
    with pytest.raises(ConfigError, match="pooler_config"):
        ModelConfig(pooler_config="{")
    with pytest.raises(ConfigError, match="structured_outputs_config"):
        ModelConfig(structured_outputs_config="{")
    with pytest.raises(ConfigError, match="structured_outputs_config"):
        FrontendConfig(structured_outputs_config="{")


@pytest.mark.parametrize(
    ("name", "good", "bad", "bound"),
    [
        ("max_loras", (1, 1024), (0, 1025), "between 1 and 1024"),
        ("max_lora_rank", (1, 4096), (0, 4097), "between 1 and 4096"),
        ("max_cpu_loras", (8, 1 << 20), (7, (1 << 20) + 1), "between 8 and 1048576"),
    ],
)
def test_adapters_have_bounds(name: str, good: tuple[int, ...], bad: tuple[int, ...], bound: str) -> None:
    for value in good:
        assert getattr(LoraConfig(**{name: value}), name) == value  # type: ignore[arg-type]  # a number
    for value in bad:
        with pytest.raises(ConfigError, match=f"{name} is {value}, must be {bound}") as caught:
            LoraConfig(**{name: value})  # type: ignore[arg-type]  # a number
        assert caught.value.field == name


def test_adapters_are_named_in_either_form() -> None:
    words = ("one=/a=b", '{"name": "two", "path": "/c", "base_model_name": "base"}', ' {"name": "three", "path": "/d"}')
    config = LoraConfig(enable_lora=True, lora_modules=words)
    assert config.adapters == [
        LoraAdapter(name="one", path="/a=b"),
        LoraAdapter(name="two", path="/c", base_model_name="base"),
        LoraAdapter(name="three", path="/d"),
    ]
    assert (LoraConfig(max_loras=3).num_host, LoraConfig(max_loras=3, max_cpu_loras=5).num_host) == (3, 5)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"lora_modules": ("a=/b", "a=/c")}, "lora_modules names 'a' twice"),
        ({"lora_modules": ("a",)}, "lora_modules has 'a', must be name=path or an object with both"),
        ({"lora_modules": ("=/b",)}, "must be name=path"),
        ({"lora_modules": ("a=",)}, "must be name=path"),
        ({"lora_modules": ('{"name": "a"}',)}, "must be name=path"),
        ({"lora_modules": ('{"name": 5, "path": "b"}',)}, "must be name=path"),
        (
            {"lora_modules": ('{"name": "a", "path": "b", "rank": 5}',)},
            "has the key 'rank', must have base_model_name, ",
        ),
        ({"lora_modules": ("{",)}, "which is not JSON"),
        ({"lora_modules": (f"{'n' * 513}=/b",)}, "lora name has 513 characters"),
    ],
)
def test_adapters_that_are_none_are_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        LoraConfig(enable_lora=True, **given)
    assert caught.value.field == "lora_modules"


@pytest.mark.parametrize(
    "given", [{"lora_modules": ("a=/b",)}, {"lora_target_modules": ("q",)}, {"lora_resolver_dir": "/d"}]
)
def test_adapters_are_off_unless_they_are_asked_for(given: dict[str, Any]) -> None:
    (name,) = given
    with pytest.raises(ConfigError, match=f"{name} needs --enable-lora") as caught:
        LoraConfig(**given)
    assert caught.value.field == name


@pytest.mark.parametrize(
    ("given", "field", "message"),
    [
        ({"otlp_traces_endpoint": "localhost"}, "otlp_traces_endpoint", "must be a URL such as"),
        ({"collect_detailed_traces": ("all",)}, "collect_detailed_traces", "needs otlp_traces_endpoint"),
        (
            {"otlp_traces_endpoint": "http://h:1", "collect_detailed_traces": ("model,other",)},
            "collect_detailed_traces",
            "is 'other', must be one of model, worker, all",
        ),
    ],
)
def test_traces_go_to_a_url(given: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        ObservabilityConfig(**given)
    assert caught.value.field == field
    ObservabilityConfig(otlp_traces_endpoint="http://h:1", collect_detailed_traces=("model,worker", "all"))


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"structured_outputs": StructuredOutputsParams(regex="a")}, False),
        ({"extra_args": {"a": 1}}, False),
        ({"extra_args": {}}, True),
        ({"presence_penalty": -0.1}, False),
        ({"presence_penalty": 0.1}, False),
        ({"frequency_penalty": -0.1}, False),
        ({"repetition_penalty": 0.9}, False),
        ({"min_tokens": 1}, False),
        ({"logit_bias": {1: 1.0}}, False),
        ({"allowed_token_ids": [1]}, False),
        ({"bad_words_token_ids": ((1,),)}, False),
        ({"prompt_logprobs": 1, "top_k": 1}, True),
    ],
)
def test_drafts_are_taken_where_nothing_is_kept_from_token_to_token(params: dict[str, Any], expected: bool) -> None:
    assert takes_drafts(SamplingParams(**params)) is expected


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [("num_speculative_tokens", 1, 64), ("prompt_lookup_max", 1, 32), ("prompt_lookup_min", 1, 32)],
)
def test_drafts_have_bounds(name: str, low: int, high: int) -> None:
    for value in (low, high):
        assert getattr(speculative_config({"num_speculative_tokens": 2, name: value}), name) == value
    for value in (low - 1, high + 1, 1.0, True, "1"):
        with pytest.raises(ConfigError, match=f"{name} is {value!r}, must be between {low} and {high}"):
            speculative_config({"num_speculative_tokens": 2, "prompt_lookup_max": 5, name: value})
    assert SpeculativeConfig(num_speculative_tokens=1).is_on
    assert json.loads(SpeculativeConfig(num_speculative_tokens=3).to_json()) == {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_max": 5,
        "prompt_lookup_min": 5,
    }
    assert SpeculativeConfig().to_json() == ""


@pytest.mark.parametrize(
    "key", ["model", "draft_tensor_parallel_size", "draft_model_config", "quantization", "revision"]
)
def test_no_draft_model_is_run(key: str) -> None:
    with pytest.raises(ConfigError, match="a draft model is not supported"):
        speculative_config({"num_speculative_tokens": 2, key: "x"})


def test_addresses_that_only_this_machine_reaches() -> None:
    assert [is_loopback(host) for host in ("127.0.0.1", "127.9.9.9", "::1", "[::1]", "localhost")] == [True] * 5
    assert [is_loopback(host) for host in ("0.0.0.0", "10.0.0.1", "::", "localhost.evil", "", "host")] == [False] * 6
    assert [host_of(one) for one in ("h:1", "[::1]:2", "1.2.3.4:5")] == ["h", "::1", "1.2.3.4"]
    assert [is_local(one) for one in ("127.0.0.1:1", "[::1]:1", "unix-abstract:x", "10.0.0.1:1")] == [
        True,
        True,
        True,
        False,
    ]


@pytest.mark.parametrize(
    ("given", "is_guarded"),
    [({}, False), ({"service_token": "t"}, True), ({"service_token_file": "f"}, True), ({"tls_ca": "a"}, True)],
)
def test_callers_show_a_token_or_a_certificate(given: dict[str, str], is_guarded: bool) -> None:
    assert SecurityConfig(**given).is_guarded is is_guarded  # type: ignore[arg-type]  # texts


def test_a_server_has_everything_of_the_service() -> None:
    security = SecurityConfig(
        tls_cert="c", tls_key="k", tls_ca="a", service_token_file="f", service_token="t", insecure=True
    )
    server = security.server
    assert (server.cert_file, server.key_file, server.client_ca_file) == ("c", "k", "a")
    assert (server.service_token_file, server.service_token, server.insecure) == ("f", "t", True)
    plain = SecurityConfig().server
    assert (plain.cert_file, plain.key_file, plain.client_ca_file, plain.insecure) == (None, None, None, False)


@pytest.mark.parametrize(
    ("name", "length"), [({"max_position_embeddings": 7}, 7), ({"text_config": {"max_position_embeddings": 8}}, 8)]
)
def test_a_context_is_read_from_the_config(tmp_path: Path, name: dict[str, Any], length: int) -> None:
    (tmp_path / "config.json").write_text(json.dumps(name))
    assert context_of(str(tmp_path)) == length
    scheduler = SchedulerConfig(enable_chunked_prefill=False)
    for max_model_len, expected in ((None, 2048), (3000, 3000), (100, 2048)):
        model = ModelConfig(model=str(tmp_path), max_model_len=max_model_len)
        assert with_room_for_prompts(scheduler, model).max_num_batched_tokens == expected
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 4096}))
    model = ModelConfig(model=str(tmp_path))
    assert with_room_for_prompts(scheduler, model).max_num_batched_tokens == 4096
    given = SchedulerConfig(enable_chunked_prefill=False, max_num_batched_tokens=5000)
    assert with_room_for_prompts(given, model) is given
    assert with_room_for_prompts(SchedulerConfig(), model).max_num_batched_tokens == 2048
    (tmp_path / "config.json").write_text('{"max_position_embeddings": "many"}')
    assert context_of(str(tmp_path)) is None
    assert context_of("organisation/model") is None
    assert context_of(str(tmp_path / "none")) is None


def test_a_model_is_a_directory_or_of_the_hub(tmp_path: Path) -> None:
    embedded = resolve_model(EMBEDDED_MODEL)
    assert isinstance(embedded, Path)
    assert (embedded / "config.json").is_file()
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path)) == tmp_path
    assert [resolve_model(name) for name in ("model", "organisation/model")] == ["model", "organisation/model"]
    for name in ("/nowhere", "./nowhere", "~/nowhere", "a/b/c"):
        with pytest.raises(ModelLoadError, match=f"model '{name}' is not a directory") as caught:
            resolve_model(name)
        assert caught.value.field == "model"
    with pytest.raises(ModelLoadError, match=r"model 'm\.gguf' is not a file"):
        resolve_model("m.gguf")
    assert why_no_config(tmp_path) == "has no config.json: it is not a checkpoint"
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    (tmp_path / "config.json").unlink()
    with pytest.raises(ModelLoadError, match=r"has several GGUF files, name one of them: a\.gguf, b\.gguf"):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, None),
        ("", None),
        ("auto", None),
        ("none", None),
        ("int8", OnlineQuantization(bits=8, group_size=0)),
        ("int8_per_channel_weight_only", OnlineQuantization(bits=8, group_size=0)),
        ("int8-g64", OnlineQuantization(bits=8, group_size=64)),
        ("int4", OnlineQuantization(bits=4, group_size=128)),
        ("int4-g32", OnlineQuantization(bits=4, group_size=32)),
        ("awq_marlin", "awq"),
        ("auto_gptq", "gptq"),
        ("gguf", "gguf"),
        ("modelopt", "modelopt"),
    ],
)
def test_what_quantizations_are_called(text: str | None, expected: object) -> None:
    assert parse_quantization(text) == expected
    if isinstance(expected, OnlineQuantization):
        assert parse_quantization(expected.name) == expected


def test_words_of_flags() -> None:
    known = {"--max-model-len", "--keep_me", "--object"}
    words, typed = dashed(["--max_model_len", "a_b", "--keep_me=1", "--x_y=c_d", "--", "--p_q"], known)
    assert words == ["--max-model-len", "a_b", "--keep_me=1", "--x-y=c_d", "--", "--p_q"]
    assert typed == {"--max-model-len": "--max_model_len", "--x-y": "--x_y"}
    words, _ = dashed(["--object.a.b", "5", "--object.c", '--object={"d": 1}', "--other.a", "5"], known)
    assert words == ['--object={"d": 1}', "--other.a", "5", '--object={"d": 1, "a": {"b": 5}, "c": true}']
    assert as_typed("--a-b is 5, --a-b-c is not", {"--a-b": "--a_b"}) == "--a_b is 5, --a-b-c is not"


def test_variables_that_are_almost_settings() -> None:
    names = ["max-model-len", "port"]
    environment = {
        "PAGODA_MAX_MODEL_LENS": "1",
        "PAGODA_MAX_MODEL_LEN": "1",
        "MAX_MODEL_LENS": "1",
        "PAGODA_API_KEY": "k",
        "PAGODA_PORTS": "tcp://1",
        "PAGODA_ELSE": "1",
    }
    assert misspelled(environment, names) == {"PAGODA_MAX_MODEL_LENS": "PAGODA_MAX_MODEL_LEN"}


def test_a_cpu_has_no_eight_bit_floats() -> None:
    with pytest.raises(ConfigError, match="kv_cache_dtype is 'fp8', must be auto or int8 on a CPU"):
        EngineConfig(model=ModelConfig(device="cpu"), cache=CacheConfig(kv_cache_dtype="fp8"))
