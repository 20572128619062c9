"""InputBatch: the state of each sequence between steps, in arrays indexed by slot. No tensors."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pagoda_common.config.speculative_config import takes_drafts
from pagoda_common.errors import Code
from pagoda_common.params.pooling_params import PoolingParams
from pagoda_kernels.decoder.decode_rows import DecodeRows, SequenceColumns, append_rows, decode_rows
from pagoda_kernels.decoder.decoder_layers import DecoderLayers
from pagoda_worker.lora.adapter import Adapter
from pagoda_worker.models.cache_groups import CacheGroup
from pagoda_worker.sampling.columns import grown
from pagoda_worker.sampling.drafter import Drafter
from pagoda_worker.sampling.sampling_columns import SamplingColumns
from pagoda_worker.steps.step import NO_INTS, NULL_BLOCK, BadSlot, IntArray, NewRequest, StepInput, TokenArray

FIRST_TOKENS = 1024
"""Initial number of columns of the token log."""
ONE_GROUP = (CacheGroup("full", ()),)
"""Every layer keeps every token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardInputs:
    """The token rows of one step, packed by sequence. Bad slots are left out."""

    batch_rows: IntArray
    """[num_rows] index of each row in the scheduler's batch."""
    slots: IntArray
    """[num_rows]."""
    num_scheduled_tokens: IntArray
    """[num_rows] query tokens of each, draft tokens included."""
    num_draft_tokens: IntArray
    """[num_rows] draft tokens among these, which follow the known tokens in the log."""
    seq_lens: IntArray
    """[num_rows] tokens whose KV is in the cache after the step, draft tokens included."""
    block_tables: npt.NDArray[np.int32]
    """[num_groups, num_rows, max_blocks]; only a sequence's own blocks are meaningful, and blocks outside of a window
    are not read."""
    input_ids: IntArray
    """[num_tokens]."""
    positions: IntArray
    """[num_tokens]."""
    slot_mappings: IntArray
    """[num_groups, num_tokens] block_id * block_size + offset."""
    is_sampled: npt.NDArray[np.bool_]
    """[num_rows] whether the step computes the sequence's last known token."""
    is_plain: bool = False
    """Whether every sequence of the batch has one token, its last known one, and no draft."""
    is_greedy: bool = False
    """Whether the step is plain, and every sequence samples the likeliest token without further output."""
    bad_slots: list[BadSlot] = field(default_factory=list)
    pooled: IntArray = field(default_factory=lambda: NO_INTS)
    """[num_pooled] pooled rows whose prompt ends in this step, so they do not sample: indexes into the columns above.
    """
    second_texts: IntArray = field(default_factory=lambda: NO_INTS)
    """[num_rows] first token of the second text of a pair, 0 for none; empty if there are no pairs."""

    adapters: Sequence[Adapter | None] = ()
    """[num_rows] adapter number of each sequence; empty if none has one."""

    @property
    def block_table(self) -> npt.NDArray[np.int32]:
        """[num_rows, max_blocks] of the first group."""
        return self.block_tables[0]  # type: ignore[no-any-return]  # numpy: an index may be anything

    @property
    def slot_mapping(self) -> IntArray:
        """[num_tokens] of the first group."""
        return self.slot_mappings[0]  # type: ignore[no-any-return]

    def readable_blocks(self, row: int, groups: Sequence[CacheGroup], block_size: int) -> IntArray:
        """Ids of blocks that the queries of a row read, of all groups."""
        seq_len = int(self.seq_lens[row])
        first_token = seq_len - int(self.num_scheduled_tokens[row])
        tables = self.block_tables[:, row, : -(-seq_len // block_size)]
        return _readable(tables, groups, first_token, block_size)


def _readable(tables: npt.NDArray[np.int32], groups: Sequence[CacheGroup], position: int, block_size: int) -> IntArray:
    """The blocks that queries from `position` see, from block tables [num_groups, num_blocks] of one sequence."""
    if not groups:
        return NO_INTS
    firsts = (0 if group.window is None else max(0, position - group.window + 1) // block_size for group in groups)
    return np.concatenate([table[first:] for table, first in zip(tables, firsts, strict=True)]).astype(np.int64)


class InputBatch:
    """Token logs, block tables and sampling parameters of all slots."""

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        num_blocks: int,
        vocab_size: int,
        drafter: Drafter | None = None,
        groups: Sequence[CacheGroup] = ONE_GROUP,
    ) -> None:
        """
        Args:
            drafter: drafts tokens if a step allows it.
            groups: cache groups with blocks.
        """
        self._groups = tuple(groups)
        self._max_num_seqs = max_num_seqs
        self._max_tokens = max_model_len + 1  # the token sampled at the very end is logged as well
        self._block_size = block_size
        self._num_blocks = num_blocks
        self.num_blocks_used = 0
        """One more than the highest block id used so far."""
        self._vocab_size = vocab_size
        rows = max_num_seqs
        self.tokens: TokenArray = np.zeros((min(rows, 64), min(self._max_tokens, FIRST_TOKENS)), dtype=np.int32)
        """[slots, tokens] prompt and output; both dimensions grow with use."""
        self.block_tables = np.zeros((max(1, len(self._groups)), min(rows, 64), 16), dtype=np.int32)
        """[groups, slots, blocks], aligned by position."""
        self.num_prompt_tokens = np.zeros(rows, dtype=np.int64)
        self.num_tokens = np.zeros(rows, dtype=np.int64)
        self.num_computed_tokens = np.zeros(rows, dtype=np.int64)
        self.num_group_blocks = np.zeros((self.block_tables.shape[0], rows), dtype=np.int64)
        """[groups, slots] number of blocks, equal for all groups between steps."""
        self.num_blocks_of: IntArray = self.num_group_blocks[0]
        """[slots]."""
        self.is_in_use = np.zeros(rows, dtype=np.bool_)
        self.takes_drafts = np.zeros(rows, dtype=np.bool_)
        self.drafter = drafter
        self._max_num_tokens = np.zeros(rows, dtype=np.int64)
        """[slots] maximum number of prompt and output tokens."""
        self.poolers: dict[int, PoolingParams] = {}
        """Pooled sequences by slot, which sample nothing."""
        self.adapters: dict[int, Adapter] = {}
        """Adapters of sequences by slot."""
        self.sampling = SamplingColumns(max_num_seqs=rows, vocab_size=vocab_size)
        self._failed: dict[int, BadSlot] = {}
        self._last_slots: IntArray = np.zeros(0, dtype=np.int64)
        self._plain_size = -1
        """Constants for plain steps, by batch size."""

    def apply(self, step: StepInput) -> None:
        """Free slots, add sequences, append blocks."""
        for slot in step.freed_slots.tolist():
            self._free(slot)
        for bad in step.rejected:
            self._fail(bad)
        for request in step.new_requests:
            self._add(request)
        if step.appended_slots.size:
            groups = step.appended_groups.tolist() or [0] * step.appended_slots.size
            self._append_blocks(step.appended_slots.tolist(), step.appended_block_ids.tolist(), groups)

    def fail(self, slot: int, code: Code, message: str, *, field: str = "") -> BadSlot:
        """Mark a slot as bad until it is freed or filled again; `field`: the wrong field of the request."""
        bad = BadSlot(slot=slot, code=code, message=message, field=field)
        self._fail(bad)
        return bad

    def _fail(self, bad: BadSlot) -> None:
        if bad.slot < self._max_num_seqs:
            self._failed[bad.slot] = bad

    def _free(self, slot: int) -> None:
        if slot >= self._max_num_seqs:
            return
        self._failed.pop(slot, None)
        self.is_in_use[slot] = False
        self.num_tokens[slot] = self.num_computed_tokens[slot] = 0
        self.num_group_blocks[:, slot] = 0
        self.poolers.pop(slot, None)
        self.adapters.pop(slot, None)
        self.sampling.clear(slot)
        if self.drafter is not None:
            self.drafter.forget(slot)

    def _add(self, request: NewRequest) -> None:
        slot = request.slot
        if slot >= self._max_num_seqs:
            return
        self._free(slot)
        prompt, output = request.prompt_token_ids, request.output_token_ids
        num_tokens = prompt.size + output.size
        problem = self._problem(request, num_tokens)
        if problem is not None:
            self.fail(slot, Code.INVALID_ARGUMENT, f"request {request.request_id}: {problem}")
            return
        self.tokens = grown(self.tokens, (slot + 1, num_tokens + 1))
        self.tokens[slot, : prompt.size] = prompt
        self.tokens[slot, prompt.size : num_tokens] = output
        self.num_prompt_tokens[slot] = prompt.size
        self.num_tokens[slot] = num_tokens
        self.num_computed_tokens[slot] = request.num_computed_tokens
        params = request.sampling_params
        limit = self._max_tokens - 1
        self._max_num_tokens[slot] = limit if params.max_tokens is None else min(prompt.size + params.max_tokens, limit)
        self.takes_drafts[slot] = takes_drafts(params) and not request.is_beam and request.pooling is None
        if request.pooling is not None:
            self.poolers[slot] = request.pooling
        self.is_in_use[slot] = True
        self.sampling.set(slot, request.sampling_params, request.eos_token_ids)
        block_ids = [*request.block_ids.tolist(), *request.group_block_ids.reshape(-1).tolist()]
        groups = np.repeat(np.arange(1 + request.group_block_ids.shape[0]), request.block_ids.size)
        self._append_blocks([slot] * len(block_ids), block_ids, groups.tolist())

    def adapters_of(self, slots: IntArray) -> list[Adapter | None]:
        """[num_slots] adapter number of each; empty if none has one."""
        if not self.adapters:
            return []
        adapters = [self.adapters.get(slot) for slot in slots.tolist()]
        return adapters if any(adapters) else []

    def _problem(self, request: NewRequest, num_tokens: int) -> str | None:
        if request.prompt_token_ids.size == 0:
            return "the prompt is empty"
        if num_tokens >= self._max_tokens:
            return f"prompt and output have {num_tokens} tokens, max_model_len is {self._max_tokens - 1}"
        highest = max(int(request.prompt_token_ids.max()), int(request.output_token_ids.max(initial=0)))
        if highest >= self._vocab_size:
            return f"token id {highest} is outside of the vocabulary of {self._vocab_size}"
        if request.group_block_ids.shape[0] != len(self._groups) - 1 and len(self._groups) > 1:
            return f"group_block_ids has {request.group_block_ids.shape[0]} groups, must have {len(self._groups) - 1}"
        if request.num_computed_tokens >= num_tokens:
            return f"num_computed_tokens is {request.num_computed_tokens}, must be less than {num_tokens}"
        return None

    def _append_blocks(self, slots: list[int], block_ids: list[int], groups: list[int]) -> None:
        """Append each block to its slot in its group; a slot may occur repeatedly. A loop, because few blocks are
        faster without numpy."""
        if not slots:
            return
        block_ids = [0 if block == NULL_BLOCK else block for block in block_ids]
        highest_slot, highest, num_groups = max(slots), max(block_ids), self.block_tables.shape[0]
        if max(groups) >= num_groups:
            raise ValueError(f"cache group {max(groups)} is not below {num_groups}")
        if highest_slot >= self._max_num_seqs:
            raise ValueError(f"slot {highest_slot} is not below max_num_seqs ({self._max_num_seqs})")
        if highest >= self._num_blocks:
            raise ValueError(f"block {highest} is not below num_blocks ({self._num_blocks})")
        self.num_blocks_used = max(self.num_blocks_used, highest + 1)
        counts = self.num_group_blocks
        for slot, block_id, group in zip(slots, block_ids, groups, strict=True):
            place = int(counts[group, slot])
            if slot >= self.block_tables.shape[1] or place >= self.block_tables.shape[2]:
                self.block_tables = grown(self.block_tables, (num_groups, slot + 1, place + 1))
            self.block_tables[group, slot, place] = block_id
            counts[group, slot] = place + 1
        if num_groups > 1 and (counts[:, slots] != counts[0, slots]).any():
            raise ValueError("the cache groups of a sequence have different numbers of blocks")

    def readable_blocks(self, slot: int) -> IntArray:
        """Ids of blocks that queries of a slot may read, of all groups."""
        tables = self.block_tables[:, slot, : int(self.num_blocks_of[slot])]
        # The last computed token's query is one of them.
        return _readable(tables, self._groups, int(self.num_computed_tokens[slot]) - 1, self._block_size)

    def decode(self, step: StepInput, layers: DecoderLayers) -> IntArray | None:
        """Compute a step whose changes are applied, if each of its sequences only decodes its likeliest token:
        [num_seqs] tokens, which are logged. None: nothing is done."""
        slots = self._last_slots if step.slots is None else step.slots
        has_more = step.num_scheduled_tokens is not None or self.drafter is not None or self._failed or self.poolers
        if has_more or not slots.size or slots.size != step.num_seqs or self.adapters_of(slots):
            return None
        more_tables = self.block_tables[1:]
        token_ids = layers.decode(slots, self._columns(), max_tokens=self._max_tokens, more_tables=more_tables)
        if token_ids is not None:
            self._last_slots = slots
        return token_ids

    def prepare(self, step: StepInput) -> ForwardInputs:
        """The token rows of a step whose changes are applied. Slots that cannot be computed become bad slots."""
        slots = self._last_slots if step.slots is None else step.slots
        if slots.size != step.num_seqs:
            raise ValueError(f"the batch has {slots.size} slots for num_seqs {step.num_seqs}")
        self._last_slots = slots
        num_scheduled = step.num_scheduled_tokens
        if num_scheduled is None and self.drafter is None and not self._failed and not self.poolers:
            plain = self._prepare_plain(slots)
            if plain is not None:
                return plain
        num_scheduled = np.ones(slots.size, dtype=np.int64) if num_scheduled is None else num_scheduled
        if num_scheduled.size != slots.size:
            raise ValueError(f"num_scheduled_tokens has {num_scheduled.size} entries for {slots.size} slots")
        if slots.size and int(slots.max()) >= self._max_num_seqs:
            raise ValueError(f"slot {int(slots.max())} is not below max_num_seqs ({self._max_num_seqs})")
        batch_rows = np.arange(slots.size)
        seq_lens = self.num_computed_tokens[slots] + num_scheduled
        num_tokens = self.num_tokens[slots]
        capacity = self._capacity(slots)
        is_good = (
            self.is_in_use[slots]
            & (num_scheduled > 0)
            & (seq_lens <= np.minimum(num_tokens, capacity))
            & (num_tokens < self._max_tokens)
        )
        bad_slots: list[BadSlot] = []
        if self._failed or not is_good.all():
            is_good &= ~np.isin(slots, list(self._failed))
            bad_slots = [self._why(int(slots[row]), int(num_scheduled[row])) for row in np.flatnonzero(~is_good)]
            batch_rows, slots, num_scheduled = batch_rows[is_good], slots[is_good], num_scheduled[is_good]
            seq_lens, num_tokens = seq_lens[is_good], num_tokens[is_good]
        num_draft = np.zeros_like(slots)
        if self.drafter is not None and step.num_lookahead_tokens is not None:
            if step.num_lookahead_tokens.size != step.num_seqs:
                size = step.num_lookahead_tokens.size
                raise ValueError(f"num_lookahead_tokens has {size} entries for {step.num_seqs} slots")
            capacity = self._capacity(slots)
            room = np.minimum(capacity, self._max_num_tokens[slots] - 1) - seq_lens
            most = np.minimum(step.num_lookahead_tokens[batch_rows], room).clip(min=0)
            most[~self.takes_drafts[slots] | (seq_lens != num_tokens)] = 0
            num_draft = self._draft(self.drafter, slots, num_tokens, most)
            num_scheduled, seq_lens = num_scheduled + num_draft, seq_lens + num_draft
        starts = seq_lens - num_scheduled
        if num_scheduled.size and int(num_scheduled.max()) == 1:
            token_slots, positions = slots, starts
        else:
            token_slots = np.repeat(slots, num_scheduled)
            begins = np.cumsum(num_scheduled) - num_scheduled
            positions = np.arange(token_slots.size) + np.repeat(starts - begins, num_scheduled)
        is_sampled, pooled = seq_lens - num_draft == num_tokens, NO_INTS
        if self.poolers:
            is_pooled = is_sampled & np.isin(slots, list(self.poolers))
            is_sampled, pooled = is_sampled & ~is_pooled, np.flatnonzero(is_pooled)
        block_ids, tables = self._block_ids(token_slots, positions)
        max_blocks = -(-int(seq_lens.max(initial=0)) // self._block_size)
        return ForwardInputs(
            batch_rows=batch_rows,
            slots=slots,
            num_scheduled_tokens=num_scheduled,
            num_draft_tokens=num_draft,
            seq_lens=seq_lens,
            block_tables=tables[:, slots, :max_blocks],
            input_ids=self.tokens[token_slots, positions].astype(np.int64),
            positions=positions,
            slot_mappings=block_ids * self._block_size + positions % self._block_size,
            is_sampled=is_sampled,
            bad_slots=bad_slots,
            pooled=pooled,
            second_texts=self._second_texts(slots) if pooled.size else NO_INTS,
            adapters=self.adapters_of(slots),
        )

    def _second_texts(self, slots: IntArray) -> IntArray:
        places = [self.poolers[slot].second_text_start if slot in self.poolers else 0 for slot in slots.tolist()]
        return np.array(places, dtype=np.int64) if any(places) else NO_INTS

    def _capacity(self, slots: IntArray) -> IntArray:
        """[num_rows] tokens that fit the blocks of each; unlimited if there are no blocks."""
        if not self._groups:
            return np.full(slots.size, self._max_tokens, dtype=np.int64)
        return self.num_blocks_of[slots] * self._block_size

    def _block_ids(self, slots: IntArray, positions: IntArray) -> tuple[IntArray, npt.NDArray[np.int32]]:
        """[num_groups, num_tokens] the block of each token, and the tables; empty if there are no blocks."""
        if not self._groups:
            return np.zeros((0, positions.size), dtype=np.int64), self.block_tables[:0]
        block_ids = self.block_tables[:, slots, positions // self._block_size].astype(np.int64, order="C")
        return block_ids, self.block_tables

    def _prepare_plain(self, slots: IntArray) -> ForwardInputs | None:
        """The inputs of a common step, in a tenth of the time; None for other steps."""
        rows = decode_rows(slots, self._columns(), block_size=self._block_size, max_tokens=self._max_tokens)
        if rows is None:
            return None
        if self._plain_size != slots.size:
            self._plain_size = slots.size
            self._each, self._ones = np.arange(slots.size), np.ones(slots.size, dtype=np.int64)
            self._zeros, self._all = np.zeros(slots.size, dtype=np.int64), np.ones(slots.size, dtype=np.bool_)
        return ForwardInputs(
            batch_rows=self._each,
            slots=slots,
            num_scheduled_tokens=self._ones,
            num_draft_tokens=self._zeros,
            seq_lens=rows.seq_lens,
            block_tables=self.block_tables[:, slots, : rows.max_blocks],
            input_ids=rows.input_ids,
            positions=rows.positions,
            slot_mappings=self._slot_mappings(slots, rows),
            is_sampled=self._all,
            is_plain=True,
            is_greedy=rows.is_greedy,
            adapters=self.adapters_of(slots),
        )

    def _slot_mappings(self, slots: IntArray, rows: DecodeRows) -> IntArray:
        if self.block_tables.shape[0] == 1:
            return rows.slot_mapping[None]
        places = rows.positions // self._block_size, rows.positions % self._block_size
        return self.block_tables[:, slots, places[0]].astype(np.int64, order="C") * self._block_size + places[1]

    def _columns(self) -> SequenceColumns:
        return SequenceColumns(
            is_in_use=self.is_in_use,
            is_greedy=self.sampling.is_greedy,
            num_tokens=self.num_tokens,
            num_computed_tokens=self.num_computed_tokens,
            num_blocks=self.num_blocks_of,
            tokens=self.tokens,
            block_table=self.block_tables[0],
        )

    def _draft(self, drafter: Drafter, slots: IntArray, num_tokens: IntArray, most: IntArray) -> IntArray:
        """Write a draft of at most `most` tokens after each log; returns [num_rows] the tokens of each."""
        lengths, drafts = drafter.propose(slots, self.tokens, num_tokens, most)
        row, ahead = np.nonzero(np.arange(drafts.shape[1]) < lengths[:, None])
        if row.size:
            places = num_tokens[row] + ahead
            self.tokens = grown(self.tokens, (1, int(places.max()) + 2))
            self.tokens[slots[row], places] = drafts[row, ahead]
        return lengths

    def _why(self, slot: int, num_scheduled: int) -> BadSlot:
        if slot in self._failed:
            return self._failed[slot]
        if not self.is_in_use[slot]:
            message = f"slot {slot} is empty"
        else:
            computed, known = int(self.num_computed_tokens[slot]), int(self.num_tokens[slot])
            message = (
                f"slot {slot}: {num_scheduled} tokens after {computed} computed ones do not fit "
                f"{known} known tokens and {int(self.num_blocks_of[slot])} blocks of {self._block_size}"
            )
        return BadSlot(slot=slot, code=Code.INTERNAL, message=message)

    def advance(self, inputs: ForwardInputs) -> None:
        """Note that the step's tokens are in the KV cache. Draft tokens only count once they are accepted."""
        self.num_computed_tokens[inputs.slots] = inputs.seq_lens - inputs.num_draft_tokens

    def append_plain(self, inputs: ForwardInputs, token_ids: IntArray) -> None:
        """Log the sampled tokens [num_rows] of a plain step, and note that its tokens are in the KV cache."""
        self.tokens = grown(self.tokens, (1, int(inputs.seq_lens.max()) + 1))
        append_rows(inputs.slots, token_ids, self._columns())

    def append_placeholders(self, inputs: ForwardInputs, slots: IntArray) -> None:
        """Log placeholders for tokens that `slots` sample in a step without drafts; `place_tokens` replaces them."""
        if inputs.is_plain:
            self.append_plain(inputs, self._zeros)
        else:
            self.advance(inputs)
            self.append_tokens(slots, np.zeros_like(slots), np.zeros_like(slots))

    def place_tokens(self, slots: IntArray, places: IntArray, token_ids: IntArray) -> None:
        """Replace placeholders in the log by tokens; [n] each."""
        self.tokens[slots, places] = token_ids

    def append_tokens(self, slots: IntArray, token_ids: IntArray, ahead: IntArray) -> None:
        """Log sampled tokens.

        Args:
            slots: [n] a slot's rows are adjacent.
            token_ids: [n].
            ahead: [n] index of each among its slot's new tokens, from 0. Keys and values of all except the last are in
            the cache, because they were draft tokens.
        """
        if not slots.size:
            return
        places = self.num_tokens[slots] + ahead
        self.tokens = grown(self.tokens, (1, int(places.max()) + 1))
        self.tokens[slots, places] = token_ids
        self.num_tokens[slots] = places + 1  # of several places of a slot the last one is written last
        self.num_computed_tokens[slots] += ahead
