"""vLLM's options that Pagoda does not need or does not have: accepted where they change nothing, else refused.

One table for the keyword arguments of LLM and for the flags of ``pagoda serve``. An option that Pagoda does have is no
business of this file.
"""

import argparse
from dataclasses import dataclass
from typing import Any

from pagoda_common.errors import ConfigError


@dataclass(frozen=True, slots=True)
class VllmOption:
    """One option: as keyword `name`, as flag --name."""

    name: str
    neutral: tuple[Any, ...] | None
    """Values that are accepted, besides None; None accepts every value."""
    reason: str
    """Why it has no effect, or why other values are refused."""
    is_switch: bool = False
    """The flag takes no value."""
    short: str | None = None
    """Second flag."""
    in_help: bool = False
    """Worth a line in ``--help``."""

    @property
    def flags(self) -> tuple[str, ...]:
        """Option strings."""
        return ("--" + self.name.replace("_", "-"), *([self.short] if self.short else []))

    def check(self, value: Any) -> None:
        """Accept `value` or refuse it.

        Raises:
            ConfigError: it asks for what is not there.
        """
        accepted = value is None or self.neutral is None or any(_same(value, neutral) for neutral in self.neutral)
        if not accepted:
            asked = self.name if self.is_switch else f"{self.name}={value}"
            raise ConfigError(f"{asked} is not supported: {self.reason}", field=self.name)


def _same(value: Any, neutral: Any) -> bool:
    if isinstance(value, str) and not isinstance(neutral, str):
        return value == str(neutral)
    return type(value) is type(neutral) and bool(value == neutral)


_MULTIMODAL = "models take text only"
_ONE_RANK = "--tensor-parallel-size N divides every layer among N workers; --data-parallel-size N runs N copies"
_NO_CODE = "Pagoda never runs code of a checkpoint, and refuses a model that needs it"
_NO_PLAN = "nothing is compiled, and the worker chooses its CUDA graphs; --enforce-eager turns them off"
_DRAFT = "drafts come from prompt lookup; --speculative-config sets the number of tokens"
_GRAMMAR = "one engine (llguidance) handles all structured outputs"

OPTIONS = (
    VllmOption("pipeline_parallel_size", (1,), _ONE_RANK, short="-pp", in_help=True),
    VllmOption("decode_context_parallel_size", (1,), _ONE_RANK),
    VllmOption("prefill_context_parallel_size", (1,), _ONE_RANK),
    VllmOption("enable_expert_parallel", (False,), _ONE_RANK, is_switch=True),
    VllmOption("nnodes", (1,), "workers of other machines register with the scheduler (pagoda-worker --scheduler)"),
    VllmOption("node_rank", (0,), "workers of other machines register with the scheduler"),
    VllmOption("distributed_executor_backend", ("mp", "uni"), "workers are processes that register over gRPC"),
    VllmOption("trust_remote_code", None, _NO_CODE, is_switch=True, in_help=True),
    VllmOption("cpu_offload_gb", (0, 0.0), "weights stay on one device"),
    VllmOption("spec_method", (), _DRAFT),
    VllmOption("spec_model", (), _DRAFT),
    VllmOption("spec_tokens", (), _DRAFT),
    VllmOption("hf_token", (), "set HF_TOKEN in the environment"),
    VllmOption("download_dir", (), "set HF_HOME in the environment"),
    VllmOption("skip_tokenizer_init", (False,), "texts need a tokenizer", is_switch=True),
    VllmOption("enable_prompt_embeds", (False,), "prompts are texts or token ids", is_switch=True),
    VllmOption(
        "task",
        ("auto", "generate", "embed", "classify", "score", "reward"),
        "use --runner and --convert",
    ),
    VllmOption("tokenizer_mode", ("auto", "hf", "mistral"), "Pagoda recognizes the tokenizer by its files"),
    VllmOption("limit_mm_per_prompt", ({}, "{}"), _MULTIMODAL),
    VllmOption("mm_processor_kwargs", ({}, "{}"), _MULTIMODAL),
    VllmOption("allowed_local_media_path", ("",), _MULTIMODAL),
    VllmOption("mm_processor_cache_gb", None, _MULTIMODAL),
    VllmOption("mm_encoder_tp_mode", None, _MULTIMODAL),
    VllmOption("media_io_kwargs", ("{}",), _MULTIMODAL),
    VllmOption("disable_chunked_mm_input", None, _MULTIMODAL, is_switch=True),
    VllmOption("interleave_mm_strings", None, _MULTIMODAL, is_switch=True),
    VllmOption("tokenizer_revision", (), "--revision also applies to the tokenizer"),
    VllmOption("code_revision", None, "Pagoda never runs code of a checkpoint"),
    VllmOption("config_format", ("auto", "hf", "mistral"), "Pagoda recognizes the format by its files"),
    VllmOption("hf_config_path", (), "Pagoda uses the checkpoint's config.json; --hf-overrides replaces entries"),
    VllmOption("rope_scaling", ({}, "{}"), "Pagoda uses the checkpoint's config.json; --hf-overrides replaces entries"),
    VllmOption("rope_theta", (), "Pagoda uses the checkpoint's config.json; --hf-overrides replaces entries"),
    VllmOption("disable_sliding_window", (False,), "the checkpoint sets the windows", is_switch=True),
    VllmOption("model_loader_extra_config", ({}, "{}"), "loading safetensors needs no options"),
    VllmOption("ignore_patterns", None, "only safetensors are read"),
    VllmOption("safetensors_load_strategy", None, "files are read by position, not mapped"),
    VllmOption("pt_load_map_location", None, "only safetensors are read"),
    VllmOption("use_tqdm_on_load", None, "progress is logged", is_switch=True),
    VllmOption("prefix_caching_hash_algo", None, "hashes are internal to the scheduler"),
    VllmOption("kv_offloading_size", (0, 0.0), "use --cpu-kv-cache-memory BYTES"),
    VllmOption(
        "calculate_kv_scales", (False,), "int8 scales are computed for each row; fp8 has a scale of 1", is_switch=True
    ),
    VllmOption("data_parallel_backend", ("mp",), "workers are processes that register over gRPC"),
    VllmOption("enable_eplb", (False,), _ONE_RANK, is_switch=True),
    VllmOption("enable_dbo", (False,), _ONE_RANK, is_switch=True),
    VllmOption("all2all_backend", None, "there is no all-to-all communication"),
    VllmOption("moe_backend", ("auto",), "there is one implementation of experts"),
    VllmOption("max_parallel_loading_workers", None, "each worker loads its weights independently"),
    VllmOption("max_num_partial_prefills", (1,), "--long-prefill-token-threshold limits long prompts"),
    VllmOption("stream_interval", (1,), "every token is sent at once"),
    VllmOption("lora_dtype", ("auto",), "adapters use the model's data type"),
    VllmOption("guided_decoding_backend", None, _GRAMMAR),
    VllmOption("structured_outputs_config.backend", None, _GRAMMAR),
    VllmOption("logits_processor_pattern", (), "use --logits-processors"),
    VllmOption("chat_template_content_format", ("auto", "string", "openai"), "text content is the same in all formats"),
    VllmOption("response_role", ("assistant",), "responses have the role assistant"),
    VllmOption("enable_metrics", None, "/metrics is always served", is_switch=True),
    VllmOption("show_hidden_metrics_for_version", None, "no metric is hidden"),
    VllmOption("enable_server_load_tracking", None, "the load is always tracked", is_switch=True),
    VllmOption("enable_sleep_mode", None, "LLM.sleep needs no switch", is_switch=True),
    VllmOption("tool_server", (), "clients run tools themselves"),
    VllmOption(
        "profiler_config", ({}, "{}"), "use --scheduler-metrics-port, which shows the time of each stage of a step"
    ),
    VllmOption("no_enable_log_requests", None, "requests are not logged unless --enable-log-requests", is_switch=True),
    VllmOption("enable_log_outputs", (False,), "outputs are not logged", is_switch=True),
    VllmOption("attention_config", ({}, "{}"), "use --attention-backend"),
    VllmOption("enable_flash_late_interaction", None, "token vectors are compared in the frontend", is_switch=True),
    VllmOption("no_enable_flash_late_interaction", None, "token vectors are compared in the frontend", is_switch=True),
    VllmOption("compilation_config", None, _NO_PLAN, short="-cc"),
    VllmOption("optimization_level", None, _NO_PLAN, short="-O"),
    VllmOption("cuda_graph_sizes", None, _NO_PLAN),
    VllmOption("disable_cascade_attn", None, "there is no cascade attention", is_switch=True),
    VllmOption("max_seq_len_to_capture", None, _NO_PLAN),
    VllmOption("disable_custom_all_reduce", None, "there is no custom all-reduce", is_switch=True),
    VllmOption("swap_space", None, "use --cpu-kv-cache-memory BYTES", in_help=True),
    VllmOption("disable_log_requests", None, "requests are not logged unless --enable-log-requests", is_switch=True),
    VllmOption("disable_async_output_proc", None, "output is always processed in another process", is_switch=True),
    VllmOption("enable_ssl_refresh", None, "changed certificates are always reloaded", is_switch=True),
    VllmOption("use_v2_block_manager", None, "there is one block pool", is_switch=True),
)
BY_NAME = {option.name: option for option in OPTIONS}

REFUSED_FLAGS = {
    "--headless": "pagoda-scheduler and pagoda-worker run without a frontend",
    "--grpc": "gRPC is always served, on --grpc-port",
    "--uds": "HTTP listens on --host and --port",
    "--api-server-count": "start more frontends for one scheduler: pagoda-frontend --scheduler HOST:PORT",
    "--middleware": "the frontend does not support middleware",
    "--scheduler-cls": "the scheduler cannot be replaced",
    "--worker-cls": "the worker cannot be replaced",
    "--kv-transfer-config": "the KV cache cannot move to another worker",
    "--worker-extension-cls": "the worker cannot be extended",
    "--master-addr": "workers of other machines register with the scheduler",
    "--master-port": "workers of other machines register with the scheduler",
    "--log-config-file": "use PAGODA_LOG_LEVEL and --log-format",
    "--ssl-cert-reqs": "--ssl-ca-certs checks client certificates",
}
"""Flags of vLLM that nothing stands for, and why."""


def add_vllm_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that `parser` does not have; read them with `check_vllm_args`."""
    parser.set_defaults(vllm_options=define_vllm_flags(parser))


def define_vllm_flags(parser: argparse.ArgumentParser) -> list[VllmOption]:
    """Add the flags that `parser` does not have; return their options."""
    group = parser.add_argument_group("accepted for compatibility with vLLM")
    added = []
    for option in OPTIONS:
        flags = [flag for flag in option.flags if flag not in parser._option_string_actions]
        if option.flags[0] not in flags:
            continue
        added.append(option)
        effect = f"no effect: {option.reason}" if option.neutral is None else _accepted(option)
        extra: dict[str, Any] = {"dest": option.name, "default": None}
        extra |= {"action": "store_true"} if option.is_switch else {"metavar": "VALUE"}
        group.add_argument(*flags, help=effect if option.in_help else argparse.SUPPRESS, **extra)
    return added


def _accepted(option: VllmOption) -> str:
    values = [str(value) for value in option.neutral or () if value is not False]
    return f"{'only ' + ' or '.join(values) if values else 'refused'}: {option.reason}"


def check_vllm_args(args: argparse.Namespace) -> str:
    """Refuse what the flags of `add_vllm_flags` ask for.

    Returns:
        One line on those that were given and have no effect; empty when there are none.

    Raises:
        ConfigError: one asks for what is not there; `field` names it.
    """
    idle = []
    for option in args.vllm_options:
        value = getattr(args, option.name)
        option.check(value)
        if value is not None and option.neutral is None:
            idle.append(f"{option.flags[0]} ({option.reason})")
    return f"without effect here: {', '.join(idle)}" if idle else ""
