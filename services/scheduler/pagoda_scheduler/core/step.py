"""The messages between scheduler and worker in one step: plain frozen data, no tensors, no gRPC.

Objects that every step makes are named tuples: a frozen dataclass takes two to three times as long to make.
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
    """Known output tokens; not empty after a preemption or a recovery."""
    sampling_params: SamplingParams
    eos_token_ids: tuple[int, ...]
    block_ids: list[int]
    num_computed_tokens: int
    is_beam: bool = False
    pooling: PoolingParams | None = None
    """Set if the sequence is pooled and samples no token."""
    group_block_ids: Sequence[Sequence[int]] = ()
    """Block tables of the other groups with blocks, each as long as `block_ids`. NO_BLOCK stands in any table for
    a block that left the group's window."""
    lora_number: int = 0
    """Number by which the workers know its adapter; 0: no adapter."""


class SchedulerOutput(NamedTuple):
    """One step: the changes since the last one, and how many tokens each slot computes."""

    step: int
    new_requests: list[NewRequestData]
    freed_slots: list[int]
    slots: list[int]
    """Slots in batch order."""
    num_scheduled_tokens: list[int]
    """Aligned with `slots`, without draft tokens: the worker may try fewer than allowed."""
    appended_slots: list[int]
    """Slots that get one more block, aligned with `appended_block_ids`."""
    appended_block_ids: list[int]
    num_tokens: int
    """Tokens in the batch: the sum of `num_scheduled_tokens`."""
    blocks_to_swap_out: Sequence[tuple[int, int]] = ()
    """(device block, host block), done first. No block is the target of two moves, because moves of a kind run
    concurrently."""
    blocks_to_swap_in: Sequence[tuple[int, int]] = ()
    """(host block, device block), done second."""
    blocks_to_copy: Sequence[tuple[int, int]] = ()
    """(from, to), both on the device, done third."""
    num_lookahead_tokens: list[int] | None = None
    """Maximum draft tokens of each sequence, aligned with `slots`; None: no drafts."""
    appended_groups: Sequence[int] = ()
    """Index, among the groups with blocks, of each of `appended_block_ids`; empty: all for the first."""
    states_to_load: Sequence[tuple[int, int]] = ()
    """(snapshot, slot): recurrent states that slots begin this step with."""
    states_to_save: Sequence[tuple[int, int]] = ()
    """(slot, snapshot): recurrent states to keep as they are after this step."""
    states_to_swap_out: Sequence[tuple[int, int]] = ()
    """(snapshot, host snapshot), done with `blocks_to_swap_out`."""
    states_to_swap_in: Sequence[tuple[int, int]] = ()
    """(host snapshot, snapshot), done with `blocks_to_swap_in`."""
    loras_to_remove: Sequence[int] = ()
    """Numbers of adapters that the workers drop before new requests enter."""
    num_prefills_ended: int = 0
    """Number of prefills that end in this step, which samples a token for each; without decodes."""


@dataclass(frozen=True, slots=True)
class LogprobRows:
    """Log probabilities of some token rows, in columns; entries of a row are adjacent, the sampled token first."""

    rows: npt.NDArray[np.uint32]
    """Indexes into the step's token_ids."""
    counts: npt.NDArray[np.uint32]
    """Number of entries of each row."""
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
    """The wrong field of the request, if there is one."""


class StepTimings(NamedTuple):
    """Durations of one step outside of the scheduler's own work, nanoseconds."""

    encode_ns: int = 0
    wire_ns: int = 0
    """Both ways: the round trip less the worker's time."""
    queue_ns: int = 0
    """Waiting in the worker for the model thread, while the step before runs."""
    prepare_ns: int = 0
    forward_ns: int = 0
    sample_ns: int = 0
    decode_ns: int = 0

    @property
    def compute_ns(self) -> int:
        """Time in which the worker processed the step."""
        return self.prepare_ns + self.forward_ns + self.sample_ns


class ModelRunnerOutput(NamedTuple):
    """The result of one step; rows are in batch order."""

    step: int
    num_sampled_tokens: list[int] | None
    """Number of tokens that each sequence got; None: 1 each. More than 1: accepted draft tokens, and the token after
    them."""
    token_ids: list[int]
    logprobs: LogprobRows | None = None
    prompt_logprobs: Sequence[PromptLogprobRows] = ()
    bad_slots: Sequence[BadSlot] = ()
    num_draft_tokens: list[int] | None = None
    """Draft tokens tried for each sequence; None: no drafts."""
    pooled: dict[int, bytes] | None = None
    """Embeddings of pooled sequences by slot, little-endian float32, in the step of their last prompt token."""
    timings: StepTimings | None = None
    """Durations of the step, if known."""
