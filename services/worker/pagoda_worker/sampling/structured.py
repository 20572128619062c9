"""Constraints: masks of tokens that constrained sequences may sample. Knows matchers and bits; no tensors."""

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, partial

import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor, LLMatcher

from pagoda_common.errors import PagodaError
from pagoda_common.grammar.matcher import forced_fault
from pagoda_common.params.structured_outputs import StructuredOutputsParams
from pagoda_worker.sampling.grammars import Grammars
from pagoda_worker.steps.step import IntArray, NewRequest, StepInput

NUM_FILL_THREADS = 4
Words = npt.NDArray[np.uint32]


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenMask:
    """The tokens that constrained rows of a batch may sample."""

    rows: IntArray
    """[m] places in the batch."""
    bits: npt.NDArray[np.uint8]
    """[m, bytes] token i is bit i % 8 of byte i // 8."""
    is_beam: npt.NDArray[np.bool_]
    """[m] whether the row belongs to a beam search, which scores only allowed tokens."""

    def of_beams(self, places: IntArray) -> "TokenMask | None":
        """The mask of the beams among the rows at `places` (ascending), renumbered by their index there."""
        found = np.isin(self.rows, places) & self.is_beam
        if not found.any():
            return None
        rows = np.searchsorted(places, self.rows[found])
        return TokenMask(rows=rows, bits=self.bits[found], is_beam=self.is_beam[found])


@dataclass(kw_only=True, slots=True)
class ConstrainedSequence:
    """One output and the state of its constraint, a function of the output's tokens."""

    params: StructuredOutputsParams
    compile: Callable[[], LLMatcher]
    """Returns the matcher at the start of an output, after waiting for it; raises PagodaError."""
    end_token_ids: frozenset[int]
    """Tokens that end the grammar and are not part of it."""
    start_run: tuple[int, ...]
    """Number of output tokens before the constraint begins."""
    pending: list[int]
    """Number of output tokens that the matcher has not seen."""
    is_beam: bool = False
    matcher: LLMatcher | None = None
    is_started: bool = False
    is_ended: bool = False
    problem: str | None = None
    """The reason why nothing can be sampled any more."""
    recent: deque[int] = field(default_factory=deque)

    def catch_up(self) -> None:
        """Wait for the grammar if it is still being compiled, and show it the tokens so far."""
        if self.matcher is None and self.problem is None:
            try:
                self.matcher = self.compile()
            except PagodaError as error:
                self.problem = error.message
            self.recent = deque(maxlen=len(self.start_run))
            self.is_started = not self.start_run
        pending, self.pending = self.pending, []
        for token_id in pending:
            self._accept(token_id)

    def _accept(self, token_id: int) -> None:
        if self.problem is not None or self.is_ended or self.matcher is None:
            return
        if not self.is_started:
            self.recent.append(token_id)
            self.is_started = tuple(self.recent) == self.start_run
        elif token_id in self.end_token_ids:
            self.is_ended = True
        elif not self.matcher.consume_token(token_id):
            self.fail()

    def fail(self) -> None:
        """Note the matcher's error."""
        assert self.matcher is not None
        self.problem = f"the output cannot continue under structured_outputs: {self.matcher.get_error().strip()}"[:500]


class Constraints:
    """Matchers by slot. A step requests the mask before the forward pass and uses it afterwards."""

    def __init__(
        self, *, grammars: Grammars, max_num_seqs: int, vocab_size: int, eos_token_ids: tuple[int, ...]
    ) -> None:
        """`eos_token_ids` also end outputs of requests that ignore them, because a grammar needs an end."""
        self._grammars = grammars
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._sequences: dict[int, ConstrainedSequence] = {}
        self._is_constrained = np.zeros(max_num_seqs, dtype=np.bool_)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="token-mask")

    @property
    def is_empty(self) -> bool:
        """Whether no sequence is constrained."""
        return not self._sequences

    def apply(self, step: StepInput, is_in_use: npt.NDArray[np.bool_]) -> None:
        """Drop freed slots, add new constrained sequences."""
        if self._sequences:
            for slot in (*step.freed_slots.tolist(), *(request.slot for request in step.new_requests)):
                if self._sequences.pop(slot, None) is not None:
                    self._is_constrained[slot] = False
        for request in step.new_requests:
            is_taken = request.slot < is_in_use.size and bool(is_in_use[request.slot])
            if is_taken and request.sampling_params.structured_outputs is not None:
                self._add(request)

    def _add(self, request: NewRequest) -> None:
        params = request.sampling_params
        assert params.structured_outputs is not None
        self._grammars.template(params.structured_outputs)
        ends = {*(request.eos_token_ids or self._eos_token_ids), *(params.stop_token_ids or ())}
        self._sequences[request.slot] = ConstrainedSequence(
            params=params.structured_outputs,
            compile=partial(self._grammars.matcher, params.structured_outputs),
            end_token_ids=frozenset(token_id for token_id in ends if token_id < self._vocab_size),
            start_run=tuple(params.structured_outputs.start_after_token_ids),
            pending=request.output_token_ids.tolist(),
            is_beam=request.is_beam,
        )
        self._is_constrained[request.slot] = True

    def begin(self, slots: IntArray) -> Future[TokenMask] | None:
        """Start computing the mask of the rows of `slots` during the forward pass; None if no row has one."""
        if not self._sequences:
            return None
        rows = np.flatnonzero(self._is_constrained[slots])
        if not rows.size:
            return None
        return self._thread.submit(self._mask, rows, [self._sequences[slot] for slot in slots[rows].tolist()])

    @cached_property
    def _executor(self) -> LLExecutor:
        # Where the forward pass has all cores, a second thread that waits for one makes the mask three times slower.
        return LLExecutor(max(1, min(NUM_FILL_THREADS, len(os.sched_getaffinity(0)) // 4)))

    def _mask(self, rows: IntArray, sequences: list[ConstrainedSequence]) -> TokenMask:
        for sequence in sequences:
            sequence.catch_up()
        is_beam = np.array([sequence.is_beam for sequence in sequences])
        compiled = [place for place, sequence in enumerate(sequences) if sequence.matcher is not None]
        if not compiled:
            nothing = np.zeros((rows.size, -(-self._vocab_size // 8)), dtype=np.uint8)
            return TokenMask(rows=rows, bits=nothing, is_beam=is_beam)
        end_id, num_bits = self._grammars.compiler.end_id, self._grammars.compiler.num_bits
        bits: Words = np.zeros((rows.size, -(-num_bits // 32)), dtype=np.uint32)
        self._fill(bits, sequences)
        may_end = (bits[:, end_id // 32] >> np.uint32(end_id % 32)) & 1
        for place, sequence in enumerate(sequences):
            if not sequence.is_started and sequence.problem is None:
                bits[place] = 0xFFFFFFFF
                _set(bits[place], sequence.end_token_ids, False)
            elif sequence.is_ended or may_end[place]:
                _set(bits[place], sequence.end_token_ids, True)
        return TokenMask(rows=rows, bits=bits.view(np.uint8), is_beam=is_beam)

    def _fill(self, bits: Words, sequences: list[ConstrainedSequence]) -> None:
        """The masks of rows whose grammar has begun and not ended."""
        matched = []
        too_long: dict[tuple[object, ...], str] = {}
        for place, sequence in enumerate(sequences):
            if sequence.matcher is None or not sequence.is_started or sequence.is_ended or sequence.problem is not None:
                continue
            fault = too_long.get(sequence.params.grammar_key) if too_long else None
            fault = fault or forced_fault(sequence.matcher)
            if fault is None:
                matched.append((sequence.matcher, place))
                continue
            sequence.problem = fault
            too_long[sequence.params.grammar_key] = fault  # others of this constraint fail before they cost as much
            self._grammars.drop(sequence.params)
        if not matched:
            return
        self._executor.unsafe_compute_mask_ptr(matched, bits.ctypes.data, bits.shape[1] * 4, bits.shape[0])
        for matcher, place in matched:
            if matcher.is_error():
                sequences[place].fail()
                bits[place] = 0

    def advance(self, slots: IntArray, token_ids: IntArray) -> None:
        """Pass the sampled tokens of the rows of `slots` to their matchers."""
        if not self._sequences:
            return
        for row in np.flatnonzero(self._is_constrained[slots]).tolist():
            self._sequences[int(slots[row])].pending.append(int(token_ids[row]))

    def problem_of(self, slot: int) -> str | None:
        """The reason why a constrained `slot` has no token to sample; None if it is not constrained."""
        sequence = self._sequences.get(slot)
        if sequence is None:
            return None
        return sequence.problem or "structured_outputs and the other parameters together leave no token to sample"


def _set(row: Words, token_ids: frozenset[int], is_allowed: bool) -> None:
    for token_id in token_ids:
        bit = np.uint32(1 << (token_id % 32))
        row[token_id // 32] = row[token_id // 32] | bit if is_allowed else row[token_id // 32] & ~bit
