"""The messages between scheduler and worker in one step: plain frozen data, no tensors, no gRPC.

What every step makes is a named tuple: a frozen dataclass takes two to three times as long to make.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pagoda_common.params.pooling_params import PoolingParams
from pagoda_common.params.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class NewRequestData:
    """The data that a sequence needs once, when it enters a worker slot."""

    slot: int
    request_id: str
    prompt_token_ids: Sequence[int]
    output_token_ids: list[int]
    """Output known so far; not empty after a preemption or a recovery."""
    sampling_params: SamplingParams
    eos_token_ids: tuple[int, ...]
    block_ids: list[int]
    num_computed_tokens: int
    is_beam: bool = False
    pooling: PoolingParams | None = None
    """Its embedding is wanted, and no token."""
    group_block_ids: Sequence[Sequence[int]] = ()
    """Block tables of the other groups with blocks, each as long as `block_ids`. NO_BLOCK stands in any table for
    a block that left the group's window."""
    lora_number: int = 0
    """By which the workers know its adapter; 0: it has none."""


class SchedulerOutput(NamedTuple):
    """One step: what changed, and which slots compute how many tokens."""

    step: int
    new_requests: list[NewRequestData]
    freed_slots: list[int]
    slots: list[int]
    """Batch order."""
    num_scheduled_tokens: list[int]
    """Aligned with `slots`. Draft tokens are not in here: the worker may have fewer than it may try."""
    appended_slots: list[int]
    """Slots that get one more block, aligned with `appended_block_ids`."""
    appended_block_ids: list[int]
    num_tokens: int
    """Tokens in the batch: the sum of `num_scheduled_tokens`."""
    blocks_to_swap_out: Sequence[tuple[int, int]] = ()
    """(device block, host block), done first. No block is the target of two moves: those of a kind run at once."""
    blocks_to_swap_in: Sequence[tuple[int, int]] = ()
    """(host block, device block), done second."""
    blocks_to_copy: Sequence[tuple[int, int]] = ()
    """(from, to), both on the device, done third."""
    num_lookahead_tokens: list[int] | None = None
    """Most draft tokens for each sequence, aligned with `slots`; None: no drafts."""
    appended_groups: Sequence[int] = ()
    """Group that each of `appended_block_ids` is for, counted among the groups with blocks; empty: the first."""
    states_to_load: Sequence[tuple[int, int]] = ()
    """(snapshot, slot): recurrent states that slots begin this step with."""
    states_to_save: Sequence[tuple[int, int]] = ()
    """(slot, snapshot): recurrent states to keep as they are after this step."""
    states_to_swap_out: Sequence[tuple[int, int]] = ()
    """(snapshot, host snapshot), done with `blocks_to_swap_out`."""
    states_to_swap_in: Sequence[tuple[int, int]] = ()
    """(host snapshot, snapshot), done with `blocks_to_swap_in`."""
    loras_to_remove: Sequence[int] = ()
    """Numbers of adapters that the workers forget before new requests enter."""
    num_prefills_ended: int = 0
    """Sequences whose known tokens are all computed with this step, which samples one more of each; not decodes."""


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """Log probabilities of some token rows, in columns; entries of a row stand together, the sampled token first."""

    rows: npt.NDArray[np.uint32]
    """Indexes into the step's token_ids."""
    counts: npt.NDArray[np.uint32]
    """Entries of each row."""
    token_ids: npt.NDArray[np.uint32]
    logprobs: npt.NDArray[np.float32]
    sampled_ranks: npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class PromptLogprobRows:
    """Log probabilities of a chunk of one sequence's prompt."""

    slot: int
    start: int
    """Position of the first prompt token described."""
    logprobs: LogprobRows


@dataclass(frozen=True, slots=True)
class BadSlot:
    """A sequence that failed in a step."""

    slot: int
    code: int
    message: str
    field: str = ""
    """The request's field at fault, if there is one."""


class StepTimings(NamedTuple):
    """Durations of one step outside of the scheduler's own work, nanoseconds."""

    encode_ns: int = 0
    wire_ns: int = 0
    """Both ways: what is left of the round trip without the worker's share."""
    queue_ns: int = 0
    """In the worker, until the model thread took it up; the step before runs then."""
    prepare_ns: int = 0
    forward_ns: int = 0
    sample_ns: int = 0
    decode_ns: int = 0

    @property
    def compute_ns(self) -> int:
        """While the worker was at it."""
        return self.prepare_ns + self.forward_ns + self.sample_ns


class ModelRunnerOutput(NamedTuple):
    """The result of one step; rows are in batch order."""

    step: int
    num_sampled_tokens: list[int] | None
    """Tokens each sequence got; None: 1 each. More than 1: accepted draft tokens, and the one after them."""
    token_ids: list[int]
    logprobs: LogprobRows | None = None
    prompt_logprobs: Sequence[PromptLogprobRows] = ()
    bad_slots: Sequence[BadSlot] = ()
    num_draft_tokens: list[int] | None = None
    """Draft tokens tried for each sequence; None: no drafts."""
    pooled: dict[int, bytes] | None = None
    """Embeddings by slot, little-endian float32: of sequences that are pooled, with their last prompt token."""
    timings: StepTimings | None = None
    """Where the step's time went, as far as it is known."""
