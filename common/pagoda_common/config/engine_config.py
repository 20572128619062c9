"""The one configuration object: built in `__main__`, validated here, passed down and never changed.

Values measured at run time (number of blocks, the checkpoint's context length) are results and are not part of it.
"""

from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

from pagoda_common.config.checkpoint.generation_config import parse_object
from pagoda_common.config.kv_events_config import kv_events_config
from pagoda_common.config.lora_config import LoraConfig
from pagoda_common.config.observability_config import ObservabilityConfig
from pagoda_common.config.pooler_config import pooler_config
from pagoda_common.config.quantization import parse_quantization
from pagoda_common.config.security_config import SecurityConfig
from pagoda_common.config.speculative_config import SpeculativeConfig
from pagoda_common.config.structured_outputs_config import structured_outputs_defaults
from pagoda_common.errors import ConfigError

DType: TypeAlias = Literal["auto", "float32", "bfloat16", "float16"]
Device: TypeAlias = Literal["auto", "cpu", "cuda"]
ActivationQuantization: TypeAlias = Literal["auto", "none"]
AttentionBackend: TypeAlias = Literal["auto", "triton", "flashinfer", "flash_attn"]
KVCacheDType: TypeAlias = Literal["auto", "int8", "fp8"]
ModelImpl: TypeAlias = Literal["auto", "pagoda", "transformers"]
Runner: TypeAlias = Literal["auto", "generate", "pooling"]
Convert: TypeAlias = Literal["auto", "none", "embed", "classify", "reward"]
LoadFormat: TypeAlias = Literal["auto", "safetensors", "dummy"]
SchedulingPolicy: TypeAlias = Literal["fcfs", "priority", "fair"]
RoutingPolicy: TypeAlias = Literal["prefix", "round_robin"]
PreemptionMode: TypeAlias = Literal["auto", "recompute", "swap"]
LogprobsMode: TypeAlias = Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]

EMBEDDED_MODEL = "pagoda-tiny"
"""Name of the model that ships with Pagoda (pagoda_common/models/pagoda-tiny)."""
FIT_MEMORY = -1
"""As max_model_len: the longest context whose KV cache fits, at most the checkpoint's; auto on the command line."""


def _check(condition: bool, name: str, value: object, bound: str) -> None:
    if not condition:
        raise ConfigError(f"{name} is {value!r}, must be {bound}", field=name)


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    _check(value in choices, name, value, "one of " + ", ".join(choices))


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Which model, and how its weights are held."""

    model: str = EMBEDDED_MODEL
    """Directory or hub id of the checkpoint; the embedded model by default."""
    revision: str | None = None
    """Hub revision."""
    tokenizer: str | None = None
    """Directory or hub id of the tokenizer; None takes the model's."""
    served_model_name: tuple[str, ...] = ()
    """Names clients use; empty takes the model's."""
    dtype: DType = "auto"
    """Data type of weights and KV cache; auto takes the checkpoint's (float32 checkpoints stay float32)."""
    quantization: str | None = None
    """How weights are held: int8, int4 and the other schemes of pagoda_common.config.quantization make small integers
    of floats; a method such as gptq insists that the checkpoint is of it; None takes what the checkpoint says."""
    activation_quantization: ActivationQuantization = "auto"
    """auto: with quantized weights (int8, int4) in bfloat16 on a CPU, a layer's inputs (activations) also become 8-bit
    integers while it computes, by a scale for each token and group of at most 128 inputs (dynamic activation
    quantization: products of integers). none: they stay bfloat16. Without effect with other weights, in float32 and
    float16, and on a GPU."""
    device: Device = "auto"
    """auto takes an accelerator if there is one."""
    max_model_len: int | None = None
    """Longest prompt plus output in tokens; None takes the checkpoint's, FIT_MEMORY no more of it than fits."""
    load_format: LoadFormat = "auto"
    """auto and safetensors read safetensors; dummy makes random weights."""
    model_impl: ModelImpl = "auto"
    """Which implementation runs the model. pagoda: one of Pagoda's own, or of an installed package. transformers: the
    modules of transformers with paged attention. auto: Pagoda's own where there is one, else transformers'."""
    runner: Runner = "auto"
    """Use of the model. pooling: only embeddings, labels and scores, each text whole in one step, without a KV
    cache. generate: text, and embeddings of the last token. auto: pooling for models that cannot generate, and where
    the checkpoint's files ask for what needs all tokens."""
    convert: Convert = "auto"
    """For pooling: embed drops the head that generates or tells labels apart, classify and reward keep or expect one.
    auto: as config.json names the architecture."""
    pooler_config: str = ""
    """JSON object that says how hidden states are pooled; empty: as the checkpoint's files say."""
    hf_overrides: str = ""
    """JSON object whose entries take the place of those in the checkpoint's config.json."""
    max_logprobs: int = 20
    """Bound on logprobs per token; -1 allows the vocabulary."""
    logprobs_mode: LogprobsMode = "raw_logprobs"
    """Raw is before masks, penalties, temperature and filters, processed is after them; logits are not normalised."""
    logits_processors: tuple[str, ...] = ()
    """Logits processors (module:Class) to load besides the installed ones."""
    reference_kernels: tuple[str, ...] = ()
    """Kernels whose operations run as plain PyTorch instead, such as rms_norm; "all" is every one, "none" no one. Empty
    leaves it to the worker: none, but those that round otherwise than PyTorch in float32."""
    attention_backend: AttentionBackend = "auto"
    """Kernels for attention on a GPU: Pagoda's (triton), those of an installed package, or for each shape of a
    step those that were measured to be the fastest (auto). What a package cannot serve, ours do."""
    enforce_eager: bool = False
    """Launch every kernel of every step, without CUDA graphs; on a CPU there are none."""
    generation_config: str = "auto"
    """Where defaults of sampling come from: auto is the checkpoint, vllm is nowhere, else a directory."""
    override_generation_config: str = ""
    """JSON object that goes before generation_config; empty overrides nothing."""
    structured_outputs_config: str = ""
    """JSON object of options that hold for all structured outputs; empty has none."""
    seed: int = 0
    """Seed of dummy weights."""

    @property
    def fixed_max_model_len(self) -> int | None:
        """max_model_len where it is a number; None where the checkpoint or the memory decides."""
        return None if self.max_model_len == FIT_MEMORY else self.max_model_len

    @property
    def fits_max_model_len(self) -> bool:
        """Whether the context may be shorter than the checkpoint's, because memory is too small."""
        return self.max_model_len == FIT_MEMORY

    def __post_init__(self) -> None:
        _check(bool(self.model), "model", self.model, "a directory or hub id")
        _check_choice("dtype", self.dtype, get_args(DType))
        parse_quantization(self.quantization)
        _check_choice("activation_quantization", self.activation_quantization, get_args(ActivationQuantization))
        _check_choice("device", self.device, get_args(Device))
        _check_choice("load_format", self.load_format, get_args(LoadFormat))
        _check_choice("model_impl", self.model_impl, get_args(ModelImpl))
        _check_choice("runner", self.runner, get_args(Runner))
        _check_choice("convert", self.convert, get_args(Convert))
        pooler_config(self.pooler_config)
        parse_object(self.hf_overrides, field="hf_overrides")
        _check_choice("attention_backend", self.attention_backend, get_args(AttentionBackend))
        length = self.fixed_max_model_len
        _check(length is None or length >= 1, "max_model_len", length, "at least 1, or -1 for auto")
        _check(self.max_logprobs >= -1, "max_logprobs", self.max_logprobs, "at least -1")
        parse_object(self.override_generation_config, field="override_generation_config")
        structured_outputs_defaults(self.structured_outputs_config)
        _check_choice("logprobs_mode", self.logprobs_mode, get_args(LogprobsMode))
        for name in self.logits_processors:
            module, _, attribute = name.partition(":")
            _check(bool(module and attribute), "logits_processors", name, "module:Class")


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheConfig:
    """The paged KV cache."""

    block_size: int = 16
    """Tokens in one KV-cache block."""
    kv_cache_dtype: KVCacheDType = "auto"
    """auto is the weights' data type. int8 (with a scale for each token and KV head) and fp8 (e4m3, with a scale of 1,
    for CUDA devices of compute capability 8.9 or newer) take about half of bfloat16."""
    kv_cache_memory_bytes: int | None = None
    """Bytes for the KV cache; None lets the worker choose."""
    num_blocks_override: int | None = None
    """Exactly this many blocks, whatever the memory says (for tests); None measures."""
    gpu_memory_utilization: float = 0.92
    """Share of an accelerator's memory for weights, activations, CUDA graphs and KV cache; what other processes have of
    it counts as well."""
    enable_prefix_caching: bool = True
    """Share the KV of equal prompt prefixes."""
    cpu_kv_cache_memory_bytes: int = 0
    """Bytes of host memory for swapped-out blocks; 0 turns swapping off."""
    snapshot_interval: int = 512
    """Tokens between two snapshots of a sequence's recurrent state, rounded up to whole blocks, where the model has
    recurrent layers. A prompt's last full block has a snapshot besides."""
    kv_events_config: str = ""
    """JSON object: which events of the prefix cache are made and published; see KVEventsConfig."""

    def __post_init__(self) -> None:
        kv_events_config(self.kv_events_config)
        _check_choice("kv_cache_dtype", self.kv_cache_dtype, get_args(KVCacheDType))
        _check(1 <= self.block_size <= 256, "block_size", self.block_size, "between 1 and 256 tokens")
        memory = self.kv_cache_memory_bytes
        _check(memory is None or memory > 0, "kv_cache_memory_bytes", memory, "more than 0 bytes")
        blocks = self.num_blocks_override
        _check(blocks is None or blocks >= 1, "num_blocks_override", blocks, "at least 1")
        share = self.gpu_memory_utilization
        _check(0 < share <= 1, "gpu_memory_utilization", share, "in (0, 1]")
        swap = self.cpu_kv_cache_memory_bytes
        _check(swap >= 0, "cpu_kv_cache_memory_bytes", swap, "at least 0 bytes")
        _check(self.snapshot_interval >= 1, "snapshot_interval", self.snapshot_interval, "at least 1 token")


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerConfig:
    """Limits of one step, and the order of the queue."""

    max_num_seqs: int = 256
    """Most sequences in a batch."""
    max_num_batched_tokens: int = 2048
    """Most tokens in a batch."""
    enable_chunked_prefill: bool = True
    """Let a long prompt span steps; without it a prompt runs whole or waits."""
    long_prefill_token_threshold: int = 0
    """Most tokens of one prompt in one step; 0 is no bound of its own."""
    policy: SchedulingPolicy = "fcfs"
    """Order of the waiting queue: by arrival, by priority, or fairly between tenants."""
    preemption_mode: PreemptionMode = "auto"
    """With host memory for swapping: move evicted blocks there when that is cheaper (auto), always, or never."""
    routing_policy: RoutingPolicy = "prefix"
    """Which of several worker groups takes a request: where its prefix is cached, against load; or each in turn."""
    async_scheduling: bool = True
    """Send step N+1 before the result of step N is back."""
    step_watchdog_s: float = 2.0
    """Least time after which an unanswered step means that the worker hangs (more where steps are slow); 0 is never."""
    orphan_lease_s: float = 30.0
    """How long a stream that can be resumed outlives its frontend, for another one to resume it."""
    max_serving_groups: int | None = None
    """Worker groups that serve at the same time; more stand by, ready to take over. None lets all of them serve."""
    max_num_queued_reqs: int = 16_384
    """Most sequences waiting; 0 is no bound."""
    max_num_queued_tokens: int = 32 * 1024**2
    """Most prompt tokens waiting; 0 is no bound."""
    max_queued_share: float = 0.5
    """Part of both bounds for one client: an API key, or an address where there are no keys."""

    def __post_init__(self) -> None:
        _check(1 <= self.max_num_seqs <= 65535, "max_num_seqs", self.max_num_seqs, "between 1 and 65535")
        tokens = self.max_num_batched_tokens
        _check(tokens >= 1, "max_num_batched_tokens", tokens, "at least 1")
        threshold = self.long_prefill_token_threshold
        _check(threshold >= 0, "long_prefill_token_threshold", threshold, "at least 0")
        _check_choice("scheduling_policy", self.policy, get_args(SchedulingPolicy))
        _check_choice("preemption_mode", self.preemption_mode, get_args(PreemptionMode))
        _check_choice("routing_policy", self.routing_policy, get_args(RoutingPolicy))
        _check(self.step_watchdog_s >= 0, "step_watchdog_s", self.step_watchdog_s, "at least 0 seconds")
        _check(self.orphan_lease_s >= 0, "orphan_lease_s", self.orphan_lease_s, "at least 0 seconds")
        groups = self.max_serving_groups
        _check(groups is None or groups >= 1, "max_serving_groups", groups, "at least 1")
        for name in ("max_num_queued_reqs", "max_num_queued_tokens"):
            bound = getattr(self, name)
            _check(bound >= 0, name, bound, "at least 0")
        share = self.max_queued_share
        _check(0 < share <= 1, "max_queued_share", share, "above 0 and at most 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """How many workers are started; a scheduler takes as many as register."""

    tensor_parallel_size: int = 1
    """Ranks that hold one copy of the model together."""
    data_parallel_size: int = 1
    """Worker groups, each with a copy of the model."""
    standby_workers: int = 0
    """Further worker groups with the model in memory that serve no one until a serving one is lost."""
    threads: int | None = None
    """Threads of torch in each worker on a CPU; None shares the cores between several, and leaves one its own way."""

    def __post_init__(self) -> None:
        _check(self.tensor_parallel_size >= 1, "tensor_parallel_size", self.tensor_parallel_size, "at least 1")
        _check(self.data_parallel_size >= 1, "data_parallel_size", self.data_parallel_size, "at least 1")
        _check(self.standby_workers >= 0, "standby_workers", self.standby_workers, "at least 0")
        _check(self.threads is None or self.threads >= 1, "threads", self.threads, "at least 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """Everything that decides how the engine runs."""

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    speculative: SpeculativeConfig = field(default_factory=SpeculativeConfig)
    """Off by default."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """Off by default."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    security: SecurityConfig = field(default_factory=SecurityConfig)
    """Security of the connections between the engine's processes."""
    observability: ObservabilityConfig = field(default_factory=ObservabilityConfig)
    """Logs and traces."""

    @property
    def model_config(self) -> ModelConfig:
        """`model`, under vLLM's name."""
        return self.model

    @property
    def cache_config(self) -> CacheConfig:
        """`cache`, under vLLM's name."""
        return self.cache

    @property
    def scheduler_config(self) -> SchedulerConfig:
        """`scheduler`, under vLLM's name."""
        return self.scheduler

    @property
    def parallel_config(self) -> ParallelConfig:
        """`parallel`, under vLLM's name."""
        return self.parallel

    @property
    def lora_config(self) -> LoraConfig | None:
        """`lora`, under vLLM's name; None without adapters."""
        return self.lora if self.lora.enable_lora else None

    @property
    def speculative_config(self) -> SpeculativeConfig:
        """`speculative`, under vLLM's name."""
        return self.speculative

    def __post_init__(self) -> None:
        if self.model.device == "cpu":
            _check(self.cache.kv_cache_dtype != "fp8", "kv_cache_dtype", "fp8", "auto or int8 on a CPU")
            backend = self.model.attention_backend
            _check(backend == "auto", "attention_backend", backend, "auto on a CPU")
        if not self.scheduler.enable_chunked_prefill and self.model.fixed_max_model_len is not None:
            _check(
                self.scheduler.max_num_batched_tokens >= self.model.fixed_max_model_len,
                "max_num_batched_tokens",
                self.scheduler.max_num_batched_tokens,
                f"at least max_model_len ({self.model.fixed_max_model_len}) without chunked prefill",
            )
