"""Worker: device, weights, KV cache and model runner of one process. Blocking; knows no gRPC and no messages."""

from collections.abc import Callable

import torch

from pagoda_common.config.checkpoint.weights_source import WeightsSource
from pagoda_common.config.engine_config import EngineConfig
from pagoda_common.errors import ConfigError, OutOfMemory, StaleEpoch
from pagoda_common.grammar.bounded_grammar import BoundedCompiler
from pagoda_common.process.startup_marks import mark
from pagoda_worker.attention.choice import AttentionChoice, choose_attention
from pagoda_worker.graphs.cuda_graphs import recorded_graphs, what_waits
from pagoda_worker.loader.loaded_model import LoadedModel
from pagoda_worker.loader.model_facts import ModelFacts
from pagoda_worker.loader.model_weights import ModelWeights, release_memory
from pagoda_worker.loader.read_model import read_model
from pagoda_worker.loader.weights import Progress
from pagoda_worker.lora.lora_rows import LoraRows, attach
from pagoda_worker.lora.store import AdapterStore
from pagoda_worker.lora.targets import LoraTargets
from pagoda_worker.memory.available_blocks import AvailableBlocks, available_blocks
from pagoda_worker.memory.device import (
    DeviceInfo,
    cache_dtype,
    check_attention_backend,
    check_cache_dtype,
    claim_device,
)
from pagoda_worker.memory.huge_pages import use_huge_pages
from pagoda_worker.models.cache_groups import CacheLayout, check_chunks, make_layout
from pagoda_worker.models.model import Model
from pagoda_worker.parallel.tensor_parallel import ALONE, TensorParallel
from pagoda_worker.pooling.pooler import Pooler
from pagoda_worker.sampling.grammars import Grammars, load_compiler
from pagoda_worker.sampling.logits_processors import load_logits_processors
from pagoda_worker.steps.model_runner import ModelRunner
from pagoda_worker.steps.pending_step import DoneStep, PendingStep, StepGuard
from pagoda_worker.steps.step import StepInput, StepOutput
from pagoda_worker.steps.step_threads import StepThreads


class Worker:
    """One model on one device. One caller at a time.

    Life: init_device, load_model, determine_num_available_blocks, initialize_cache, then execute_model. Each is
    idempotent for equal arguments, except initialize_cache, which drops every sequence.
    """

    def __init__(
        self,
        *,
        num_threads: int | None = None,
        shares_machine: bool = False,
        parallel: TensorParallel = ALONE,
        device_index: int = 0,
        overlaps: bool | None = None,
    ) -> None:
        """
        Args:
            num_threads: of torch on a CPU; None: decided by the sizes of the model and of each step.
            shares_machine: the other services run on this machine too.
            parallel: the ranks that hold the model together with this worker.
            device_index: of the accelerator, if there are several.
            overlaps: launch steps before the tokens of the step before are on the host; None: if only these tokens are
            waited for.
        """
        self._threads = StepThreads(num_threads, shares_machine=shares_machine)
        self._device_index = device_index
        self.parallel = parallel
        self._config: EngineConfig | None = None
        self._device: DeviceInfo | None = None
        self._model: Model | None = None
        self._weights: ModelWeights | None = None
        self._asked_weights: WeightsSource | None = None
        """Weights of the latest init_device; None: the model's own checkpoint."""
        self._dtype = torch.float32
        self._takes_cache_groups = False
        self._runner: ModelRunner | None = None
        self.adapters: AdapterStore | None = None
        """LoRA adapters, if enabled for the loaded model."""
        self._lora_rows: LoraRows | None = None
        self._attention: AttentionChoice | None = None
        """Attention of the loaded model; None: not chosen yet."""
        self._pooler: Pooler | None = None
        self._grammars = Grammars(self._load_compiler)
        self._overlaps = overlaps
        self._guard = StepGuard(on_failure=parallel.close)  # other ranks may wait for this one in the middle of a step
        self.facts: ModelFacts | None = None
        """Set when the model is loaded."""
        self.num_blocks = 0
        """Number of allocated blocks."""
        self._had_cache = False
        """Whether there was a cache before."""
        self.sleep_level = 0
        """Sleep level: 0 is awake; 1 or 2 after `sleep`."""

    @property
    def state(self) -> str:
        """started, device, loaded, serving or sleeping."""
        if self.sleep_level:
            return "sleeping"
        if self._runner is not None:
            return "serving"
        if self._model is not None:
            return "loaded"
        return "started" if self._device is None else "device"

    @property
    def weights(self) -> WeightsSource | None:
        """Weights that replace those of the model's checkpoint; None: the checkpoint's."""
        return None if self._weights is None else self._weights.source

    def init_device(
        self,
        config: EngineConfig,
        weights: WeightsSource | None = None,
        *,
        rendezvous: str = "",
        takes_cache_groups: bool = False,
    ) -> DeviceInfo:
        """Claim the device. A changed config drops the model. With several ranks, rank 0 disconnects from the others
        and opens a new meeting place.

        Args:
            weights: for load_model; None: the model's own checkpoint.
            rendezvous: rank 0's meeting place, for the other ranks; empty: keep their connections.
            takes_cache_groups: the scheduler supports block tables by group, and snapshots of states.

        Raises:
            ConfigError: the device is missing, or has no kernels for such a KV cache or for the attention backend.
        """
        if config != self._config or self._device is None:
            self._release()
            device = claim_device(config.model.device, self._device_index)
            check_cache_dtype(config.cache.kv_cache_dtype, device.device)
            check_attention_backend(config.model.attention_backend, device.device)
            self._device, self._config = device, config
        if self._weights is not None:
            self._weights.forget_prepared()  # by another scheduler, or for a swap that did not come
        self._asked_weights = weights
        self._takes_cache_groups = takes_cache_groups
        mark("connect, device")
        if self.parallel.world_size > 1 and self.parallel.is_leader:
            self.parallel.open()
        elif rendezvous:
            self.parallel.invite(rendezvous)
        return self._device

    def _release(self) -> None:
        device = None if self._device is None else self._device.device
        self._config = self._device = self._model = self._weights = self._runner = self._attention = self.facts = None
        self.adapters = self._lora_rows = None
        self._grammars = Grammars(self._load_compiler)
        self.num_blocks = self.sleep_level = 0
        if device is not None:
            release_memory(device)

    def load_model(self, progress: Progress) -> ModelFacts:
        """Load the weights of init_device, unless already loaded; a sleeping worker wakes up.

        Raises:
            ModelLoadError: the checkpoint cannot be served.
            ConfigError: max_model_len is more than the checkpoint was made for, or the ranks cannot share the model.
            NotReady: another rank of the group did not connect.
        """
        config, device = self._claimed()
        self.parallel.connect(device.device)
        if self.facts is not None:
            self.reload_weights(self._asked_weights, progress)
            self.sleep_level = 0
            return self.facts
        loaded = read_model(
            config, device=device.device, parallel=self.parallel, source=self._asked_weights, progress=progress
        )
        self._threads.choose(loaded.facts.num_parameters, loaded.dtype, only_pools=loaded.model.only_pools)
        self._model, self._weights, self._dtype, self.facts = loaded.model, loaded.weights, loaded.dtype, loaded.facts
        self._pooler = loaded.pooler
        try:
            _ = self.cache_layout  # a scheduler that does not know it hears so before it asks for memory
            check_chunks(
                (layer.chunk for layer in loaded.model.attention_layers),
                block_size=config.cache.block_size,
                max_model_len=loaded.facts.max_model_len,
            )
        except ConfigError:
            self._model = self._weights = self.facts = None
            raise
        if config.lora.enable_lora:
            self._take_adapters(loaded.model, loaded.weights)
        self._chosen_attention()  # now: packages may compile for minutes, and this call has no time limit
        return self.facts

    def _take_adapters(self, model: Model, weights: ModelWeights) -> None:
        config, device = self._claimed()
        self._lora_rows = LoraRows(device.device)
        attach(model, self._lora_rows)
        self.adapters = AdapterStore(
            config=config.lora,
            make_targets=lambda: LoraTargets(model=model, whole=weights.whole, names=model.weights(())),
            dtype=self._dtype,
            device=device.device,
        )

    def prepare_weights(self, source: WeightsSource | None, progress: Progress) -> None:
        """Read and check other weights for `reload_weights`; None drops them. May run concurrently with other calls.

        Raises:
            ModelLoadError: the weights do not fit, or cannot be read.
            OutOfMemory: host memory has no room for them.
        """
        self._loaded()
        assert self._weights is not None, "a loaded model has weights"
        if source is None:
            self._weights.forget_prepared()
        else:
            self._weights.prepare(source, progress)

    def has_prepared(self, source: WeightsSource) -> bool:
        """Whether these weights are prepared for `reload_weights`."""
        return self._weights is not None and source in (self._weights.source, self._weights.prepared_source)

    def reload_weights(self, source: WeightsSource | None, progress: Progress) -> None:
        """Change to other weights (None: the model's own). This drops the KV cache, unless they are already in use.

        Raises:
            ModelLoadError, OutOfMemory: as `prepare_weights`; the old weights stay.
        """
        self._loaded()
        assert self._weights is not None, "a loaded model has weights"
        is_other = source != self._weights.source
        self._weights.reload(source, progress)
        self._asked_weights = source
        if is_other:
            self._runner = None
            self.num_blocks = 0

    def sleep(self, level: int) -> int:
        """Free the KV cache and the weights: move weights to host memory (1, if the device has its own memory), or drop
        them (2).

        Returns:
            Bytes freed on the device.
        """
        _, device = self._claimed()
        freed, self._attention = 0, None  # whose memory goes as well
        if self._runner is not None:
            freed = self._runner.cache_bytes
            self._runner = None
            self.num_blocks = 0
        if self._weights is not None:
            freed += self._weights.leave_device(level=level)
        else:
            release_memory(device.device)
        self.sleep_level = max(self.sleep_level, level)
        return freed

    def wake_up(self, *, weights_only: bool = False) -> None:
        """Restore the weights. `weights_only` leaves the worker asleep. There is no KV cache afterwards.

        Raises:
            ModelLoadError, OutOfMemory: the weights cannot be restored; the worker stays asleep.
        """
        if self._weights is not None:
            self._weights.come_back(_no_progress)
        if not weights_only:
            self.sleep_level = 0

    def determine_num_available_blocks(self) -> AvailableBlocks:
        """The blocks that fit the memory budget, at most as many as all sequences could fill.

        Raises:
            OutOfMemory: one request of max_model_len does not fit; the message names the flags.
        """
        self._runner = None  # an earlier cache would count as memory in use
        return available_blocks(self._loaded_model())

    def _loaded_model(self) -> LoadedModel:
        config, device = self._claimed()
        model, facts = self._loaded()
        return LoadedModel(
            model=model,
            config=config,
            max_model_len=facts.max_model_len,
            weight_bytes=facts.weight_bytes,
            dtype=self._dtype,
            cache_dtype=cache_dtype(config.cache.kv_cache_dtype, self._dtype),
            device=device.device,
            layout=self.cache_layout,
            parallel=self.parallel,
            attention=self._chosen_attention(),
        )

    @property
    def cache_layout(self) -> CacheLayout:
        """Layout of the data that the loaded model keeps of a sequence.

        Raises:
            ConfigError: the scheduler does not support the model's cache groups.
        """
        model, facts = self._loaded()
        return make_layout(model.cache_groups, max_model_len=facts.max_model_len, knows_groups=self._takes_cache_groups)

    def _chosen_attention(self) -> AttentionChoice:
        if self._attention is None:
            config, device = self._claimed()
            model, facts = self._loaded()
            self._attention = choose_attention(
                config,
                model.attention_layers,
                dtype=self._dtype,
                max_model_len=facts.max_model_len,
                device=device.device,
                has_windows=self.cache_layout.has_windows,
            )
        return self._attention

    def initialize_cache(
        self,
        *,
        num_blocks: int,
        num_cpu_blocks: int,
        num_state_snapshots: int = 0,
        num_cpu_state_snapshots: int = 0,
    ) -> int:
        """Allocate the KV cache and the states of recurrent layers, and drop every sequence.

        Returns:
            Nanoseconds to move one block between device and host; 0 without host blocks.

        Raises:
            ConfigError: num_blocks is below 1.
            OutOfMemory: the cache does not fit.
        """
        config, device = self._claimed()
        model, facts = self._loaded()
        if num_blocks < 1 and model.attention_layers:
            raise ConfigError(f"num_blocks is {num_blocks}, must be at least 1", field="num_blocks")
        self._runner = None
        if self.adapters is not None:
            self.adapters.forget_numbers()
        loaded = self._loaded_model()
        if loaded.is_large:
            use_huge_pages(model.parameters())
        try:
            kv_cache = loaded.make_cache(num_blocks=num_blocks, num_cpu_blocks=num_cpu_blocks)
            states = loaded.make_states(num_snapshots=num_state_snapshots, num_cpu_snapshots=num_cpu_state_snapshots)
        except (MemoryError, torch.OutOfMemoryError) as error:
            raise OutOfMemory(f"cannot allocate {num_blocks} KV-cache blocks: lower --kv-cache-memory") from error
        if not self._had_cache:  # a scheduler that is back, and its clients, wait for a later one
            kv_cache.memory_ahead.take_early()
            self._had_cache = True
        swap_block_ns = kv_cache.time_swap() if num_cpu_blocks and num_blocks else 0
        self._runner = ModelRunner(
            model=model,
            kv_cache=kv_cache,
            max_num_seqs=config.scheduler.max_num_seqs,
            max_model_len=facts.max_model_len,
            dtype=self._dtype,
            device=device.device,
            logprobs_mode=config.model.logprobs_mode,
            logits_processors=load_logits_processors(
                config.model.logits_processors, vocab_size=model.vocab_size, device=device.device
            ),
            grammars=self._grammars,
            eos_token_ids=facts.eos_token_ids,
            parallel=self.parallel,
            speculative=config.speculative,
            states=states,
            decode_graphs=recorded_graphs(loaded, kv_cache) if device.device.type == "cuda" else None,
            attention=loaded.attention,
            pooler=self._pooler,
            lora=self._lora_rows,
            adapters=self.adapters,
            overlaps=self._can_overlap(loaded) if self._overlaps is None else self._overlaps,
        )
        self._guard.forget_failure()
        self.num_blocks = num_blocks
        mark("KV cache")
        return swap_block_ns

    @staticmethod
    def _can_overlap(loaded: LoadedModel) -> bool:
        return loaded.device.type == "cuda" and what_waits(loaded) is None

    def execute_model(self, step: StepInput) -> StepOutput:
        """Run one step, while no other step is in progress.

        Raises:
            PagodaError: the whole step failed. The content of the slots is then unknown: every later step is refused
            until initialize_cache.
        """
        return self.begin(step).result()

    def can_begin(self, step: StepInput) -> bool:
        """Whether the step may begin before those in flight are finished."""
        return self._runner is None or self._runner.can_begin(step)

    def begin(self, step: StepInput) -> PendingStep:
        """Begin the next step, if `can_begin`. Its result raises like execute_model."""
        if self._runner is None:
            return DoneStep(StaleEpoch("the cache is not initialized: call InitializeCache first"))
        self._threads.use_for(step)
        return self._guard.begin(step, self._runner.begin)

    def has_rested(self, seconds: float) -> bool:
        """Whether no step ran for `seconds`. May be called from any thread, like `touch_ahead`."""
        return self._guard.have_rested(seconds)

    def touch_ahead(self, may_continue: Callable[[], bool]) -> None:
        """Touch memory for the next blocks, as long as no step waits."""
        runner = self._runner
        if runner is not None:
            runner.touch_ahead(may_continue)

    def expect(self, step: StepInput) -> None:
        """Start compiling the constraints of a step that runs soon. Returns at once; any thread may call it."""
        for request in step.new_requests:
            if request.sampling_params.structured_outputs is not None:
                self._grammars.template(request.sampling_params.structured_outputs)

    @property
    def grammars(self) -> Grammars:
        """Compiled constraints of the loaded model."""
        return self._grammars

    def _load_compiler(self) -> BoundedCompiler:
        config, _ = self._claimed()
        model, facts = self._loaded()
        return load_compiler(
            config.model.model,
            revision=config.model.revision,
            vocab_size=model.vocab_size,
            eos_token_ids=facts.eos_token_ids,
        )

    def _claimed(self) -> tuple[EngineConfig, DeviceInfo]:
        if self._config is None or self._device is None:
            raise StaleEpoch("the device is not initialized: call InitDevice first")
        return self._config, self._device

    def _loaded(self) -> tuple[Model, ModelFacts]:
        if self._model is None or self.facts is None:
            raise StaleEpoch("the model is not loaded: call LoadModel first")
        return self._model, self.facts


def _no_progress(loaded: int, total: int) -> None:
    """No one asks."""
