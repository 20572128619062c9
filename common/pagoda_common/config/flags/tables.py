"""The command-line flags, with vLLM's names: one table per config. flags.py parses and writes them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pagoda_common.config.flags.values import (
    parse_attention_backend,
    parse_bytes,
    parse_count,
    parse_dtype,
    parse_load_format,
    parse_max_model_len,
    parse_model_impl,
)


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
    """Name of the value in the help."""

    @property
    def options(self) -> tuple[str, ...]:
        """Option strings, the usual one first."""
        return self.names or ("--" + self.field.replace("_", "-"),)


# What the engine and the frontend must agree on.
IDENTITY_FLAGS = (
    Flag(field="model", help="directory or hub id of the checkpoint (also as first argument)"),
    Flag(field="revision", help="hub revision of the checkpoint"),
    Flag(field="tokenizer", help="directory or hub id of the tokenizer; the model's if not given"),
    Flag(field="served_model_name", metavar="NAME", help="names for clients; the model's path or hub id if not given"),
    Flag(field="max_logprobs", parse=int, metavar="N", help="maximum log probabilities per token; -1: all"),
    Flag(
        field="generation_config",
        metavar="WHERE",
        help="source of sampling defaults: auto (the checkpoint), vllm (no defaults), or a directory",
    ),
    Flag(
        field="override_generation_config",
        metavar="JSON",
        help="sampling defaults that override those of --generation-config",
    ),
    Flag(
        field="structured_outputs_config",
        metavar="JSON",
        help='options for all structured outputs, with vLLM\'s keys: {"disable_any_whitespace": true}',
    ),
)
MODEL_FLAGS = (
    *IDENTITY_FLAGS,
    Flag(field="dtype", parse=parse_dtype, help="data type of weights and KV cache; auto uses the checkpoint's"),
    Flag(
        field="quantization",
        names=("--quantization", "-q"),
        metavar="METHOD",
        help="quantize weights to int8 or int4 (int4-g32, int4-g64) while loading; quantized checkpoints need no flag",
    ),
    Flag(
        field="activation_quantization",
        help="for quantized weights in bfloat16 on a CPU: auto uses 8-bit activations, none uses bfloat16",
    ),
    Flag(field="device", help="auto uses a GPU if there is one"),
    Flag(
        field="max_model_len",
        parse=parse_max_model_len,
        metavar="TOKENS",
        help="maximum length of prompt plus output, such as 4096 or 8k; auto or -1: as long as fits into memory",
    ),
    Flag(
        field="load_format",
        parse=parse_load_format,
        help="auto and safetensors read the checkpoint; dummy uses random weights",
    ),
    Flag(
        field="model_impl",
        parse=parse_model_impl,
        help="implementation: Pagoda's own (pagoda), transformers' modules, or auto: the first that supports the model",
    ),
    Flag(
        field="runner",
        help="generate: text; pooling: embeddings, labels and scores only; auto decides by the checkpoint",
    ),
    Flag(field="convert", help="how a generative model is used for pooling; auto: by the architecture in config.json"),
    Flag(
        field="pooler_config",
        names=("--pooler-config", "--override-pooler-config"),
        metavar="JSON",
        help='pooling of hidden states, with vLLM\'s keys: {"pooling_type": "MEAN", "normalize": false}',
    ),
    Flag(field="hf_overrides", metavar="JSON", help="entries that replace those of the model's config.json"),
    Flag(
        field="logprobs_mode",
        help="return log probabilities or logits, before (raw) or after (processed) penalties and filters",
    ),
    Flag(
        field="logits_processors",
        metavar="MODULE:CLASS",
        help="logits processors to load in addition to the installed ones",
    ),
    Flag(
        field="reference_kernels",
        metavar="NAME",
        help="kernels to replace by plain PyTorch (names, all, none); default in float32: those that round differently",
    ),
    Flag(
        field="attention_backend",
        parse=parse_attention_backend,
        help="attention on a GPU: Pagoda's kernels (triton), an installed package's, or auto: the fastest per step",
    ),
    Flag(field="enforce_eager", help="run without CUDA graphs on a GPU"),
    Flag(field="seed", parse=int, metavar="N", help="seed of random weights (--load-format dummy)"),
)
CACHE_FLAGS = (
    Flag(field="block_size", parse=int, metavar="TOKENS", help="tokens in one KV-cache block"),
    Flag(
        field="kv_cache_dtype",
        help="auto uses the weights' data type; int8 (CPU, GPU) and fp8 (GPU) halve the memory of bfloat16",
    ),
    Flag(
        field="kv_cache_memory_bytes",
        names=("--kv-cache-memory", "--kv-cache-memory-bytes"),
        parse=parse_bytes,
        metavar="BYTES",
        help="size of the KV cache, such as 512M or 2GiB; measured if not given",
    ),
    Flag(
        field="num_blocks_override",
        names=("--num-gpu-blocks-override",),
        parse=int,
        metavar="N",
        help="number of KV-cache blocks, instead of measuring memory (for tests)",
    ),
    Flag(
        field="gpu_memory_utilization",
        parse=float,
        metavar="SHARE",
        help="fraction of GPU memory for weights, activations, CUDA graphs and KV cache",
    ),
    Flag(field="enable_prefix_caching", help="reuse the KV cache of equal prompt prefixes"),
    Flag(
        field="cpu_kv_cache_memory_bytes",
        names=("--cpu-kv-cache-memory",),
        parse=parse_bytes,
        metavar="BYTES",
        help="host memory for blocks that leave the KV cache; 0 turns swapping off",
    ),
    Flag(
        field="snapshot_interval",
        parse=int,
        metavar="TOKENS",
        help="tokens between two snapshots of recurrent state, for the prefix cache of models with recurrent layers",
    ),
    Flag(
        field="kv_events_config",
        metavar="JSON",
        help="prefix-cache events for routers, with vLLM's keys (enable_kv_cache_events, publisher, endpoint, …)",
    ),
)
SCHEDULER_FLAGS = (
    Flag(field="max_num_seqs", parse=int, metavar="N", help="maximum number of sequences per step"),
    Flag(field="max_num_batched_tokens", parse=parse_count, metavar="TOKENS", help="maximum number of tokens per step"),
    Flag(field="enable_chunked_prefill", help="split long prompts over several steps"),
    Flag(
        field="long_prefill_token_threshold",
        parse=parse_count,
        metavar="TOKENS",
        help="maximum tokens of one prompt per step; 0: no separate limit",
    ),
    Flag(
        field="policy",
        names=("--scheduling-policy",),
        help="order of the queue: by arrival (fcfs), by priority, or fair between API keys",
    ),
    Flag(
        field="preemption_mode",
        help="with --cpu-kv-cache-memory: swap blocks when cheaper than recomputing (auto), always (swap), or never",
    ),
    Flag(
        field="routing_policy",
        help="choice among worker groups: by cached prefix and load, or each in turn",
    ),
    Flag(field="async_scheduling", help="send the next step before the result of the current one arrives"),
    Flag(
        field="step_watchdog_s",
        names=("--step-watchdog",),
        parse=float,
        metavar="SECONDS",
        help="least time after which a worker without an answer to a step counts as hung; 0: never",
    ),
    Flag(
        field="orphan_lease_s",
        names=("--orphan-lease",),
        parse=float,
        metavar="SECONDS",
        help="time for which a stream can be resumed after its frontend is lost",
    ),
    Flag(
        field="max_serving_groups",
        parse=int,
        metavar="N",
        help="maximum number of serving worker groups; others stand by. All serve if not given",
    ),
    Flag(
        field="max_num_queued_reqs",
        parse=int,
        metavar="N",
        help="maximum number of waiting sequences; further ones get 503. 0: no limit",
    ),
    Flag(
        field="max_num_queued_tokens",
        parse=parse_count,
        metavar="TOKENS",
        help="maximum number of waiting prompt tokens; further ones get 503. 0: no limit",
    ),
    Flag(
        field="max_queued_share",
        parse=float,
        metavar="PART",
        help="fraction of both limits that one client (API key or address) may use; more gets 429",
    ),
)
LORA_FLAGS = (
    Flag(field="enable_lora", help="let requests name LoRA adapters as their model"),
    Flag(field="max_loras", parse=int, metavar="N", help="maximum number of adapters per step"),
    Flag(field="max_lora_rank", parse=int, metavar="N", help="maximum rank of an adapter"),
    Flag(
        field="max_cpu_loras",
        parse=int,
        metavar="N",
        help="maximum number of adapters in a worker's host memory; --max-loras if not given",
    ),
    Flag(
        field="lora_modules",
        metavar="NAME=PATH",
        help='adapters to serve from the start: name=path, or {"name": …, "path": …, "base_model_name": …}',
    ),
    Flag(
        field="lora_target_modules",
        metavar="MODULE",
        help="names of the modules that adapters may change, such as q_proj; all if not given",
    ),
    Flag(
        field="lora_resolver_dir",
        metavar="DIRECTORY",
        help="directory with a folder per adapter; a folder is loaded when a request names it",
    ),
)
PARALLEL_FLAGS = (
    Flag(
        field="tensor_parallel_size",
        names=("--tensor-parallel-size", "-tp"),
        parse=int,
        metavar="N",
        help="number of workers that share one copy of the model, each with a part of every layer",
    ),
    Flag(
        field="data_parallel_size",
        names=("--data-parallel-size", "-dp"),
        parse=int,
        metavar="N",
        help="number of worker groups, each with its own copy of the model",
    ),
    Flag(
        field="standby_workers",
        parse=int,
        metavar="N",
        help="number of spare worker groups, which load the model and take over when a group is lost",
    ),
    Flag(
        field="threads",
        parse=int,
        metavar="N",
        help="number of threads per worker on a CPU; from the machine's cores if not given",
    ),
)
SPECULATIVE_FLAG = Flag(
    field="speculative_config",
    metavar="JSON",
    help='speculative decoding, with vLLM\'s keys: {"method": "ngram", "num_speculative_tokens": 4}',
)
SECURITY_FLAGS = (
    Flag(
        field="tls_cert",
        metavar="FILE",
        help="certificate chain (PEM) of this service, for mutual TLS between services",
    ),
    Flag(field="tls_key", metavar="FILE", help="private key (PEM) of --tls-cert"),
    Flag(field="tls_ca", metavar="FILE", help="certificate authorities (PEM) of the other services"),
    Flag(
        field="tls_server_name",
        metavar="NAME",
        help="name expected in the certificates of called services; their host if not given",
    ),
    Flag(
        field="service_token_file",
        metavar="FILE",
        help="file of tokens between services, one per line: all are accepted, the first is sent",
    ),
    Flag(field="insecure", help="allow gRPC without TLS beyond loopback"),
)
OBSERVABILITY_FLAGS = (
    Flag(field="log_format", help="text for people, or json: one object per line"),
    Flag(
        field="otlp_traces_endpoint",
        metavar="URL",
        help="OpenTelemetry collector (gRPC) for traces, such as http://localhost:4317",
    ),
    Flag(
        field="collect_detailed_traces",
        metavar="WHAT",
        help="model, worker or all: add the worker's part of each prefill chunk to traces",
    ),
    Flag(field="disable_log_stats", help="do not log statistics every ten seconds"),
    Flag(field="enable_channelz", help="serve grpc.channelz.v1, which shows gRPC connections and their counters"),
)
ADDRESS_FLAGS = (
    Flag(field="host", help="interface for HTTP and gRPC; 0.0.0.0 is every interface"),
    Flag(field="port", parse=int, help="HTTP port; 0 chooses a free one"),
    Flag(field="grpc_port", parse=int, metavar="PORT", help="port of the public gRPC service; 0 chooses a free one"),
    Flag(field="grpc_host", metavar="HOST", help="interface for gRPC; --host if not given"),
)
FRONTEND_FLAGS = (
    *IDENTITY_FLAGS,
    Flag(field="scheduler", metavar="HOST:PORT", help="address of the scheduler"),
    Flag(
        field="models",
        metavar="NAME=HOST:PORT",
        help='several models, each with its scheduler: name=host:port, or {"name": …, "scheduler": …, "model": …}',
    ),
    *ADDRESS_FLAGS,
    Flag(
        field="chat_template",
        metavar="FILE",
        help="chat template: a Jinja file or its text; the tokenizer's if not given",
    ),
    Flag(field="trust_request_chat_template", help="accept chat templates in requests"),
    Flag(
        field="enable_auto_tool_choice",
        help="let the model decide whether to call tools; needs --tool-call-parser",
    ),
    Flag(field="tool_call_parser", metavar="NAME", help="format of the model's tool calls, such as hermes"),
    Flag(field="tool_parser_plugin", metavar="FILE", help="Python file that registers more tool call parsers"),
    Flag(field="reasoning_parser", metavar="NAME", help="format of the model's reasoning, such as deepseek_r1"),
    Flag(field="reasoning_parser_plugin", metavar="FILE", help="Python file that registers more reasoning parsers"),
    Flag(
        field="enable_long_inputs",
        help="embed texts that exceed the context in pieces, and average their vectors",
    ),
    Flag(field="enable_prompt_tokens_details", help="add cached_tokens to usage"),
    Flag(field="enable_force_include_usage", help="add usage to every chunk of every stream"),
    Flag(field="enable_request_id_headers", help="send X-Request-Id in answers to probes too"),
    Flag(field="return_tokens_as_token_ids", help="write tokens of log probabilities as token_id:N in all answers"),
    Flag(field="api_key", metavar="KEY", help="keys, one of which clients must send as bearer token"),
    Flag(field="api_key_file", metavar="FILE", help="file with more keys, one per line"),
    Flag(
        field="operator_key",
        metavar="KEY",
        help="keys for calls that affect all clients, such as /sleep and /reload_weights",
    ),
    Flag(field="operator_key_file", metavar="FILE", help="file with more operator keys, one per line"),
    Flag(
        field="prefix_cache_isolation",
        help="who shares cached prefixes: one API key (tenant) or all (none); auto: tenant with several keys",
    ),
    Flag(
        field="allowed_weights",
        metavar="WHERE",
        help="directories and hub ids that /reload_weights accepts besides --model; * is any",
    ),
    Flag(
        field="allowed_hosts",
        metavar="NAME",
        help="host names under which browsers may call a server on loopback without keys; * is any",
    ),
    Flag(
        field="forwarded_allow_ips",
        metavar="ADDRESS",
        help="addresses and networks of proxies whose X-Forwarded-For is trusted; * is any (default: none)",
    ),
    Flag(field="allowed_origins", metavar="ORIGIN", help="origins that browsers may call from (CORS)"),
    Flag(field="allowed_methods", metavar="METHOD", help="HTTP methods that these origins may use"),
    Flag(field="allowed_headers", metavar="HEADER", help="headers that these origins may send"),
    Flag(field="allow_credentials", help="accept cookies and authorization from these origins"),
    Flag(field="root_path", metavar="PATH", help="path prefix of a proxy in front of the server"),
    Flag(
        field="drain_timeout_s",
        names=("--drain-timeout", "--shutdown-timeout"),
        parse=float,
        metavar="SECONDS",
        help="time for open streams to finish after SIGTERM",
    ),
    Flag(
        field="recovery_timeout_s",
        names=("--recovery-timeout",),
        parse=float,
        metavar="SECONDS",
        help="time for which requests wait for a lost scheduler or worker, and /ready holds without its scheduler",
    ),
    Flag(
        field="max_request_body_bytes",
        names=("--max-request-body-size",),
        parse=parse_bytes,
        metavar="BYTES",
        help="maximum size of an HTTP request body",
    ),
    Flag(
        field="max_request_values",
        parse=int,
        metavar="N",
        help="maximum number of values (numbers, texts, lists, objects) in a request body",
    ),
    Flag(
        field="max_unadmitted_bytes",
        names=("--max-unadmitted-size",),
        parse=parse_bytes,
        metavar="BYTES",
        help="memory for requests that are not yet submitted to the engine; one caller may use half",
    ),
    Flag(
        field="sse_keep_alive_interval_s",
        names=("--sse-keep-alive-interval",),
        parse=float,
        metavar="SECONDS",
        help="send a comment line on a stream that is silent for this time; 0: never",
    ),
    Flag(
        field="keep_alive_timeout_s",
        names=("--keep-alive-timeout",),
        parse=int,
        metavar="SECONDS",
        help="time for which an idle connection stays open; must exceed that of a proxy in front",
    ),
    Flag(field="enable_log_requests", help="log the parameters of each request, and its prompt at level debug"),
    Flag(
        field="max_log_len",
        parse=int,
        metavar="N",
        help="maximum number of characters of a prompt in the log; all if not given",
    ),
    Flag(
        field="send_timeout_s",
        names=("--send-timeout",),
        parse=float,
        metavar="SECONDS",
        help="time for an HTTP client to read what waits for it before it is disconnected; 0: no limit",
    ),
    Flag(field="disable_uvicorn_access_log", help="do not log each HTTP request"),
    Flag(field="uvicorn_log_level", help="log level of the HTTP server"),
    Flag(field="enable_tokenizer_info_endpoint", help="serve /tokenizer_info"),
    Flag(field="enable_sleep_mode", help="serve /sleep, /wake_up, /is_sleeping and /reload_weights"),
    Flag(
        field="enable_runtime_lora_updating",
        help="serve /v1/load_lora_adapter and /v1/unload_lora_adapter, for what --allowed-weights names",
    ),
    Flag(field="disable_fastapi_docs", help="do not serve /docs, /redoc and /openapi.json"),
    Flag(field="disable_status_page", help="do not serve the status page at /"),
    Flag(
        field="h11_max_incomplete_event_size",
        parse=parse_bytes,
        metavar="BYTES",
        help="maximum size of an HTTP request's first line and headers",
    ),
    Flag(field="h11_max_header_count", parse=int, metavar="N", help="maximum number of headers of an HTTP request"),
    Flag(field="ssl_keyfile", metavar="FILE", help="private key (PEM) of --ssl-certfile"),
    Flag(
        field="ssl_certfile",
        metavar="FILE",
        help="certificate chain (PEM) for HTTPS and public gRPC",
    ),
    Flag(
        field="ssl_ca_certs",
        metavar="FILE",
        help="certificate authorities (PEM) of clients; clients need no certificate if not given",
    ),
    Flag(
        field="max_stored_responses",
        parse=int,
        metavar="N",
        help="maximum number of stored answers of /v1/responses; the oldest are dropped first",
    ),
)
