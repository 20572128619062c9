"""The command-line flags, with vLLM's names: one table a config. What is done with them is flags.py's."""

import argparse
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pagoda_common.config.engine_config import FIT_MEMORY

_SUFFIX = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_SUFFIX |= {letter.upper(): 1024**power for power, letter in enumerate("kmgt", start=1)}
_BYTE_SUFFIX = _SUFFIX | {"B": 1}
_BYTE_SUFFIX |= {f"{letter}B": 1000**power for power, letter in enumerate("KMGT", start=1)}
_BYTE_SUFFIX |= {f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", start=1)}


def _quantity(text: str, suffixes: dict[str, int], examples: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if match is None or match[2] not in suffixes:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number such as {examples}")
    return int(float(match[1]) * suffixes[match[2]]) if "." in match[1] else int(match[1]) * suffixes[match[2]]


def parse_count(text: str) -> int:
    """A number of tokens: 8192, 8k (8000), 8K (8192), 1.5M. Small letters are decimal, capitals binary, as in vLLM."""
    return _quantity(text, _SUFFIX, "8192, 8k (8000) or 8K (8192)")


def parse_bytes(text: str) -> int:
    """A number of bytes: 1000000, 512M and 512MiB (binary), 2GB and 2g (decimal)."""
    return _quantity(text, _BYTE_SUFFIX, "512M, 2GiB (binary) or 2GB (decimal)")


def parse_max_model_len(text: str) -> int:
    """As `parse_count`; -1 and auto are FIT_MEMORY."""
    return FIT_MEMORY if text in ("-1", "auto") else parse_count(text)


def parse_dtype(text: str) -> str:
    """Our names, and vLLM's: half, float."""
    return {"half": "float16", "float": "float32"}.get(text.removeprefix("torch."), text.removeprefix("torch."))


def parse_load_format(text: str) -> str:
    """Our names, and vLLM's for what auto finds by itself."""
    return {"hf": "auto", "mistral": "auto", "gguf": "auto"}.get(text, text)


def parse_attention_backend(text: str) -> str:
    """Our names, and vLLM's: TRITON_ATTN, FLASHINFER, FLASH_ATTN."""
    return {"triton_attn": "triton"}.get(text.lower(), text.lower())


def parse_model_impl(text: str) -> str:
    """Our names, and vLLM's for its own implementations."""
    return {"vllm": "pagoda"}.get(text, text)


@dataclass(frozen=True, kw_only=True, slots=True)
class Flag:
    """One flag and the config field it fills. The field's type adds a --no- form (bool, true) or choices (Literal)."""

    field: str
    """Field of the config; also the attribute of the parsed arguments."""
    help: str
    """One line."""
    names: tuple[str, ...] = ()
    """Option strings; empty takes the field's name."""
    parse: Callable[[str], Any] = str
    """Text to value."""
    metavar: str | None = None
    """What the help shows as value."""

    @property
    def options(self) -> tuple[str, ...]:
        """Option strings, the usual one first."""
        return self.names or ("--" + self.field.replace("_", "-"),)


# What the engine and the frontend must agree on.
IDENTITY_FLAGS = (
    Flag(field="model", help="directory or hub id of the checkpoint (also as first argument)"),
    Flag(field="revision", help="hub revision of the checkpoint"),
    Flag(field="tokenizer", help="directory or hub id of the tokenizer, when it is not the model's"),
    Flag(field="served_model_name", metavar="NAME", help="names clients use for the model"),
    Flag(field="max_logprobs", parse=int, metavar="N", help="most logprobs per token; -1 allows the vocabulary"),
    Flag(
        field="generation_config",
        metavar="WHERE",
        help="where sampling defaults come from: auto is the checkpoint, vllm is nowhere, else a directory",
    ),
    Flag(
        field="override_generation_config",
        metavar="JSON",
        help="object of sampling defaults that goes before --generation-config",
    ),
    Flag(
        field="structured_outputs_config",
        metavar="JSON",
        help='options of all structured outputs, with vLLM\'s keys: {"disable_any_whitespace": true}',
    ),
)
MODEL_FLAGS = (
    *IDENTITY_FLAGS,
    Flag(field="dtype", parse=parse_dtype, help="data type of weights and KV cache; auto takes the checkpoint's"),
    Flag(
        field="quantization",
        names=("--quantization", "-q"),
        metavar="METHOD",
        help="hold weights as int8 or int4 (int4-g32, int4-g64); a quantized checkpoint's method is found by itself",
    ),
    Flag(
        field="activation_quantization",
        help="with quantized weights in bfloat16 on a CPU: auto computes with 8-bit activations, none with bfloat16",
    ),
    Flag(field="device", help="auto takes an accelerator if there is one"),
    Flag(
        field="max_model_len",
        parse=parse_max_model_len,
        metavar="TOKENS",
        help="longest prompt plus output, such as 4096 or 8k; auto or -1 is what fits",
    ),
    Flag(field="load_format", parse=parse_load_format, help="dummy makes random weights"),
    Flag(
        field="model_impl",
        parse=parse_model_impl,
        help="who runs the model: Pagoda's own implementation, transformers' modules, or auto, the first that there is",
    ),
    Flag(field="runner", help="pooling: embeddings, labels and scores alone; generate; auto decides by the checkpoint"),
    Flag(field="convert", help="what a model that generates becomes for pooling; auto: as config.json names it"),
    Flag(
        field="pooler_config",
        names=("--pooler-config", "--override-pooler-config"),
        metavar="JSON",
        help='how hidden states are pooled, with vLLM\'s keys: {"pooling_type": "MEAN", "normalize": false}',
    ),
    Flag(field="hf_overrides", metavar="JSON", help="object of entries that replace those of the model's config.json"),
    Flag(
        field="logprobs_mode",
        help="log probabilities or logits, before (raw) or after (processed) penalties, temperature and filters",
    ),
    Flag(
        field="logits_processors",
        metavar="MODULE:CLASS",
        help="logits processors to load besides the installed ones",
    ),
    Flag(
        field="reference_kernels",
        metavar="NAME",
        help="kernels to replace by plain PyTorch (rms_norm, …), all or none; in float32 those that round otherwise",
    ),
    Flag(
        field="attention_backend",
        parse=parse_attention_backend,
        help="attention on a GPU: our kernels (triton), a package's, or the fastest for each shape of a step",
    ),
    Flag(field="enforce_eager", help="launch every kernel of every step on a GPU, without CUDA graphs"),
    Flag(field="seed", parse=int, metavar="N", help="seed of dummy weights"),
)
CACHE_FLAGS = (
    Flag(field="block_size", parse=int, metavar="TOKENS", help="tokens in one KV-cache block"),
    Flag(
        field="kv_cache_dtype",
        help="auto takes the weights' data type; int8, and fp8 on a GPU, halve the memory of a bfloat16 cache",
    ),
    Flag(
        field="kv_cache_memory_bytes",
        names=("--kv-cache-memory", "--kv-cache-memory-bytes"),
        parse=parse_bytes,
        metavar="BYTES",
        help="memory of the KV cache, such as 512M or 2GiB; measured if not given",
    ),
    Flag(
        field="num_blocks_override",
        names=("--num-gpu-blocks-override",),
        parse=int,
        metavar="N",
        help="exactly this many KV-cache blocks, whatever the memory says (for tests)",
    ),
    Flag(
        field="gpu_memory_utilization",
        parse=float,
        metavar="SHARE",
        help="share of an accelerator's memory for weights, activations, CUDA graphs and KV cache",
    ),
    Flag(field="enable_prefix_caching", help="share the KV cache of equal prompt prefixes"),
    Flag(
        field="cpu_kv_cache_memory_bytes",
        names=("--cpu-kv-cache-memory",),
        parse=parse_bytes,
        metavar="BYTES",
        help="host memory for swapped-out blocks; 0 turns swapping off",
    ),
    Flag(
        field="snapshot_interval",
        parse=int,
        metavar="TOKENS",
        help="with recurrent layers: tokens between two snapshots of a sequence's state, for prefixes",
    ),
    Flag(
        field="kv_events_config",
        metavar="JSON",
        help="events of the prefix cache for routers, with vLLM's keys (enable_kv_cache_events, publisher, endpoint …)",
    ),
)
SCHEDULER_FLAGS = (
    Flag(field="max_num_seqs", parse=int, metavar="N", help="most sequences in a batch"),
    Flag(field="max_num_batched_tokens", parse=parse_count, metavar="TOKENS", help="most tokens in a batch"),
    Flag(field="enable_chunked_prefill", help="let a long prompt span steps"),
    Flag(
        field="long_prefill_token_threshold",
        parse=parse_count,
        metavar="TOKENS",
        help="most tokens of one prompt in one step; 0 is no bound of its own",
    ),
    Flag(
        field="policy",
        names=("--scheduling-policy",),
        help="order of the waiting queue",
    ),
    Flag(
        field="preemption_mode",
        help="with --cpu-kv-cache-memory: swap evicted blocks when that is cheaper than recomputing, always, or never",
    ),
    Flag(
        field="routing_policy",
        help="with several workers: send a request where its prefix is cached, against load, or to each in turn",
    ),
    Flag(field="async_scheduling", help="send a step before the result of the one before is back"),
    Flag(
        field="step_watchdog_s",
        names=("--step-watchdog",),
        parse=float,
        metavar="SECONDS",
        help="least time after which a step without an answer means that its worker hangs; 0 is never",
    ),
    Flag(
        field="orphan_lease_s",
        names=("--orphan-lease",),
        parse=float,
        metavar="SECONDS",
        help="how long a stream outlives its frontend, for its client to go on with it at another one",
    ),
    Flag(
        field="max_serving_groups",
        parse=int,
        metavar="N",
        help="workers that serve at the same time; more stand by and take over at once. All serve if not given",
    ),
    Flag(
        field="max_num_queued_reqs",
        parse=int,
        metavar="N",
        help="most sequences waiting; more are refused (503). 0: any",
    ),
    Flag(
        field="max_num_queued_tokens",
        parse=parse_count,
        metavar="TOKENS",
        help="most prompt tokens waiting; more are refused (503). 0 is no bound",
    ),
)
LORA_FLAGS = (
    Flag(field="enable_lora", help="let requests name LoRA adapters in place of the model"),
    Flag(field="max_loras", parse=int, metavar="N", help="most adapters of one batch"),
    Flag(field="max_lora_rank", parse=int, metavar="N", help="highest rank of an adapter"),
    Flag(
        field="max_cpu_loras",
        parse=int,
        metavar="N",
        help="most adapters in a worker's host memory, at least --max-loras, which is the default",
    ),
    Flag(
        field="lora_modules",
        metavar="NAME=PATH",
        help='adapters to serve from the start: name=path, or {"name": …, "path": …, "base_model_name": …}',
    ),
    Flag(
        field="lora_target_modules",
        metavar="MODULE",
        help="last parts of the names of the only modules that adapters change, such as q_proj; default: all",
    ),
    Flag(
        field="lora_resolver_dir",
        metavar="DIRECTORY",
        help="look for the folder of an adapter here when a request names one that no one has added",
    ),
)
PARALLEL_FLAGS = (
    Flag(
        field="tensor_parallel_size",
        names=("--tensor-parallel-size", "-tp"),
        parse=int,
        metavar="N",
        help="workers that hold one copy of the model together, each a part of every layer",
    ),
    Flag(
        field="data_parallel_size",
        names=("--data-parallel-size", "-dp"),
        parse=int,
        metavar="N",
        help="worker groups, each with a copy of the model",
    ),
    Flag(
        field="standby_workers",
        parse=int,
        metavar="N",
        help="further worker groups that have the model in memory and take over at once when one is lost",
    ),
    Flag(
        field="threads",
        parse=int,
        metavar="N",
        help="threads of torch in each worker on a CPU; several workers share the cores if not given",
    ),
)
SPECULATIVE_FLAG = Flag(
    field="speculative_config",
    metavar="JSON",
    help='drafts of tokens ahead, with vLLM\'s keys: {"method": "ngram", "num_speculative_tokens": 4, '
    '"prompt_lookup_max": 4, "prompt_lookup_min": 2}',
)
SECURITY_FLAGS = (
    Flag(field="tls_cert", metavar="FILE", help="certificate chain (PEM) of this service, for mutual TLS over gRPC"),
    Flag(field="tls_key", metavar="FILE", help="private key (PEM) of --tls-cert"),
    Flag(field="tls_ca", metavar="FILE", help="authorities (PEM) that must have signed what peers show"),
    Flag(
        field="tls_server_name",
        metavar="NAME",
        help="name that certificates of called services must have; the host that is called if not given",
    ),
    Flag(
        field="service_token_file",
        metavar="FILE",
        help="tokens that services show each other, one a line (or PAGODA_SERVICE_TOKEN): all open, the first is shown",
    ),
    Flag(field="insecure", help="allow gRPC without TLS elsewhere than on loopback"),
)
OBSERVABILITY_FLAGS = (
    Flag(field="log_format", help="a line for people, or a JSON object a line"),
    Flag(
        field="otlp_traces_endpoint",
        metavar="URL",
        help="OpenTelemetry collector (gRPC) that traces are sent to, such as http://localhost:4317",
    ),
    Flag(
        field="collect_detailed_traces",
        metavar="WHAT",
        help="model, worker or all: the worker's share of each prefill chunk in the traces",
    ),
    Flag(field="disable_log_stats", help="log no line of statistics every ten seconds while there is load"),
    Flag(field="enable_channelz", help="serve grpc.channelz.v1, which shows connections and their counters"),
)
FRONTEND_FLAGS = (
    *IDENTITY_FLAGS,
    Flag(field="scheduler", metavar="HOST:PORT", help="address of the scheduler"),
    Flag(field="host", help="interface for HTTP and gRPC; 0.0.0.0 is all of them"),
    Flag(field="port", parse=int, help="HTTP port; 0 takes a free one"),
    Flag(field="grpc_port", parse=int, metavar="PORT", help="port of the public gRPC service; 0 takes a free one"),
    Flag(field="grpc_host", metavar="HOST", help="interface for gRPC, when it is not that of HTTP"),
    Flag(
        field="chat_template",
        metavar="FILE",
        help="Jinja file or text of the chat template; the tokenizer's if not given",
    ),
    Flag(field="trust_request_chat_template", help="let requests bring a chat template of their own"),
    Flag(
        field="enable_auto_tool_choice",
        help="let the model decide to call tools; with --tool-call-parser. The embedded model may without",
    ),
    Flag(field="tool_call_parser", metavar="NAME", help="how the model writes tool calls, such as hermes"),
    Flag(field="tool_parser_plugin", metavar="FILE", help="Python file that registers further tool call parsers"),
    Flag(field="reasoning_parser", metavar="NAME", help="how the model marks its reasoning, such as deepseek_r1"),
    Flag(field="reasoning_parser_plugin", metavar="FILE", help="Python file that registers further reasoning parsers"),
    Flag(
        field="enable_long_inputs",
        help="embed texts longer than the model takes in pieces, by the mean of their vectors; the answer says so",
    ),
    Flag(field="enable_prompt_tokens_details", help="put cached_tokens into usage"),
    Flag(field="enable_force_include_usage", help="put the usage so far into every chunk of every stream"),
    Flag(field="enable_request_id_headers", help="send X-Request-Id with the answers to probes too"),
    Flag(field="return_tokens_as_token_ids", help="write tokens of log probabilities as token_id:N"),
    Flag(field="api_key", metavar="KEY", help="keys that clients must show as bearer token"),
    Flag(field="api_key_file", metavar="FILE", help="file with more keys, one a line"),
    Flag(field="operator_key", metavar="KEY", help="keys for /sleep, /wake_up and /reload_weights alone"),
    Flag(field="operator_key_file", metavar="FILE", help="file with more of them, one a line"),
    Flag(
        field="prefix_cache_isolation",
        help="tenant lets a request find cached prefixes of its own API key alone, none those of all; auto is tenant "
        "where there are several keys",
    ),
    Flag(
        field="allowed_weights",
        metavar="WHERE",
        help="directories (with all below them) and hub ids that /reload_weights takes besides --model; * is any",
    ),
    Flag(
        field="allowed_hosts",
        metavar="NAME",
        help="names besides localhost under which browsers may call a server on loopback without keys; * is any",
    ),
    Flag(field="allowed_origins", metavar="ORIGIN", help="origins that browsers may call from (CORS)"),
    Flag(field="allowed_methods", metavar="METHOD", help="HTTP methods that they may use"),
    Flag(field="allowed_headers", metavar="HEADER", help="headers that they may send"),
    Flag(field="allow_credentials", help="let them send cookies and authorization"),
    Flag(field="root_path", metavar="PATH", help="path prefix under which a proxy serves the frontend"),
    Flag(
        field="drain_timeout_s",
        names=("--drain-timeout", "--shutdown-timeout"),
        parse=float,
        metavar="SECONDS",
        help="time that open streams get to finish after SIGTERM",
    ),
    Flag(
        field="max_request_body_bytes",
        names=("--max-request-body-size",),
        parse=parse_bytes,
        metavar="BYTES",
        help="largest HTTP request body",
    ),
    Flag(
        field="max_request_values",
        parse=int,
        metavar="N",
        help="most values (numbers, texts, lists, objects) in a request body",
    ),
    Flag(
        field="max_unadmitted_bytes",
        names=("--max-unadmitted-size",),
        parse=parse_bytes,
        metavar="BYTES",
        help="memory of all requests that the engine has not got yet; half of it for one caller",
    ),
    Flag(
        field="sse_keep_alive_interval_s",
        names=("--sse-keep-alive-interval",),
        parse=float,
        metavar="SECONDS",
        help="silence after which a stream gets a comment line; 0 sends none",
    ),
    Flag(
        field="keep_alive_timeout_s",
        names=("--keep-alive-timeout",),
        parse=int,
        metavar="SECONDS",
        help="time for which a connection without a request stays open; more than a proxy in front keeps its own",
    ),
    Flag(field="enable_log_requests", help="log each request: its parameters; at level debug its prompt, too"),
    Flag(field="max_log_len", parse=int, metavar="N", help="most characters of a prompt in the log; all if not given"),
    Flag(
        field="send_timeout_s",
        names=("--send-timeout",),
        parse=float,
        metavar="SECONDS",
        help="time in which an HTTP client must take what waits for it, or it is cut off; 0 waits for ever",
    ),
    Flag(field="disable_uvicorn_access_log", help="log no line per HTTP request"),
    Flag(field="uvicorn_log_level", help="least level of what the HTTP server itself logs"),
    Flag(field="enable_tokenizer_info_endpoint", help="serve /tokenizer_info"),
    Flag(field="enable_sleep_mode", help="serve /sleep, /wake_up, /is_sleeping and /reload_weights"),
    Flag(
        field="enable_runtime_lora_updating",
        help="serve /v1/load_lora_adapter and /v1/unload_lora_adapter, for what --allowed-weights names",
    ),
    Flag(field="disable_fastapi_docs", help="serve neither /docs nor /redoc nor /openapi.json"),
    Flag(field="disable_status_page", help="serve no status page at /"),
    Flag(
        field="h11_max_incomplete_event_size",
        parse=parse_bytes,
        metavar="BYTES",
        help="request line and headers of an HTTP request together",
    ),
    Flag(field="h11_max_header_count", parse=int, metavar="N", help="headers of an HTTP request"),
    Flag(field="ssl_keyfile", metavar="FILE", help="private key (PEM) of --ssl-certfile"),
    Flag(
        field="ssl_certfile",
        metavar="FILE",
        help="certificate chain (PEM) for HTTPS and public gRPC, which has that of --tls-cert if not given",
    ),
    Flag(
        field="ssl_ca_certs",
        metavar="FILE",
        help="authorities (PEM) that must have signed certificates of clients; none are asked for if not given",
    ),
    Flag(
        field="max_stored_responses",
        parse=int,
        metavar="N",
        help="answers of /v1/responses that are kept for later calls; the oldest go first",
    ),
)
