"""Token masks in Triton: a program a part of a row."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048


def apply_token_bitmask(logits: Tensor, bitmask: Tensor) -> Tensor:
    """`pagoda_kernels.sampling.apply_token_bitmask.apply_token_bitmask`."""
    logits, bitmask = logits.contiguous(), bitmask.contiguous()
    out = torch.empty_like(logits)
    n, vocab_size = logits.shape
    if out.numel():
        grid = (n, triton.cdiv(vocab_size, BLOCK))
        _bitmask_kernel[grid](logits, bitmask, out, vocab_size, bitmask.stride(0), BLOCK=BLOCK)
    return out


@triton.jit
def _bitmask_kernel(logits_ptr, bitmask_ptr, out_ptr, vocab_size, mask_stride, BLOCK: tl.constexpr):
    """Program (row, part)."""
    row = tl.program_id(0).to(tl.int64)
    tokens = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_token = tokens < vocab_size
    logits = tl.load(logits_ptr + row * vocab_size + tokens, mask=is_token, other=0.0)  # [BLOCK]
    words = tl.load(bitmask_ptr + row * mask_stride + tokens // 8, mask=is_token, other=0).to(tl.int32)
    is_kept = ((words >> (tokens % 8)) & 1) != 0
    kept = tl.where(is_kept | (logits != logits), logits, float("-inf"))  # NaN stays, so that it is seen
    tl.store(out_ptr + row * vocab_size + tokens, kept, mask=is_token)
