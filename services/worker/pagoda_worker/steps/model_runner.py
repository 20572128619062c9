"""ModelRunner: runs one step of a batch. Knows the model, the KV cache and the slots; no gRPC, no messages."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

import numpy as np
import torch
from torch import Tensor

from pagoda_common.config.engine_config import LogprobsMode
from pagoda_common.config.speculative_config import SpeculativeConfig
from pagoda_common.errors import Code
from pagoda_kernels.decoder.decoder_layers import DecoderLayers
from pagoda_worker.attention.choice import AttentionChoice
from pagoda_worker.graphs.decode_graphs import DecodeGraphs
from pagoda_worker.memory.kv_cache import KVCache
from pagoda_worker.memory.transfers import to_device
from pagoda_worker.models.decoder import Decoder
from pagoda_worker.parallel.tensor_parallel import ALONE, TensorParallel
from pagoda_worker.sampling.drafter import Drafter
from pagoda_worker.sampling.grammars import Grammars, no_compiler
from pagoda_worker.sampling.logits_processors import LogitsProcessors
from pagoda_worker.sampling.logprobs import logprob_columns
from pagoda_worker.sampling.pooler import pool
from pagoda_worker.sampling.prompt_logprobs import describes_prompts, prompt_logprobs
from pagoda_worker.sampling.sampler import BAD_TOKEN, Sampler
from pagoda_worker.sampling.sampling_columns import NO_LOGPROBS
from pagoda_worker.sampling.structured import Constraints, TokenMask
from pagoda_worker.steps.forward_pass import ForwardPass
from pagoda_worker.steps.input_batch import ForwardInputs, InputBatch
from pagoda_worker.steps.sampled_rows import SampledRows
from pagoda_worker.steps.step import (
    BadSlot,
    IntArray,
    PooledColumns,
    PromptLogprobs,
    StepInput,
    StepOutput,
)
from pagoda_worker.steps.step_clock import StepClock
from pagoda_worker.steps.steps_in_flight import StepsInFlight, no_finite_logits, no_token_left


class ModelRunner:
    """The persistent batch and the forward pass. One caller at a time."""

    def __init__(
        self,
        *,
        model: Decoder,
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
        decode_graphs: DecodeGraphs | None = None,
        overlaps: bool = False,
        attention: AttentionChoice | None = None,
    ) -> None:
        """
        Args:
            decode_graphs: recorded ones, over the same model and cache.
            attention: who computes attention in steps without a graph; None: our kernels.
            overlaps: launch a step while the one before computes; one rank of several never does.
        """
        self.forward = ForwardPass(
            model=model,
            kv_cache=kv_cache,
            dtype=dtype,
            device=device,
            decode_graphs=decode_graphs,
            attention=attention,
        )
        self._parallel = parallel
        self._kv_cache = kv_cache
        self._device = device
        drafter = None
        if speculative is not None and speculative.is_on:
            drafter = Drafter(config=speculative, max_num_seqs=max_num_seqs)
        self.input_batch = InputBatch(
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            block_size=kv_cache.block_size,
            num_blocks=kv_cache.num_blocks,
            vocab_size=model.spec.vocab_size,
            drafter=drafter,
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
            device=device,
            logprobs_mode=logprobs_mode,
        )
        self._overlaps = overlaps and parallel.world_size == 1
        self._is_alone = not overlaps and parallel.world_size == 1
        """Steps follow each other, and no other rank takes part."""
        self._outputs: deque[StepOutput] = deque()
        """Of steps that came before those in flight, and are not given to anybody yet."""
        self._constraints = Constraints(
            grammars=grammars or Grammars(no_compiler),
            max_num_seqs=max_num_seqs,
            vocab_size=model.spec.vocab_size,
            eos_token_ids=eos_token_ids,
        )
        self._gives_processed = logprobs_mode.startswith("processed")
        self._gives_logprobs = logprobs_mode.endswith("logprobs")

    @property
    def cache_bytes(self) -> int:
        """Bytes of the KV cache on the device."""
        return self._kv_cache.num_bytes

    def touch_ahead(self, may_go_on: Callable[[], bool]) -> None:
        """Have memory for blocks that come next. For any thread to call."""
        self._kv_cache.memory_ahead.touch(self.input_batch.num_blocks_used, may_go_on)

    def execute(self, step: StepInput) -> StepOutput:
        """Apply a step's changes, run the model over its batch and sample; while no step is in flight.

        Raises:
            ValueError: as `begin`.
        """
        is_begun = self.begin(step)
        assert is_begun, "there was no step to wait for"
        return self.finish()

    @torch.inference_mode()
    def begin(self, step: StepInput) -> bool:
        """Apply a step's changes, then run the model over its batch and sample, or launch that where it can be left to
        the device. False: nothing is done, a step in flight has to be finished first.

        Raises:
            ValueError: the step contradicts itself or names slots or blocks that do not exist; nothing can be told
                about the batch then. Steps before it can be finished.
        """
        in_flight = self._in_flight
        if in_flight and not in_flight.can_follow(step):
            return False
        clock = StepClock(step.arrived_ns)
        self._apply(step)
        decoded = self._decode(step, clock)
        if decoded is not None:
            self._outputs.append(decoded)
            return True
        inputs = self.input_batch.prepare(step) if step.num_seqs else None
        if self._overlaps and inputs is not None and in_flight.can_launch(inputs):
            in_flight.launch(step, inputs, clock)
            return True
        if in_flight:  # a row is not what it would be, were the step without fault
            self._outputs.append(in_flight.finish())
            inputs = self.input_batch.prepare(step)
        self._outputs.append(self._run(step, inputs, clock))
        return True

    @property
    def has_output(self) -> bool:
        """Whether the oldest step that was begun is finished but for `finish`."""
        return bool(self._outputs)

    @property
    def is_done(self) -> bool:
        """Whether `finish` would not wait."""
        return bool(self._outputs) or self._in_flight.is_done

    @torch.inference_mode()
    def finish(self) -> StepOutput:
        """Wait for the oldest step that was begun.

        Raises:
            RuntimeError: the device has failed.
        """
        return self._outputs.popleft() if self._outputs else self._in_flight.finish()

    def _apply(self, step: StepInput) -> None:
        self._kv_cache.swap_out(step.blocks_to_swap_out)
        self._kv_cache.swap_in(step.blocks_to_swap_in)
        self._kv_cache.copy(step.blocks_to_copy)
        self.input_batch.apply(step)
        self._update_processors(step)
        if self._parallel.is_leader:
            self._constraints.apply(step, self.input_batch.is_in_use)

    def _decode(self, step: StepInput, clock: StepClock) -> StepOutput | None:
        """A plain step of greedy requests, where that is one call; None: nothing is done."""
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

    def _run(self, step: StepInput, inputs: ForwardInputs | None, clock: StepClock) -> StepOutput:
        """Run the model over a batch and sample. `inputs`: None when the batch is empty."""
        if inputs is None or not inputs.slots.size:
            clock.prepared()
            return StepOutput(
                num_sampled_tokens=None if inputs is None else np.zeros(step.num_seqs, dtype=np.int64),
                bad_slots=[] if inputs is None else inputs.bad_slots,
                timings=clock.timings(),
            )
        batch = self.input_batch
        rows = SampledRows.of(inputs, batch)
        token_mask = self._constraints.begin(rows.batch.slots)
        computed = self.forward.run(inputs, rows.logit_rows, clock, needs_hidden=self._needs_hidden(inputs))
        prompt_columns: list[PromptLogprobs] = []
        pooled: PooledColumns | None = None
        if computed.hidden is not None:
            prompt_columns = self._prompt_logprobs(computed.hidden, inputs)
            if inputs.pooled.size:
                pooled = self._pool(computed.hidden, inputs)
        likeliest = computed.likeliest
        if likeliest is not None and token_mask is None and self._log_likeliest(inputs, *likeliest):
            output = StepOutput(token_ids=likeliest[1].numpy())
        elif self._parallel.is_leader:
            batch.advance(inputs)
            output = self._sample(step, inputs, rows, computed.logits, likeliest, token_mask)
        else:
            batch.advance(inputs)
            output = self._take_from_leader(step, inputs, rows)
        return StepOutput(
            num_sampled_tokens=output.num_sampled_tokens,
            num_draft_tokens=output.num_draft_tokens,
            token_ids=output.token_ids,
            logprobs=output.logprobs,
            prompt_logprobs=prompt_columns,
            pooled=pooled,
            bad_slots=output.bad_slots,
            timings=clock.timings(),
        )

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

    def _log_likeliest(self, inputs: ForwardInputs, highest: Tensor, token_ids: Tensor) -> bool:
        """Take the tokens [num_rows] with the highest logits, if that is all there is to sampling here; whether so."""
        if not inputs.is_greedy or not self._processors.is_empty or not np.isfinite(highest.numpy()).all():
            return False
        self.input_batch.append_plain(inputs, token_ids.numpy())
        return True

    def _sample(
        self,
        step: StepInput,
        inputs: ForwardInputs,
        rows: SampledRows,
        logits: Tensor,
        likeliest: tuple[Tensor, Tensor] | None,
        token_mask: Future[TokenMask] | None,
    ) -> StepOutput:
        """Sample the rows, and log what counts: of several rows of a sequence, those up to its first wrong guess."""
        batch, slots = self.input_batch, rows.batch.slots
        bad_slots = list(inputs.bad_slots)
        if not slots.size:
            return StepOutput(num_sampled_tokens=np.zeros(step.num_seqs, dtype=np.int64), bad_slots=bad_slots)
        gives_logprobs = bool((batch.sampling.logprobs[slots] != NO_LOGPROBS).any())
        mask = None if token_mask is None else token_mask.result()
        output = self._sampler.sample(
            logits,
            rows.batch,
            likeliest=likeliest,
            token_mask=mask,
            keep_processed=self._gives_processed and gives_logprobs,
        )
        if self._parallel.world_size > 1:
            told = np.where(output.is_bad, BAD_TOKEN, output.token_ids).astype(np.int64)
            self._parallel.broadcast(torch.from_numpy(told))
        if inputs.is_plain and not gives_logprobs and not output.is_bad.any():
            batch.append_plain(inputs, output.token_ids)
            self._constraints.advance(slots, output.token_ids)
            return StepOutput(token_ids=output.token_ids)
        judged = logits if output.processed is None else output.processed
        num_new = rows.num_new(output.token_ids, output.is_bad)
        failed = np.flatnonzero(num_new == 0)
        bad_slots += [self._reject(int(rows.slots[place]), logits[int(rows.starts[place])]) for place in failed]
        for slot in np.unique(slots[output.is_bad & (rows.ahead > 0)]).tolist():
            self._sanitize(slot)  # a guess has left NaN behind the sequence's end
        kept = np.flatnonzero(rows.ahead < num_new[rows.owners])
        token_ids = output.token_ids
        if kept.size != slots.size:
            slots, token_ids = slots[kept], token_ids[kept]
            judged = judged[to_device(kept, self._device)]
        batch.append_tokens(slots, token_ids, rows.ahead[kept])
        self._constraints.advance(slots, token_ids)
        num_sampled = None
        if rows.sequences.size != step.num_seqs or kept.size != step.num_seqs or bad_slots:
            num_sampled = np.zeros(step.num_seqs, dtype=np.int64)
            num_sampled[inputs.batch_rows[rows.sequences]] = num_new
        return StepOutput(
            num_sampled_tokens=num_sampled,
            num_draft_tokens=self._judge_drafts(step, inputs, rows, num_new),
            token_ids=token_ids,
            logprobs=logprob_columns(
                judged,
                token_ids,
                batch.sampling.logprobs[slots],
                chosen=batch.sampling.logprob_token_ids_of(slots),
                is_normalised=self._gives_logprobs,
                token_mask=None if mask is None else mask.of_beams(kept),
            ),
            bad_slots=bad_slots,
        )

    def _take_from_leader(self, step: StepInput, inputs: ForwardInputs, rows: SampledRows) -> StepOutput:
        """Log what rank 0 has sampled. Nobody wants to hear it from this rank as well.

        Sampled by all, tokens would be the same only where all ranks compute alike to the last bit, which different
        processors do not.
        """
        batch, slots = self.input_batch, rows.batch.slots
        if slots.size:
            token_ids = self._parallel.broadcast(torch.empty(slots.size, dtype=torch.int64)).numpy()
            is_bad = token_ids == BAD_TOKEN
            num_new = rows.num_new(token_ids, is_bad)
            for slot in np.unique(slots[is_bad]).tolist():
                self._sanitize(slot)
            for slot in rows.slots[num_new == 0].tolist():
                batch.fail(slot, Code.INTERNAL, "rank 0 could not sample it")
            kept = np.flatnonzero(rows.ahead < num_new[rows.owners])
            batch.append_tokens(slots[kept], token_ids[kept], rows.ahead[kept])
            self._judge_drafts(step, inputs, rows, num_new)  # as rank 0 does, so that the next drafts are the same
        return StepOutput(num_sampled_tokens=np.zeros(step.num_seqs, dtype=np.int64))

    def _sanitize(self, slot: int) -> None:
        batch = self.input_batch
        self._kv_cache.sanitize(batch.block_table[slot, : batch.num_blocks_of[slot]].astype(np.int64))

    def _judge_drafts(
        self, step: StepInput, inputs: ForwardInputs, rows: SampledRows, num_new: IntArray
    ) -> IntArray | None:
        """[num_seqs] tokens of each draft; None when there was none. The drafter hears how they did."""
        tried = np.flatnonzero(rows.num_draft_tokens)
        if not tried.size:
            return None
        batch, slots, num_draft = self.input_batch, rows.slots[tried], rows.num_draft_tokens[tried]
        assert batch.drafter is not None, "a draft has a drafter"
        batch.drafter.judge(slots, num_draft, np.maximum(num_new[tried] - 1, 0), batch.num_tokens[slots])
        result = np.zeros(step.num_seqs, dtype=np.int64)
        result[inputs.batch_rows] = inputs.num_draft_tokens
        return result

    def _reject(self, slot: int, logits: Tensor) -> BadSlot:
        """End a sequence whose logits are unusable, and leave no NaN in its blocks for their next owner."""
        if bool(torch.isfinite(logits).any()) and not bool(torch.isnan(logits).any() | torch.isposinf(logits).any()):
            bad = no_token_left(slot, self._constraints.problem_of(slot))
        else:
            self._sanitize(slot)
            bad = no_finite_logits(slot, int(self.input_batch.num_tokens[slot]))
        return self.input_batch.fail(slot, bad.code, bad.message)

    def _pool(self, hidden: Tensor, inputs: ForwardInputs) -> PooledColumns | None:
        """The embeddings of the step. On every rank, which clean up alike; rank 0 tells them."""
        pooled, bad = pool(hidden, inputs, self.input_batch.poolers)
        for slot in bad.tolist():
            self._sanitize(slot)
            message = "the model gave no finite hidden state for the prompt's last token"
            inputs.bad_slots.append(self.input_batch.fail(slot, Code.INTERNAL, message))
        return pooled if self._parallel.is_leader else None

    def _needs_hidden(self, inputs: ForwardInputs) -> bool:
        """Whether more than the logits of the step may be wanted: those of prompt tokens, or embeddings."""
        return not inputs.is_plain and (inputs.pooled.size > 0 or describes_prompts(inputs, self.input_batch))

    def _prompt_logprobs(self, hidden: Tensor, inputs: ForwardInputs) -> list[PromptLogprobs]:
        return prompt_logprobs(
            inputs,
            self.input_batch,
            partial(self.forward.logits_of, hidden),
            is_normalised=self._gives_logprobs,
            is_leader=self._parallel.is_leader,
        )
