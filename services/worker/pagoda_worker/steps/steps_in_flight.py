"""StepsInFlight: launches steps on the device before the host has the tokens of the step before.

A step needs only the tokens of the step before, and the device has them: the sampler leaves the last token of each slot
there, and the next step reads its token ids from there. The host logs a placeholder, so that positions, lengths and
random offsets advance, and replaces it when the token arrives. Knows no messages.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from pagoda_common.config.engine_config import LogprobsMode
from pagoda_common.errors import Code
from pagoda_worker.memory.kv_cache import KVCache
from pagoda_worker.memory.state_pool import StatePool
from pagoda_worker.memory.transfers import Download, to_device
from pagoda_worker.sampling.logprobs import LaunchedLogprobs, launch_logprobs
from pagoda_worker.sampling.prompt_logprobs import describes_prompts
from pagoda_worker.sampling.sampler import BAD_TOKEN, Sampler
from pagoda_worker.sampling.sampling_columns import NO_LOGPROBS
from pagoda_worker.steps.forward_pass import ForwardPass
from pagoda_worker.steps.input_batch import ForwardInputs, InputBatch
from pagoda_worker.steps.sampled_rows import SampledRows
from pagoda_worker.steps.step import BadSlot, IntArray, StepInput, StepOutput
from pagoda_worker.steps.step_clock import StepClock

MAX_IN_FLIGHT = 2
"""Maximum steps in flight: the running one, and the one that begins when it ends."""
NO_GENERATION = -1
"""Value instead of a generation."""


@dataclass(eq=False, kw_only=True, slots=True)
class LaunchedStep:
    """A launched step, with the data that its end needs. A PendingStep."""

    finish: Callable[["LaunchedStep"], StepOutput]
    num_seqs: int
    """Row indexes in the scheduler's batch."""
    inputs: ForwardInputs
    rows: SampledRows
    """The sampling rows; none in a step with only prompt chunks."""
    generations: IntArray
    """[n] generations of these rows' slots at launch: a slot with another generation has lost its sequence since."""
    download: Download
    logprobs: LaunchedLogprobs | None
    clock: StepClock
    failed: dict[int, BadSlot] = field(default_factory=dict)
    """Sequences by slot that ended in an error of the step before, which was not known when this one was launched."""
    before: "LaunchedStep | None"
    """The previous step, while it is in flight."""
    output: StepOutput | None = None

    @property
    def is_in_flight(self) -> bool:
        """Whether it is not finished yet."""
        return self.output is None

    @property
    def is_done(self) -> bool:
        """Whether `result` would return at once."""
        return self.output is not None or self.download.is_there

    def result(self) -> StepOutput:
        """Wait for its tokens and log them, after those of the step before.

        Raises:
            RuntimeError: the device failed; the step stays in flight.
        """
        if self.output is None:
            if self.before is not None:
                self.before.result()
                self.before = None
            with torch.inference_mode():
                self.output = self.finish(self)
        return self.output


class StepsInFlight:
    """Launches steps without drafts, each while the one before computes. One caller at a time."""

    def __init__(
        self,
        *,
        batch: InputBatch,
        forward: ForwardPass,
        sampler: Sampler,
        kv_cache: KVCache,
        states: StatePool | None = None,
        device: torch.device,
        logprobs_mode: LogprobsMode = "raw_logprobs",
    ) -> None:
        max_num_seqs = batch.is_in_use.size
        self._batch = batch
        self._forward = forward
        self._sampler = sampler
        self._kv_cache = kv_cache
        self._states = states
        self._device = device
        self._gives_processed = logprobs_mode.startswith("processed")
        self._gives_logprobs = logprobs_mode.endswith("logprobs")
        self._latest: LaunchedStep | None = None
        """The step launched last, which may have finished since."""
        self._last_tokens = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        """[max_num_seqs] token of each slot from the latest step in flight, 0 if it sampled none."""
        self._sampled_last = np.full(max_num_seqs, NO_GENERATION, dtype=np.int64)
        """[max_num_seqs] generation of each slot's sequence that the latest step in flight samples, or NO_GENERATION.
        """
        self._downloads = deque(Download(num_words=max_num_seqs, device=device) for _ in range(MAX_IN_FLIGHT))
        self._slots: tuple[IntArray, Tensor] | None = None
        """Slots of the latest step, on the host and on the device."""

    def __len__(self) -> int:
        return len(self._steps())

    def _steps(self) -> list[LaunchedStep]:
        """Steps in flight, the latest first."""
        steps, step = [], self._latest
        while step is not None and step.is_in_flight:
            steps.append(step)
            step = step.before
        return steps

    def finish(self) -> None:
        """Wait for all steps in flight. Their results are kept."""
        if self._latest is not None:
            self._latest.result()

    def can_follow(self, step: StepInput) -> bool:
        """Whether a step can be prepared while others are in flight: there are not too many, and it swaps no blocks."""
        if len(self) == MAX_IN_FLIGHT or not step.num_seqs or step.rejected:
            return False
        swaps = step.blocks_to_swap_out.size or step.blocks_to_swap_in.size
        swaps = swaps or step.states_to_swap_out.size or step.states_to_swap_in.size
        return not swaps and step.num_lookahead_tokens is None

    def can_launch(self, inputs: ForwardInputs) -> bool:
        """Whether a step only gives tokens and their log probabilities, without later work on the host."""
        batch, slots = self._batch, inputs.slots
        if not inputs.is_plain:
            if not slots.size or batch.drafter is not None or inputs.pooled.size or describes_prompts(inputs, batch):
                return False
            slots = slots[inputs.is_sampled]
        if self._gives_processed and (batch.sampling.logprobs[slots] != NO_LOGPROBS).any():
            return False
        return not batch.sampling.needs_log[slots].any()

    def launch(self, step: StepInput, inputs: ForwardInputs, clock: StepClock) -> LaunchedStep:
        """Launch a whole step on the device, without waiting."""
        batch = self._batch
        self._clear_handed_on(step)
        rows = SampledRows.of(inputs, batch)
        slots = self._on_device(rows.slots)
        token_ids = self._token_ids(inputs, rows, slots)
        computed = self._forward.run(inputs, rows.logit_rows, clock, token_ids=token_ids)
        if self._states is not None:
            self._states.save(step.states_to_save)
        sampled, logprobs = slots, None
        if rows.slots.size:  # otherwise there is nothing in `slots`, and nothing to sample
            logits_batch = replace(rows.batch, last_tokens=None if token_ids is None else self._last_tokens)
            sampled = self._sampler.launch(computed.logits, logits_batch, likeliest=computed.likeliest)
            tokens = sampled.clamp(min=0)
            self._last_tokens.index_copy_(0, slots, tokens)
            logprobs = self._launch_logprobs(computed.logits, tokens, rows.slots)
        download = self._downloads[0]
        self._downloads.rotate()
        download.send(sampled)
        generations = batch.sampling.generations[rows.slots]
        self._sampled_last.fill(NO_GENERATION)
        self._sampled_last[rows.slots] = generations
        batch.append_placeholders(inputs, rows.slots)
        before = self._latest if self else None
        self._latest = LaunchedStep(
            finish=self._finish,
            num_seqs=step.num_seqs,
            inputs=inputs,
            rows=rows,
            generations=generations,
            download=download,
            logprobs=logprobs,
            clock=clock,
            before=before,
        )
        return self._latest

    def _token_ids(self, inputs: ForwardInputs, rows: SampledRows, slots: Tensor) -> Tensor | None:
        """[num_tokens] int64 on the device; None: the host knows all of them.

        A token that a step in flight samples is its sequence's last. If there is one, `_last_tokens` has the last
        tokens of all rows that sample later.
        """
        if not self:
            return None
        is_awaited = self._sampled_last[rows.slots] == self._batch.sampling.generations[rows.slots]
        if is_awaited.all() and rows.slots.size == inputs.input_ids.size:
            return self._last_tokens.index_select(0, slots)
        if not is_awaited.any():
            return None
        known = to_device(inputs.input_ids, self._device)
        places, owners = to_device(np.stack((rows.logit_rows[is_awaited], rows.slots[is_awaited])), self._device)
        token_ids = known.index_copy(0, places, self._last_tokens.index_select(0, owners))
        if not is_awaited.all():
            last = token_ids.index_select(0, to_device(rows.logit_rows, self._device))
            self._last_tokens.index_copy_(0, slots, last)
        return token_ids

    def _launch_logprobs(self, logits: Tensor, token_ids: Tensor, slots: IntArray) -> LaunchedLogprobs | None:
        columns = self._batch.sampling
        num_top = columns.logprobs[slots]
        if (num_top == NO_LOGPROBS).all():
            return None
        chosen = columns.logprob_token_ids_of(slots)
        return launch_logprobs(logits, token_ids, num_top, chosen=chosen, is_normalised=self._gives_logprobs)

    def _clear_handed_on(self, step: StepInput) -> None:
        """Clear blocks of a sequence in flight that others will fill.

        Steps run in order, so the step before cannot write after the new owner. But it is not known yet whether its
        sequences are valid: NaN of a sequence that has left would not be cleared before others read it, past their own
        tokens. Blocks that come with content (prefixes, forks) stay unchanged: a sequence that shares a prefix with NaN
        fails as well.
        """
        if self._latest is None or not self._latest.is_in_flight or not step.freed_slots.size:
            return
        if self._kv_cache.layout.has_windows:  # all of these are cleared
            return
        inputs, size = self._latest.inputs, self._kv_cache.block_size
        has_left = np.isin(inputs.slots, step.freed_slots)
        is_held = np.arange(inputs.block_table.shape[1]) < -(-inputs.seq_lens[has_left, None] // size)
        empty = (request.block_ids[-(-request.num_computed_tokens // size) :] for request in step.new_requests)
        given = np.concatenate((step.appended_block_ids, *empty))
        handed_on = np.intersect1d(given, inputs.block_tables[0][has_left][is_held])
        if handed_on.size:
            self._kv_cache.clear(handed_on)

    def _on_device(self, slots: IntArray) -> Tensor:
        if self._slots is None or self._slots[0] is not slots:
            self._slots = slots, to_device(slots, self._device)
        return self._slots[1]

    def _finish(self, step: LaunchedStep) -> StepOutput:
        """Wait for the tokens of the oldest step, and log them."""
        batch, token_ids = self._batch, step.download.wait()
        inputs, rows = step.inputs, step.rows
        places = inputs.seq_lens[rows.sequences]
        is_here = batch.sampling.generations[rows.slots] == step.generations
        batch.place_tokens(rows.slots[is_here], places[is_here], token_ids[is_here])  # no one reads a failed one's log
        bad_slots, is_good = [], token_ids >= 0
        if step.failed or inputs.bad_slots or not is_good.all():
            bad_slots = self._bad_slots(step, token_ids)
            is_good &= ~np.isin(rows.slots, list(step.failed))
            token_ids = token_ids[is_good]
        num_sampled = None
        if bad_slots or rows.slots.size != step.num_seqs:
            num_sampled = np.zeros(step.num_seqs, dtype=np.int64)
            num_sampled[inputs.batch_rows[rows.sequences[is_good]]] = 1
        return StepOutput(
            num_sampled_tokens=num_sampled,
            token_ids=token_ids,
            logprobs=None if step.logprobs is None else step.logprobs.columns(is_good),
            bad_slots=bad_slots,
            timings=step.clock.timings(),
        )

    def _bad_slots(self, step: LaunchedStep, token_ids: IntArray) -> list[BadSlot]:
        """Failures of earlier steps in the order of the batch, then those of this step."""
        inputs, slots = step.inputs, step.rows.slots
        absent = np.setdiff1d(np.arange(step.num_seqs), inputs.batch_rows).tolist()
        before = dict(zip(absent, inputs.bad_slots, strict=True))
        for row in np.flatnonzero(np.isin(inputs.slots, list(step.failed))).tolist():
            before[int(inputs.batch_rows[row])] = step.failed[int(inputs.slots[row])]
        found = np.flatnonzero((token_ids < 0) & ~np.isin(slots, list(step.failed))).tolist()
        return [before[row] for row in sorted(before)] + [self._reject(step, place, token_ids) for place in found]

    def _reject(self, step: LaunchedStep, place: int, token_ids: IntArray) -> BadSlot:
        """End the sequence of a row without a token, including in the following step in flight."""
        batch, row = self._batch, int(step.rows.sequences[place])
        slot, seq_len = int(step.inputs.slots[row]), int(step.inputs.seq_lens[row])
        is_here = batch.sampling.generations[slot] == step.generations[place]
        bad = no_token_left(slot)
        if token_ids[place] == BAD_TOKEN:
            bad = no_finite_logits(slot, seq_len)
            if is_here:  # the next step may have had a block more
                blocks = batch.readable_blocks(slot)
            else:
                blocks = step.inputs.readable_blocks(row, self._kv_cache.layout.groups, self._kv_cache.block_size)
            self._kv_cache.sanitize(blocks)
        if is_here:
            batch.fail(slot, bad.code, bad.message)
            for other in self._steps():
                if other is not step:
                    other.failed[slot] = bad
        return bad


def no_finite_logits(slot: int, position: int) -> BadSlot:
    """An error of the model."""
    return BadSlot(slot=slot, code=Code.INTERNAL, message=f"the model gave no finite logits for token {position}")


def no_token_left(slot: int, problem: str | None = None) -> BadSlot:
    """An error of the request. `problem`: details, if known."""
    message = "the parameters of the request, or a logits processor, leave no token to sample"
    return BadSlot(slot=slot, code=Code.INVALID_ARGUMENT, message=problem or message)
