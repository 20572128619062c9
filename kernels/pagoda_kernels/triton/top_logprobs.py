"""Log probabilities of a token and of the likeliest ones in Triton: a row a program, read once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_BLOCK = 4096


def top_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`pagoda_kernels.sampling.top_logprobs.top_logprobs`; contiguous rows."""
    n, vocab_size = logits.shape
    own = torch.empty(n, dtype=torch.float32, device=logits.device)
    normalizers = torch.empty(n, dtype=torch.float32, device=logits.device)
    ranks = torch.empty(n, dtype=torch.int64, device=logits.device)
    if n:
        _logprobs_kernel[(n,)](
            logits,
            token_ids.contiguous(),
            own,
            normalizers,
            ranks,
            vocab_size,
            logits.stride(0),
            BLOCK=min(MAX_BLOCK, triton.next_power_of_2(vocab_size)),
            num_warps=8,
        )
    values, ids = logits.topk(num_top, dim=-1)
    return own, ranks, values - normalizers[:, None], ids


@triton.jit
def _logprobs_kernel(
    logits_ptr, token_ids_ptr, own_ptr, normalizers_ptr, ranks_ptr, vocab_size, row_stride, BLOCK: tl.constexpr
):
    """Program: one row. Each lane has a maximum and a sum of its own until the end."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * row_stride
    lanes = tl.arange(0, BLOCK)
    own = tl.load(logits_ptr + tl.load(token_ids_ptr + row))
    tops = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    sums = tl.zeros([BLOCK], dtype=tl.float32)
    num_above = tl.zeros([BLOCK], dtype=tl.int32)
    for start in range(0, vocab_size, BLOCK):
        ids = start + lanes
        logits = tl.load(logits_ptr + ids, mask=ids < vocab_size, other=float("-inf"))
        num_above += (logits > own).to(tl.int32)
        new_tops = tl.maximum(tops, logits)
        bases = tl.where(new_tops == float("-inf"), 0.0, new_tops)
        sums = sums * tl.exp(tops - bases) + tl.exp(logits - bases)
        tops = new_tops
    top = tl.max(tops, axis=0)
    normalizer = top + tl.log(tl.sum(sums * tl.exp(tops - top), axis=0))
    tl.store(own_ptr + row, own - normalizer)
    tl.store(normalizers_ptr + row, normalizer)
    tl.store(ranks_ptr + row, tl.sum(num_above, axis=0).to(tl.int64) + 1)
