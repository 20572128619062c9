"""StepSampler: turns the result of a forward pass into the step's output. Knows no messages."""

from concurrent.futures import Future
from functools import partial

import numpy as np
import torch
from torch import Tensor

from pagoda_common.config.engine_config import LogprobsMode
from pagoda_common.errors import Code
from pagoda_worker.memory.kv_cache import KVCache
from pagoda_worker.memory.state_pool import StatePool
from pagoda_worker.memory.transfers import to_device
from pagoda_worker.parallel.tensor_parallel import TensorParallel
from pagoda_worker.pooling.pooler import Pooler
from pagoda_worker.sampling.logits_processors import LogitsProcessors
from pagoda_worker.sampling.logprobs import logprob_columns
from pagoda_worker.sampling.prompt_logprobs import describes_prompts, prompt_logprobs
from pagoda_worker.sampling.sampler import BAD_TOKEN, Sampler
from pagoda_worker.sampling.sampling_columns import NO_LOGPROBS
from pagoda_worker.sampling.structured import Constraints, TokenMask
from pagoda_worker.steps.forward_pass import Computed, ForwardPass
from pagoda_worker.steps.input_batch import ForwardInputs, InputBatch
from pagoda_worker.steps.sampled_rows import SampledRows
from pagoda_worker.steps.step import BadSlot, IntArray, PooledColumns, PromptLogprobs, StepInput, StepOutput
from pagoda_worker.steps.steps_in_flight import no_finite_logits, no_token_left


class StepSampler:
    """Samples the rows of a step, logs the tokens that count, and ends sequences that have none. One caller at a time.

    With several ranks, rank 0 samples, and the others log its tokens.
    """

    def __init__(
        self,
        *,
        batch: InputBatch,
        forward: ForwardPass,
        sampler: Sampler,
        processors: LogitsProcessors,
        constraints: Constraints,
        kv_cache: KVCache,
        states: StatePool | None,
        parallel: TensorParallel,
        device: torch.device,
        logprobs_mode: LogprobsMode,
        pooler: Pooler,
    ) -> None:
        self._batch = batch
        self._pooler = pooler
        self._forward = forward
        self._sampler = sampler
        self._processors = processors
        self._constraints = constraints
        self._kv_cache = kv_cache
        self._states = states
        self._parallel = parallel
        self._device = device
        self._gives_processed = logprobs_mode.startswith("processed")
        self._gives_logprobs = logprobs_mode.endswith("logprobs")

    def needs_hidden(self, inputs: ForwardInputs) -> bool:
        """Whether hidden states may be needed: for prompt logprobs, or embeddings."""
        return not inputs.is_plain and (inputs.pooled.size > 0 or describes_prompts(inputs, self._batch))

    def sample(
        self,
        step: StepInput,
        inputs: ForwardInputs,
        rows: SampledRows,
        computed: Computed,
        token_mask: Future[TokenMask] | None,
    ) -> StepOutput:
        """The output of a step, without timings; it is logged in the batch."""
        prompt_columns: list[PromptLogprobs] = []
        pooled: PooledColumns | None = None
        if computed.hidden is not None:
            prompt_columns = self._prompt_logprobs(computed.hidden, inputs)
            if inputs.pooled.size:
                pooled = self._pool(computed.hidden, inputs)
        likeliest = computed.likeliest
        if likeliest is not None and token_mask is None and self._log_likeliest(inputs, *likeliest):
            return StepOutput(token_ids=likeliest[1].numpy(), prompt_logprobs=prompt_columns, pooled=pooled)
        self._batch.advance(inputs)
        if self._parallel.is_leader:
            output = self._sample(step, inputs, rows, computed.logits, likeliest, token_mask)
        else:
            output = self._take_from_leader(step, inputs, rows)
        if prompt_columns or pooled is not None:
            output.prompt_logprobs, output.pooled = prompt_columns, pooled
        return output

    def _log_likeliest(self, inputs: ForwardInputs, highest: Tensor, token_ids: Tensor) -> bool:
        """Log the likeliest tokens [num_rows] if sampling needs nothing else; returns whether it did."""
        if not inputs.is_greedy or not self._processors.is_empty or not np.isfinite(highest.numpy()).all():
            return False
        self._batch.append_plain(inputs, token_ids.numpy())
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
        """Sample the rows, and log the tokens that count: of several rows of a sequence, those up to its first wrong
        draft token."""
        batch, slots = self._batch, rows.batch.slots
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
            self._sanitize(slot)  # a guess has left NaN after the sequence's end
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
        """Log the tokens that rank 0 has sampled; this rank returns none.

        If all ranks sampled, tokens would only agree if all computed the same bits, which different processors do not.
        """
        batch, slots = self._batch, rows.batch.slots
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

    def _judge_drafts(
        self, step: StepInput, inputs: ForwardInputs, rows: SampledRows, num_new: IntArray
    ) -> IntArray | None:
        """[num_seqs] draft tokens of each sequence; None if there were no drafts. The drafter gets the results."""
        tried = np.flatnonzero(rows.num_draft_tokens)
        if not tried.size:
            return None
        batch, slots, num_draft = self._batch, rows.slots[tried], rows.num_draft_tokens[tried]
        assert batch.drafter is not None, "a draft has a drafter"
        num_right = np.maximum(num_new[tried] - 1, 0)
        batch.drafter.judge(slots, num_draft, num_right, batch.num_tokens[slots])
        if self._states is not None:
            self._states.settle(slots, num_draft, num_right)
        result = np.zeros(step.num_seqs, dtype=np.int64)
        result[inputs.batch_rows] = inputs.num_draft_tokens
        return result

    def _reject(self, slot: int, logits: Tensor) -> BadSlot:
        """End a sequence whose logits are unusable, and remove NaN from its blocks for their next owner."""
        if bool(torch.isfinite(logits).any()) and not bool(torch.isnan(logits).any() | torch.isposinf(logits).any()):
            bad = no_token_left(slot, self._constraints.problem_of(slot))
        else:
            self._sanitize(slot)
            bad = no_finite_logits(slot, int(self._batch.num_tokens[slot]))
        return self._batch.fail(slot, bad.code, bad.message)

    def _sanitize(self, slot: int) -> None:
        if self._kv_cache.k_caches:
            self._kv_cache.sanitize(self._batch.readable_blocks(slot))

    def _pool(self, hidden: Tensor, inputs: ForwardInputs) -> PooledColumns | None:
        """The embeddings of the step. Every rank computes them, to clean up in the same way; rank 0 reports them."""
        slots, starts = inputs.slots[inputs.pooled], [0, *np.cumsum(inputs.num_scheduled_tokens).tolist()]
        ids = to_device(inputs.input_ids, hidden.device)
        if inputs.pooled.size != inputs.slots.size:  # beside sequences that sample: each by itself
            hidden, ids, starts = _rows_of(hidden, ids, starts, inputs.pooled.tolist())
        made = self._pooler.pool(hidden, ids, starts, [self._batch.poolers[slot] for slot in slots.tolist()])
        values = [one.cpu().numpy() for one in made]
        is_finite = np.array([bool(np.isfinite(one).all()) for one in values])
        for slot in slots[~is_finite].tolist():
            self._sanitize(slot)
            message = "the model gave no finite hidden state for the prompt's last token"
            inputs.bad_slots.append(self._batch.fail(slot, Code.INTERNAL, message))
        if not self._parallel.is_leader:
            return None
        kept = [one for one, is_good in zip(values, is_finite.tolist(), strict=True) if is_good]
        return PooledColumns(slots=slots[is_finite], values=kept)

    def _prompt_logprobs(self, hidden: Tensor, inputs: ForwardInputs) -> list[PromptLogprobs]:
        return prompt_logprobs(
            inputs,
            self._batch,
            partial(self._forward.logits_of, hidden),
            is_normalised=self._gives_logprobs,
            is_leader=self._parallel.is_leader,
        )


def _rows_of(hidden: Tensor, ids: Tensor, starts: list[int], rows: list[int]) -> tuple[Tensor, Tensor, list[int]]:
    """Hidden states, ids and starts of some rows of a step."""
    parts = [torch.arange(starts[row], starts[row + 1], device=hidden.device) for row in rows]
    ends = np.cumsum([part.numel() for part in parts]).tolist()
    places = torch.cat(parts)
    return hidden.index_select(0, places), ids.index_select(0, places), [0, *ends]
