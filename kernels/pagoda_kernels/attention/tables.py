"""A batch's data for attention kernels on an accelerator: small tensors there, and bounds on the host."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionTables:
    """Lengths and blocks of a batch on the device. The bounds are the host's: no launch waits for the device."""

    query_start_loc: Tensor
    """[num_seqs + 1] int32; sequence i has the query tokens query_start_loc[i] … query_start_loc[i + 1] - 1. Padding
    repeats the last entry: a sequence without tokens."""
    seq_lens: Tensor
    """[num_seqs] int32 keys of each sequence, its query tokens included."""
    block_table: Tensor
    """[num_seqs, max_blocks] int32; entries after a sequence's blocks are not read."""
    num_singles: int
    """Sequences with one query token."""
    max_query_len: int
    max_single_len: int
    """At least the keys of any sequence with one query token."""


def make_tables(
    query_lens: npt.NDArray[np.int64],
    seq_lens: npt.NDArray[np.int64],
    block_table: npt.NDArray[np.int32],
    device: torch.device,
) -> AttentionTables:
    """The tables of a batch; the copies to a CUDA device go through pinned memory and are not waited for."""
    starts = np.zeros(query_lens.size + 1, dtype=np.int32)
    np.cumsum(query_lens, out=starts[1:])
    singles = query_lens == 1
    return AttentionTables(
        query_start_loc=_on(starts, device),
        seq_lens=_on(seq_lens.astype(np.int32), device),
        block_table=_on(np.ascontiguousarray(block_table, dtype=np.int32), device),
        num_singles=int(singles.sum()),
        max_query_len=int(query_lens.max(initial=0)),
        max_single_len=int(seq_lens[singles].max(initial=0)),
    )


def _on(array: npt.NDArray[np.int32], device: torch.device) -> Tensor:
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
