"""StepInput and StepOutput: the input and output of one step. Frozen and plain; no tensors, no messages."""

from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from pagoda_common.errors import Code
from pagoda_common.params.pooling_params import PoolingParams
from pagoda_common.params.sampling_params import SamplingParams

IntArray: TypeAlias = npt.NDArray[np.int64]
TokenArray: TypeAlias = npt.NDArray[np.int32]
FloatArray: TypeAlias = npt.NDArray[np.float32]

NO_INTS: IntArray = np.zeros(0, dtype=np.int64)
NO_PAIRS: IntArray = np.zeros((0, 2), dtype=np.int64)
NO_BLOCKS: IntArray = np.zeros((0, 0), dtype=np.int64)
NULL_BLOCK = 0xFFFFFFFF
"""Replaces a block that no query reads."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BadSlot:
    """One sequence that could not be computed."""

    slot: int
    code: Code
    message: str
    field: str = ""
    """The wrong field of the request, if there is one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NewRequest:
    """A sequence that enters a slot."""

    slot: int
    request_id: str
    prompt_token_ids: IntArray
    sampling_params: SamplingParams
    """The seed is set unless the request is greedy."""
    block_ids: IntArray
    """Blocks in the first cache group with blocks; NULL_BLOCK for a block that left the group's window."""
    group_block_ids: IntArray = field(default_factory=lambda: NO_BLOCKS)
    """[groups - 1, blocks] block ids in the other groups."""
    output_token_ids: IntArray = field(default_factory=lambda: NO_INTS)
    """Known output tokens."""
    num_computed_tokens: int = 0
    """Number of tokens whose KV is in the cache."""
    eos_token_ids: tuple[int, ...] = ()
    """Tokens masked together with the stop tokens until min_tokens are reached."""
    is_beam: bool = False
    """Whether it is a beam, for which tokens that its constraint forbids have no log probability."""
    pooling: PoolingParams | None = None
    """Set if the sequence is pooled and samples no token."""
    lora_number: int = 0
    """Number of its LoRA adapter (AdapterStore); 0: none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepInput:
    """One step. Changes are applied in the order of the fields."""

    freed_slots: IntArray = field(default_factory=lambda: NO_INTS)
    blocks_to_swap_out: IntArray = field(default_factory=lambda: NO_PAIRS)
    """[n, 2] (device block, host block)."""
    blocks_to_swap_in: IntArray = field(default_factory=lambda: NO_PAIRS)
    """[n, 2] (host block, device block)."""
    blocks_to_copy: IntArray = field(default_factory=lambda: NO_PAIRS)
    """[n, 2] (from block, to block)."""
    states_to_swap_out: IntArray = field(default_factory=lambda: NO_PAIRS)
    """[n, 2] (snapshot, host snapshot), together with the blocks."""
    states_to_swap_in: IntArray = field(default_factory=lambda: NO_PAIRS)
    """[n, 2] (host snapshot, snapshot), together with the blocks."""
    loras_to_remove: IntArray = field(default_factory=lambda: NO_INTS)
    """Numbers of adapters that no new request has."""
    new_requests: list[NewRequest] = field(default_factory=list)
    rejected: list[BadSlot] = field(default_factory=list)
    """New requests that could not be read; their slots report this failure until they are freed."""
    appended_slots: IntArray = field(default_factory=lambda: NO_INTS)
    appended_block_ids: IntArray = field(default_factory=lambda: NO_INTS)
    appended_groups: IntArray = field(default_factory=lambda: NO_INTS)
    """Cache group of each, counted among those with blocks; empty: the first."""
    states_to_load: IntArray = field(default_factory=lambda: NO_PAIRS)
    """[n, 2] (snapshot, slot)."""
    states_to_save: IntArray = field(default_factory=lambda: NO_PAIRS)
    """[n, 2] (slot, snapshot), after the forward pass."""
    num_seqs: int = 0
    """Sequences in the batch; 0 runs no forward pass."""
    slots: IntArray | None = None
    """[num_seqs] in batch order; None is the batch of the step before."""
    num_scheduled_tokens: IntArray | None = None
    """[num_seqs]; None is 1 each."""
    num_lookahead_tokens: IntArray | None = None
    """[num_seqs] maximum draft tokens of each sequence, which have blocks; None is 0 each."""
    arrived_ns: int = 0
    """time.perf_counter_ns() when the step arrived in this process; 0 if not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogprobColumns:
    """Log probabilities of token rows. Each row's first entry is the token itself, then the top ones."""

    rows: IntArray
    """Indexes of the rows described."""
    counts: IntArray
    """Number of entries of each row."""
    token_ids: IntArray
    logprobs: FloatArray
    sampled_ranks: IntArray
    """Rank of each row's token; 1 is the likeliest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptLogprobs:
    """Log probabilities of a chunk of prompt tokens."""

    slot: int
    start: int
    """Position of the first token described."""
    logprobs: LogprobColumns


@dataclass(frozen=True, kw_only=True, slots=True)
class PooledColumns:
    """Results of pooled sequences whose prompt is computed."""

    slots: IntArray
    """[n]."""
    values: list[FloatArray]
    """[n] the values of each: [size], or [num_tokens, size]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimings:
    """Durations of one step, nanoseconds."""

    queue_ns: int = 0
    prepare_ns: int = 0
    forward_ns: int = 0
    sample_ns: int = 0
    """Until the tokens are on the host; for a step that was launched while another one computed, including the rest of
    that one."""


@dataclass(kw_only=True, slots=True)
class StepOutput:
    """The result of one step, in batch order."""

    num_sampled_tokens: IntArray | None = None
    """[num_seqs]; None is 1 each."""
    num_draft_tokens: IntArray | None = None
    """[num_seqs] draft tokens tried; None is 0 each."""
    token_ids: IntArray = field(default_factory=lambda: NO_INTS)
    logprobs: LogprobColumns | None = None
    """Rows index token_ids."""
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    pooled: PooledColumns | None = None
    """Results of pooled sequences, which have 0 in num_sampled_tokens."""
    bad_slots: list[BadSlot] = field(default_factory=list)
    timings: StepTimings = StepTimings()
    """Set at the end of the step."""
