"""DecodeBuffers: inputs and outputs of decode steps on the device, at fixed addresses. No model."""

import numpy as np
import torch

from pagoda_kernels.attention.plan import AttentionPlan
from pagoda_kernels.attention.tables import AttentionTables
from pagoda_worker.memory.transfers import Upload
from pagoda_worker.steps.input_batch import ForwardInputs

NO_SLOT = -1
"""Slot of a padding row, whose key and value are not written."""


class DecodeBuffers:
    """Inputs and logits of up to `max_size` sequences with one token each; smaller steps use the first rows.

    A step of n sequences may be padded to any size up to `max_size`: a padding row is token 0 at position 0, writes to
    no slot, and belongs to no sequence (query_start_loc repeats its last entry), so it reads no cache either. Its
    output row is meaningless.

    A step's columns and block table lie one after the other in pinned memory and are sent in one copy, which is then
    scattered on the device: in the copy the table's rows are as long as the step's longest, in the buffers as long as
    possible. Two such pieces of memory take turns, so that one can be written while the other is still read.
    """

    input_ids: torch.Tensor
    """[max_size] int64."""
    positions: torch.Tensor
    """[max_size] int64."""
    slot_mapping: torch.Tensor
    """[max_size] int64, NO_SLOT in padding rows."""
    logits: torch.Tensor
    """[max_size, vocab_size] float32."""

    def __init__(
        self,
        *,
        max_size: int,
        max_model_len: int,
        block_size: int,
        vocab_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`dtype`: of query and cache."""
        self.max_size = max_size
        self._max_model_len = max_model_len
        self._block_size = block_size
        self._dtype = dtype
        self._device = device
        max_blocks = -(-max_model_len // block_size)
        # 64-bit columns, then query_start_loc and seq_lens of 32 bits, then the block table.
        self._num_column_words = 4 * max_size + 1
        num_words = self._num_column_words + -(-max_size * max_blocks // 2)
        self._uploads = [Upload(num_words=num_words, device=device) for _ in range(2)]
        self._rows = np.arange(max_size + 1, dtype=np.int32)
        self._words = torch.zeros(self._num_column_words, dtype=torch.int64, device=device)
        self.input_ids, self.positions, self.slot_mapping = self._words[: 3 * max_size].view(3, max_size).unbind()
        lengths = self._words[3 * max_size :].view(torch.int32)
        self._query_start_loc, self._seq_lens = lengths[: max_size + 1], lengths[max_size + 1 : 2 * max_size + 1]
        self._block_table = torch.zeros((max_size, max_blocks), dtype=torch.int32, device=device)
        self.logits = torch.zeros((max_size, vocab_size), dtype=torch.float32, device=device)
        self.slot_mapping.fill_(NO_SLOT)  # nothing but padding so far

    @property
    def num_bytes(self) -> int:
        """Bytes on the device, including copies in flight."""
        on_device = (self._words, self._block_table, self.logits)
        return sum(tensor.nbytes for tensor in on_device) + sum(upload.num_bytes for upload in self._uploads)

    def fill(self, inputs: ForwardInputs, size: int) -> None:
        """Load a step of at most `size` sequences with one token each, padded to `size` rows."""
        num_seqs, width = inputs.block_table.shape
        if num_seqs > size or size > self.max_size or inputs.input_ids.size != num_seqs:
            raise ValueError(f"{num_seqs} sequences with {inputs.input_ids.size} tokens, for a size of {size}")
        upload = self._uploads[0]
        self._uploads.reverse()
        words, max_size = upload.begin(), self.max_size
        padded = ((inputs.input_ids, 0), (inputs.positions, 0), (inputs.slot_mapping, NO_SLOT))
        for begin, (column, padding) in zip(range(0, 3 * max_size, max_size), padded, strict=True):
            words[begin : begin + num_seqs] = column
            words[begin + num_seqs : begin + size] = padding
        num_words = self._num_column_words + -(-num_seqs * width // 2)
        lengths = words[3 * max_size : self._num_column_words].view(np.int32)
        np.minimum(self._rows[: size + 1], num_seqs, out=lengths[: size + 1])
        seq_lens = lengths[max_size + 1 :]
        seq_lens[:num_seqs] = inputs.seq_lens
        seq_lens[num_seqs:size] = 0
        table = words[self._num_column_words : num_words].view(np.int32)
        table[: num_seqs * width] = inputs.block_table.reshape(-1)
        sent = upload.send(num_words)
        self._words.copy_(sent[: self._num_column_words])
        blocks = sent[self._num_column_words :].view(torch.int32)[: num_seqs * width]
        self._block_table[:num_seqs, :width].copy_(blocks.view(num_seqs, width))
        upload.release()

    def plan(self, size: int) -> AttentionPlan:
        """The plan of any step padded to `size` rows, for kernels that read lengths and blocks on the device.

        Its bounds hold for every such step; its columns on the host are not those of a real step.
        """
        return AttentionPlan(
            query_lens=np.ones(size, dtype=np.int64),
            seq_lens=np.full(size, self._max_model_len, dtype=np.int64),
            block_table=np.zeros((size, 0), dtype=np.int32),
            block_size=self._block_size,
            dtype=self._dtype,
            device=self._device,
            device_tables=AttentionTables(
                query_start_loc=self._query_start_loc[: size + 1],
                seq_lens=self._seq_lens[:size],
                block_table=self._block_table[:size],
                num_singles=size,
                max_query_len=1,
                max_single_len=self._max_model_len,
            ),
        )
