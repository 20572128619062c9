"""The plan of attention over a batch, computed once per step on the host for all layers."""

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pagoda_kernels.attention.tables import AttentionTables, make_tables

SMALL_BATCH_TOKENS = 16 * 1024
"""Padded tokens below which all single-token rows form one group: fewer operations win over less padding."""
MAX_GROUP_TOKENS = 64 * 1024
"""Bound on the padded tokens that are gathered at once."""


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Sequences with one query token each, padded to one length."""

    query_rows: Tensor | None
    """[n] int64 rows of the query; None when they are all rows in order."""
    block_ids: Tensor
    """[n * num_blocks] int64; rows are padded with a block of their own."""
    mask: Tensor
    """[n, 1, 1, num_blocks * block_size] additive."""
    distances: npt.NDArray[np.int64]
    """[n, num_blocks * block_size] position of each key less that of the query."""


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """One sequence with several query tokens."""

    query_start: int
    query_len: int
    block_ids: Tensor
    """[num_blocks] int64."""
    first: int
    """Tokens to leave out at the start of the first block."""
    num_keys: int
    """Keys that some query of the row may see."""
    mask: Tensor | None
    """[query_len, num_keys] additive; None is plain causal with query_len == num_keys."""


@dataclass(frozen=True, slots=True)
class WindowPlan:
    """The work of a layer with a given sliding window."""

    decodes: list[DecodeGroup]
    prefills: list[PrefillRow]


@dataclass(frozen=True, slots=True)
class PlanPart:
    """Some sequences of a batch."""

    rows: Tensor | None
    """[n] int64, their rows of the query; None: these are all rows in order."""
    plan: "AttentionPlan"
    """Plan for these sequences only."""


@dataclass(frozen=True, slots=True)
class Gathered:
    """A batch whose blocks were put one after the other."""

    block_ids: Tensor
    """[n] int64, where each of these blocks was."""
    plan: "AttentionPlan"
    """Over these blocks."""


class AttentionBackend(Protocol):
    """Attention of another package."""

    def __call__(
        self,
        query: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        plan: "AttentionPlan",
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """`paged_attention` without linear biases."""


@dataclass(slots=True)
class AttentionPlan:
    """Lengths and block tables of a batch. Layers ask for the part that fits their window.

    Any mix of prefill chunks (several query tokens) and decodes (one) is possible.
    """

    query_lens: npt.NDArray[np.int64]
    """[num_seqs] query tokens of each sequence, at least 1; sequences lie one after the other in the query."""
    seq_lens: npt.NDArray[np.int64]
    """[num_seqs] keys of each sequence, its query tokens included."""
    block_table: npt.NDArray[np.int32]
    """[num_seqs, max_blocks]; entries after a sequence's blocks are not read."""
    block_size: int
    dtype: torch.dtype
    """Data type of query and cache."""
    device: torch.device
    device_tables: AttentionTables | None = None
    """The same on the device, for kernels that read it there; None makes them when they are asked for."""
    backend: AttentionBackend | None = None
    """Computes this batch in place of our kernels; None leaves it to them."""
    _windows: dict[int | None, WindowPlan] = field(default_factory=dict)
    _chunked: dict[int, "AttentionPlan"] = field(default_factory=dict)
    _parts: dict[int, tuple[PlanPart | None, PlanPart | None]] = field(default_factory=dict)
    _gathered: Gathered | None = None
    _columns: tuple[Tensor, Tensor, Tensor] | None = None

    def columns(self) -> tuple[Tensor, Tensor, Tensor]:
        """query_lens, seq_lens (int64) and block_table (int32) as tensors on the host, for kernels that take a batch as
        it is."""
        if self._columns is None:
            self._columns = (
                torch.from_numpy(np.ascontiguousarray(self.query_lens, dtype=np.int64)),
                torch.from_numpy(np.ascontiguousarray(self.seq_lens, dtype=np.int64)),
                torch.from_numpy(np.ascontiguousarray(self.block_table, dtype=np.int32)),
            )
        return self._columns

    def tables(self) -> AttentionTables:
        """Lengths and blocks on the device."""
        if self.device_tables is None:
            self.device_tables = make_tables(self.query_lens, self.seq_lens, self.block_table, self.device)
        return self.device_tables

    def parts(self, num_tokens: int) -> tuple[PlanPart | None, PlanPart | None]:
        """The sequences with at most `num_tokens` query tokens, and the others; None: there are none."""
        if num_tokens not in self._parts:
            is_short = self.query_lens <= num_tokens
            self._parts[num_tokens] = self._part(is_short), self._part(~is_short)
        return self._parts[num_tokens]

    def _part(self, is_there: npt.NDArray[np.bool_]) -> PlanPart | None:
        if is_there.all() and is_there.size:
            return PlanPart(None, self)
        if not is_there.any():
            return None
        rows = torch.from_numpy(np.flatnonzero(np.repeat(is_there, self.query_lens)))
        plan = AttentionPlan(
            query_lens=self.query_lens[is_there],
            seq_lens=self.seq_lens[is_there],
            block_table=self.block_table[is_there],
            block_size=self.block_size,
            dtype=self.dtype,
            device=self.device,
        )
        return PlanPart(rows.to(self.device), plan)

    def gathered(self) -> Gathered:
        """The same sequences over a copy of their blocks, each with blocks of its own."""
        if self._gathered is None:
            num_blocks = -(-self.seq_lens // self.block_size)
            columns = np.arange(self.block_table.shape[1])
            is_used = columns < num_blocks[:, None]
            block_ids = self.block_table[is_used].astype(np.int64)
            table = (np.cumsum(num_blocks) - num_blocks)[:, None] + columns
            plan = AttentionPlan(
                query_lens=self.query_lens,
                seq_lens=self.seq_lens,
                block_table=np.where(is_used, table, 0).astype(np.int32),
                block_size=self.block_size,
                dtype=self.dtype,
                device=self.device,
            )
            self._gathered = Gathered(torch.from_numpy(block_ids).to(self.device), plan)
        return self._gathered

    def chunked(self, chunk: int) -> "AttentionPlan":
        """The same query tokens for layers whose queries see no more than their own chunk: a sequence becomes one
        sequence for each chunk that its query tokens are in.

        Args:
            chunk: tokens of a chunk, a multiple of the block size; token i is in chunk i // chunk.
        """
        if chunk % self.block_size:
            raise ValueError(f"chunk is {chunk}, must be a multiple of block_size, {self.block_size}")
        if not (self.seq_lens > chunk).any():
            return self
        if chunk not in self._chunked:
            self._chunked[chunk] = self._make_chunked(chunk)
        return self._chunked[chunk]

    def _make_chunked(self, chunk: int) -> "AttentionPlan":
        num_computed = self.seq_lens - self.query_lens
        first = num_computed // chunk
        counts = (self.seq_lens - 1) // chunk - first + 1
        rows = np.repeat(np.arange(counts.size), counts)
        begins = (np.arange(rows.size) - np.repeat(np.cumsum(counts) - counts, counts) + first[rows]) * chunk
        ends = np.minimum(begins + chunk, self.seq_lens[rows])
        seq_lens = ends - begins
        columns = begins[:, None] // self.block_size + np.arange(-(-int(seq_lens.max()) // self.block_size))
        return AttentionPlan(
            query_lens=ends - np.maximum(begins, num_computed[rows]),
            seq_lens=seq_lens,
            block_table=self.block_table[rows[:, None], np.minimum(columns, self.block_table.shape[1] - 1)],
            block_size=self.block_size,
            dtype=self.dtype,
            device=self.device,
        )

    def window(self, window: int | None) -> WindowPlan:
        """The plan for layers whose queries see `window` tokens, their own included; None sees all."""
        if window not in self._windows:
            self._windows[window] = self._make(window)
        return self._windows[window]

    def _make(self, window: int | None) -> WindowPlan:
        starts = np.cumsum(self.query_lens) - self.query_lens
        singles = np.flatnonzero(self.query_lens == 1)
        decodes = self._decode_groups(singles, starts, window) if singles.size else []
        prefills = [
            self._prefill_row(int(row), int(starts[row]), window) for row in np.flatnonzero(self.query_lens > 1)
        ]
        return WindowPlan(decodes, prefills)

    def _decode_groups(
        self, rows: npt.NDArray[np.int64], starts: npt.NDArray[np.int64], window: int | None
    ) -> list[DecodeGroup]:
        lens = self.seq_lens[rows]
        first_keys = np.zeros_like(lens) if window is None else np.maximum(lens - window, 0)
        first_blocks = first_keys // self.block_size
        num_blocks = -(-lens // self.block_size) - first_blocks
        if rows.size * int(num_blocks.max()) * self.block_size <= SMALL_BATCH_TOKENS:
            return [self._decode_group(rows, starts, first_keys, first_blocks, num_blocks)]
        groups = []
        buckets = np.ceil(np.log2(num_blocks)).astype(np.int64)
        for bucket in np.unique(buckets):
            members = np.flatnonzero(buckets == bucket)
            size = max(1, MAX_GROUP_TOKENS // (int(num_blocks[members].max()) * self.block_size))
            for begin in range(0, members.size, size):
                part = members[begin : begin + size]
                groups.append(
                    self._decode_group(rows[part], starts, first_keys[part], first_blocks[part], num_blocks[part])
                )
        return groups

    def _decode_group(
        self,
        rows: npt.NDArray[np.int64],
        starts: npt.NDArray[np.int64],
        first_keys: npt.NDArray[np.int64],
        first_blocks: npt.NDArray[np.int64],
        num_blocks: npt.NDArray[np.int64],
    ) -> DecodeGroup:
        columns = np.arange(int(num_blocks.max()))
        # Padding repeats the sequence's own last block: what another sequence holds (a NaN, say) is never touched.
        columns = first_blocks[:, None] + np.minimum(columns, num_blocks[:, None] - 1)
        block_ids = self.block_table[rows[:, None], columns].astype(np.int64)
        positions = first_blocks[:, None] * self.block_size + np.arange(block_ids.shape[1] * self.block_size)
        is_visible = (positions < self.seq_lens[rows][:, None]) & (positions >= first_keys[:, None])
        mask = np.where(is_visible, np.float32(0), np.float32(-np.inf))
        query_rows = starts[rows]
        is_whole = query_rows.size == int(self.query_lens.sum())
        return DecodeGroup(
            query_rows=None if is_whole else torch.from_numpy(query_rows).to(self.device),
            block_ids=torch.from_numpy(block_ids.reshape(-1)).to(self.device),
            mask=torch.from_numpy(mask).to(device=self.device, dtype=self.dtype)[:, None, None],
            distances=positions - self.seq_lens[rows][:, None] + 1,
        )

    def _prefill_row(self, row: int, query_start: int, window: int | None) -> PrefillRow:
        query_len, seq_len = int(self.query_lens[row]), int(self.seq_lens[row])
        num_computed = seq_len - query_len
        first_key = 0 if window is None else max(num_computed - window + 1, 0)
        first_block = first_key // self.block_size
        block_ids = self.block_table[row, first_block : -(-seq_len // self.block_size)].astype(np.int64)
        first, num_keys = first_key - first_block * self.block_size, seq_len - first_key
        mask = None
        if num_computed or (window is not None and window < seq_len):
            positions = torch.arange(first_key, seq_len, device=self.device)
            distance = positions[num_computed - first_key :, None] - positions
            is_hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
            mask = torch.zeros(query_len, num_keys, dtype=self.dtype, device=self.device)
            mask.masked_fill_(is_hidden, float("-inf"))
        return PrefillRow(
            query_start=query_start,
            query_len=query_len,
            block_ids=torch.from_numpy(block_ids).to(self.device),
            first=first,
            num_keys=num_keys,
            mask=mask,
        )
