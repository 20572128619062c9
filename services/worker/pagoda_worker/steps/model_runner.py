"""ModelRunner: runs steps of a batch. Knows the model, the KV cache and the slots; no gRPC, no messages."""

from collections.abc import Callable

import numpy as np
import torch

from pagoda_common.config.engine_config import LogprobsMode
from pagoda_common.config.speculative_config import SpeculativeConfig
from pagoda_common.errors import Code
from pagoda_kernels.decoder.decoder_layers import DecoderLayers
from pagoda_worker.attention.choice import AttentionChoice
from pagoda_worker.graphs.decode_graphs import DecodeGraphs
from pagoda_worker.lora.lora_rows import LoraRows
from pagoda_worker.lora.store import AdapterStore
from pagoda_worker.memory.kv_cache import KVCache
from pagoda_worker.memory.state_pool import StatePool
from pagoda_worker.models.model import Model
from pagoda_worker.parallel.tensor_parallel import ALONE, TensorParallel
from pagoda_worker.pooling.pooler import LAST_TOKEN, Pooler
from pagoda_worker.sampling.drafter import Drafter
from pagoda_worker.sampling.grammars import Grammars, no_compiler
from pagoda_worker.sampling.logits_processors import LogitsProcessors
from pagoda_worker.sampling.sampler import Sampler
from pagoda_worker.sampling.structured import Constraints
from pagoda_worker.steps.forward_pass import ForwardPass
from pagoda_worker.steps.input_batch import InputBatch
from pagoda_worker.steps.pending_step import DoneStep, PendingStep
from pagoda_worker.steps.sampled_rows import SampledRows
from pagoda_worker.steps.step import NULL_BLOCK, StepInput, StepOutput
from pagoda_worker.steps.step_clock import StepClock
from pagoda_worker.steps.step_sampler import StepSampler
from pagoda_worker.steps.steps_in_flight import StepsInFlight


class ModelRunner:
    """The persistent batch and the forward pass. One caller at a time."""

    def __init__(
        self,
        *,
        model: Model,
        kv_cache: KVCache,
        max_num_seqs: int,
        max_model_len: int,
        dtype: torch.dtype,
        device: torch.device,
        logprobs_mode: LogprobsMode = "raw_logprobs",
        logits_processors: LogitsProcessors | None = None,
        grammars: Grammars | None = None,
        eos_token_ids: tuple[int, ...] = (),
        parallel: TensorParallel = ALONE,
        speculative: SpeculativeConfig | None = None,
        states: StatePool | None = None,
        decode_graphs: DecodeGraphs | None = None,
        overlaps: bool = False,
        attention: AttentionChoice | None = None,
        pooler: Pooler | None = None,
        lora: LoraRows | None = None,
        adapters: AdapterStore | None = None,
    ) -> None:
        """
        Args:
            pooler: pools hidden states; None: takes the last token.
            states: of recurrent layers.
            decode_graphs: recorded ones, over the same model and cache.
            attention: chooses attention kernels in steps without a graph; None: Pagoda's kernels.
            lora: adapter rows for the model's layers; None: requests cannot have adapters.
            adapters: those that requests may have.
            overlaps: launch a step while the one before computes; never used with several ranks.
        """
        self.forward = ForwardPass(
            model=model,
            kv_cache=kv_cache,
            dtype=dtype,
            device=device,
            states=states,
            decode_graphs=decode_graphs,
            attention=attention,
            lora=lora,
        )
        self._adapters = adapters
        self._parallel = parallel
        self._kv_cache = kv_cache
        self._states = states
        drafter = None
        if speculative is not None and speculative.is_on:
            drafter = Drafter(config=speculative, max_num_seqs=max_num_seqs)
        self.input_batch = InputBatch(
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            block_size=kv_cache.block_size,
            num_blocks=kv_cache.num_blocks,
            vocab_size=model.vocab_size,
            drafter=drafter,
            groups=kv_cache.layout.groups,
        )
        self._processors = logits_processors or LogitsProcessors()
        self._sampler = Sampler(
            columns=self.input_batch.sampling, processors=self._processors, never_waits=device.type == "cuda"
        )
        self._in_flight = StepsInFlight(
            batch=self.input_batch,
            forward=self.forward,
            sampler=self._sampler,
            kv_cache=kv_cache,
            states=states,
            device=device,
            logprobs_mode=logprobs_mode,
        )
        self._overlaps = overlaps and parallel.world_size == 1
        self._is_alone = not overlaps and parallel.world_size == 1
        """Whether steps may overlap, and there is only one rank."""
        self._constraints = Constraints(
            grammars=grammars or Grammars(no_compiler),
            max_num_seqs=max_num_seqs,
            vocab_size=model.vocab_size,
            eos_token_ids=eos_token_ids,
        )
        self._step_sampler = StepSampler(
            batch=self.input_batch,
            forward=self.forward,
            sampler=self._sampler,
            processors=self._processors,
            constraints=self._constraints,
            kv_cache=kv_cache,
            states=states,
            parallel=parallel,
            device=device,
            logprobs_mode=logprobs_mode,
            pooler=pooler or Pooler(spec=LAST_TOKEN),
        )

    @property
    def cache_bytes(self) -> int:
        """Bytes of the KV cache and of states on the device."""
        return self._kv_cache.num_bytes + (0 if self._states is None else self._states.num_bytes)

    def touch_ahead(self, may_continue: Callable[[], bool]) -> None:
        """Touch memory for the next blocks. May be called from any thread."""
        self._kv_cache.memory_ahead.touch(self.input_batch.num_blocks_used, may_continue)

    def execute(self, step: StepInput) -> StepOutput:
        """Apply a step's changes, run the model over its batch and sample; while no step is in flight.

        Raises:
            ValueError: as in `begin`.
        """
        return self.begin(step).result()

    def can_begin(self, step: StepInput) -> bool:
        """Whether `begin` accepts the step before those in flight are finished."""
        return not self._in_flight or self._in_flight.can_follow(step)

    @torch.inference_mode()
    def begin(self, step: StepInput) -> PendingStep:
        """Begin one step. It runs to its end here, unless it can be left to the device.

        Raises:
            ValueError: the step is inconsistent or names slots or blocks that do not exist; the batch is then
            undefined. Earlier steps can be finished.
        """
        assert self.can_begin(step), "a step in flight has to be finished first"
        clock, batch, in_flight = StepClock(step.arrived_ns), self.input_batch, self._in_flight
        self._apply(step)
        if (decoded := self._decode(step, clock)) is not None:
            return DoneStep(decoded)
        if not step.num_seqs:
            self._save_states(step)
            clock.prepared()
            return DoneStep(StepOutput(timings=clock.timings()))
        inputs = batch.prepare(step)
        if self._overlaps and in_flight.can_launch(inputs):
            return in_flight.launch(step, inputs, clock)
        if in_flight:  # a row is not what it would be, were the step before without fault
            in_flight.finish()
            inputs = batch.prepare(step)
        if not inputs.slots.size:
            clock.prepared()
            no_tokens = np.zeros(step.num_seqs, dtype=np.int64)
            output = StepOutput(num_sampled_tokens=no_tokens, bad_slots=inputs.bad_slots)
        else:
            rows = SampledRows.of(inputs, batch)
            token_mask = self._constraints.begin(rows.batch.slots)  # computed while the model runs
            needs_hidden = self._step_sampler.needs_hidden(inputs)
            computed = self.forward.run(inputs, rows.logit_rows, clock, needs_hidden=needs_hidden)
            output = self._step_sampler.sample(step, inputs, rows, computed, token_mask)
        self._save_states(step)
        output.timings = clock.timings()
        return DoneStep(output)

    def _apply(self, step: StepInput) -> None:
        self._kv_cache.swap_out(step.blocks_to_swap_out)
        self._kv_cache.swap_in(step.blocks_to_swap_in)
        self._kv_cache.copy(step.blocks_to_copy)
        if self._kv_cache.layout.has_windows:
            self._clear_given(step)  # after the moves: what is given was others' until then
        self.input_batch.apply(step)
        if self._states is not None:
            self._apply_states(step, self._states)
        self._update_adapters(step)
        self._update_processors(step)
        if self._parallel.is_leader:
            self._constraints.apply(step, self.input_batch.is_in_use)

    def _apply_states(self, step: StepInput, states: StatePool) -> None:
        """Move snapshots, and load each new request's initial state."""
        states.swap_out(step.states_to_swap_out)
        states.swap_in(step.states_to_swap_in)
        batch, loaded = self.input_batch, set(step.states_to_load[:, 1].tolist())
        entered = [request for request in step.new_requests if request.slot < batch.is_in_use.size]
        states.begin(np.array([request.slot for request in entered], dtype=np.int64))
        states.load(step.states_to_load)
        for request in entered:
            if request.num_computed_tokens and request.slot not in loaded and batch.is_in_use[request.slot]:
                message = f"{request.num_computed_tokens} tokens of it are computed, and no state comes with them"
                batch.fail(request.slot, Code.INTERNAL, f"request {request.request_id}: {message}")

    def _save_states(self, step: StepInput) -> None:
        if self._states is not None:
            self._states.save(step.states_to_save)

    def _clear_given(self, step: StepInput) -> None:
        """Clear blocks that will be reused: a block that left a window may hold NaN of a running sequence, which its
        next owner would read past its own tokens."""
        size = self._kv_cache.block_size
        parts = [step.appended_block_ids]
        for request in step.new_requests:
            first = -(-request.num_computed_tokens // size)
            parts += [request.block_ids[first:], request.group_block_ids[:, first:].reshape(-1)]
        given = np.concatenate(parts)
        given = given[given != NULL_BLOCK]
        if given.size and int(given.max()) < self._kv_cache.num_blocks:  # else the step is refused
            self._kv_cache.clear(given)

    def _decode(self, step: StepInput, clock: StepClock) -> StepOutput | None:
        """Run a plain step of greedy requests in one call; None if that is not possible, and nothing is done."""
        layers = self.forward.fused
        if not self._is_alone or not isinstance(layers, DecoderLayers) or not layers.has_ends:
            return None
        if not self._processors.is_empty or not self._constraints.is_empty:
            return None
        clock.prepared()
        token_ids = self.input_batch.decode(step, layers)
        if token_ids is None:
            return None
        clock.computed()
        return StepOutput(token_ids=token_ids, timings=clock.timings())

    def _update_adapters(self, step: StepInput) -> None:
        if self._adapters is not None:
            for number in step.loras_to_remove.tolist():
                self._adapters.remove(number)
        for request in step.new_requests:
            batch = self.input_batch
            if not request.lora_number or request.slot >= batch.is_in_use.size or not batch.is_in_use[request.slot]:
                continue
            adapter = None if self._adapters is None else self._adapters.get(request.lora_number)
            if self._adapters is None or adapter is None:
                text = f"request {request.request_id}: adapter {request.lora_number} is not loaded"
                batch.fail(request.slot, Code.INTERNAL, text)
            else:
                batch.adapters[request.slot] = self._adapters.on_device(adapter)

    def _update_processors(self, step: StepInput) -> None:
        if step.freed_slots.size:
            self._processors.remove(step.freed_slots)
        for request in step.new_requests:
            if request.slot >= self.input_batch.is_in_use.size or not self.input_batch.is_in_use[request.slot]:
                continue
            self._processors.remove(np.array([request.slot]))
            problem = self._processors.add(request.slot, request.sampling_params)
            if problem is not None:
                self.input_batch.fail(request.slot, Code.INVALID_ARGUMENT, problem, field="vllm_xargs")
            if self._processors.has(request.slot):
                self.input_batch.takes_drafts[request.slot] = False
                self.input_batch.sampling.needs_log[request.slot] = True
