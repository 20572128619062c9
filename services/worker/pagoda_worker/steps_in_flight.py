"""StepsInFlight: decode steps that the device is given before the host has the tokens of the one before.

What a decode step needs of the one before are the tokens, and the device has them: the sampler leaves the last token of
each slot there, and the next step takes its token ids from there. The host logs a placeholder, so that positions,
lengths and the random numbers' offsets go on, and puts the token in its place when it comes. Knows no messages.
"""

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import torch

from pagoda_common.errors import Code
from pagoda_worker.batch import BadSlot, ExecuteModelInput, IntArray, ModelRunnerOutput
from pagoda_worker.forward_pass import ForwardPass
from pagoda_worker.input_batch import InputBatch, StepInputs
from pagoda_worker.kv_cache import KVCache
from pagoda_worker.sampled_rows import SampledRows
from pagoda_worker.sampler import BAD_TOKEN, Sampler
from pagoda_worker.step_clock import StepClock
from pagoda_worker.transfers import Download, to_device

MAX_IN_FLIGHT = 2
"""The step that computes, and the one that is to begin the moment it ends."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepInFlight:
    """What its end needs of a step that was launched."""

    inputs: StepInputs
    generations: IntArray
    """[num_rows] of the slots, when it was launched: a slot with another one has lost its sequence since."""
    download: Download
    clock: StepClock
    failed: dict[int, BadSlot] = field(default_factory=dict)
    """By slot: sequences that ended in an error of the step before, which was not known when this one was launched."""


class StepsInFlight:
    """Launches plain decode steps, and finishes them in the same order. One caller at a time."""

    def __init__(
        self, *, batch: InputBatch, forward: ForwardPass, sampler: Sampler, kv_cache: KVCache, device: torch.device
    ) -> None:
        max_num_seqs = batch.is_in_use.size
        self._batch = batch
        self._forward = forward
        self._sampler = sampler
        self._kv_cache = kv_cache
        self._device = device
        self._steps: deque[StepInFlight] = deque()
        self._last_tokens = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        """[max_num_seqs] of each slot of the latest step in flight, 0 where it has sampled none."""
        self._downloads = deque(Download(num_words=max_num_seqs, device=device) for _ in range(MAX_IN_FLIGHT))
        self._slots: tuple[IntArray, torch.Tensor] | None = None
        """Those of the latest step, on the host and on the device."""

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def is_done(self) -> bool:
        """Whether `finish` would not wait."""
        return self._steps[0].download.is_there

    def can_follow(self, step: ExecuteModelInput) -> bool:
        """Whether a step needs nothing of those in flight that only the host will know.

        Its rows are rows of the latest one, with one token each; no sequence comes, no block moves, and none goes from
        a sequence to another: what a bad step in flight has left in it is cleaned up when that step is finished.
        """
        if len(self._steps) == MAX_IN_FLIGHT or not step.num_seqs or step.new_requests or step.rejected:
            return False
        if step.num_scheduled_tokens is not None or step.num_lookahead_tokens is not None:
            return False
        if step.blocks_to_swap_out.size or step.blocks_to_swap_in.size or step.blocks_to_copy.size:
            return False
        latest = self._steps[-1].inputs.slots
        return (step.slots is None or bool(np.isin(step.slots, latest).all())) and not self._hands_on(step)

    def _hands_on(self, step: ExecuteModelInput) -> bool:
        """Whether a freed sequence's block is appended to another."""
        if not step.freed_slots.size or not step.appended_block_ids.size:
            return False
        batch, freed = self._batch, step.freed_slots[step.freed_slots < self._batch.block_table.shape[0]]
        held = np.arange(batch.block_table.shape[1]) < batch.num_blocks_of[freed, None]
        return bool(np.isin(step.appended_block_ids, batch.block_table[freed][held]).any())

    def can_launch(self, inputs: StepInputs) -> bool:
        """Whether a step is one last token of each sequence, and sampling them takes nothing of the host later on."""
        return inputs.is_plain and not self._batch.sampling.needs_log[inputs.slots].any()

    def launch(self, inputs: StepInputs, clock: StepClock) -> None:
        """Give the device all that a step has to do. Waits for nothing."""
        batch = self._batch
        slots = self._on_device(inputs.slots)
        last_tokens = self._last_tokens if self._steps else None
        rows = SampledRows.of(inputs, batch, last_tokens)
        token_ids = None if last_tokens is None else last_tokens.index_select(0, slots)
        computed = self._forward.run(inputs, rows.logit_rows, clock, token_ids=token_ids)
        sampled = self._sampler.launch(computed.logits, rows.batch, likeliest=computed.likeliest)
        self._last_tokens.index_copy_(0, slots, sampled.clamp(min=0))
        download = self._downloads[0]
        self._downloads.rotate()
        download.send(sampled)
        generations = batch.sampling.generations[inputs.slots]
        batch.append_placeholders(inputs)
        self._steps.append(StepInFlight(inputs=inputs, generations=generations, download=download, clock=clock))

    def _on_device(self, slots: IntArray) -> torch.Tensor:
        if self._slots is None or self._slots[0] is not slots:
            self._slots = slots, to_device(slots, self._device)
        return self._slots[1]

    def finish(self) -> ModelRunnerOutput:
        """Wait for the tokens of the oldest step, and log them.

        Raises:
            RuntimeError: the device has failed; the step stays in flight.
        """
        batch, step = self._batch, self._steps[0]
        token_ids = step.download.wait()
        self._steps.popleft()
        slots = step.inputs.slots
        batch.place_tokens(slots, step.inputs.seq_lens, token_ids)  # nobody reads the log of who has left or failed
        if not step.failed and int(token_ids.min()) >= 0:
            return ModelRunnerOutput(token_ids=token_ids, timings=step.clock.timings())
        had_failed = np.isin(slots, list(step.failed))
        is_bad = had_failed | (token_ids < 0)
        bad_slots = [step.failed[slot] for slot in slots[had_failed].tolist()]
        new_rows = np.flatnonzero(is_bad & ~had_failed).tolist()
        bad_slots += [self._reject(step, row, int(token_ids[row])) for row in new_rows]
        return ModelRunnerOutput(
            num_sampled_tokens=(~is_bad).astype(np.int64) if bad_slots else None,
            token_ids=token_ids[~is_bad],
            bad_slots=bad_slots,
            timings=step.clock.timings(),
        )

    def _reject(self, step: StepInFlight, row: int, token_id: int) -> BadSlot:
        """End the sequence of a row that has no token, also in the step that is in flight behind it."""
        batch, slot, seq_len = self._batch, int(step.inputs.slots[row]), int(step.inputs.seq_lens[row])
        is_here = batch.sampling.generations[slot] == step.generations[row]
        bad = no_token_left(slot)
        if token_id == BAD_TOKEN:
            bad = no_finite_logits(slot, seq_len)
            blocks = step.inputs.block_table[row, : -(-seq_len // self._kv_cache.block_size)]
            if is_here:  # the next step may have had a block more
                blocks = batch.block_table[slot, : batch.num_blocks_of[slot]]
            self._kv_cache.sanitize(blocks.astype(np.int64))
        if is_here:
            batch.fail(slot, bad.code, bad.message)
            for later in self._steps:
                later.failed[slot] = bad
        return bad


def no_finite_logits(slot: int, position: int) -> BadSlot:
    """The model's fault."""
    return BadSlot(slot=slot, code=Code.INTERNAL, message=f"the model gave no finite logits for token {position}")


def no_token_left(slot: int, problem: str | None = None) -> BadSlot:
    """The request's fault. `problem`: what is known of it."""
    message = "the parameters of the request, or a logits processor, leave no token to sample"
    return BadSlot(slot=slot, code=Code.INVALID_ARGUMENT, message=problem or message)
