"""Penalties in Triton: a program a part of a row."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048


def apply_token_penalties(
    logits: Tensor, in_prompt: Tensor, counts: Tensor, *, presence: Tensor, frequency: Tensor, repetition: Tensor
) -> Tensor:
    """`pagoda_kernels.sampling.apply_penalties.apply_token_penalties`."""
    logits, in_prompt, counts = logits.contiguous(), in_prompt.contiguous(), counts.contiguous()
    presence, frequency, repetition = presence.contiguous(), frequency.contiguous(), repetition.contiguous()
    out = torch.empty_like(logits)
    n, vocab_size = logits.shape
    if out.numel():
        _penalties_kernel[(n, triton.cdiv(vocab_size, BLOCK))](
            logits, in_prompt.view(torch.uint8), counts, presence, frequency, repetition, out, vocab_size, BLOCK=BLOCK
        )
    return out


@triton.jit
def _penalties_kernel(
    logits_ptr, in_prompt_ptr, counts_ptr, presence_ptr, frequency_ptr, repetition_ptr, out_ptr, vocab_size,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (row, part)."""
    row = tl.program_id(0).to(tl.int64)
    tokens = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_token = tokens < vocab_size
    place = row * vocab_size + tokens
    logits = tl.load(logits_ptr + place, mask=is_token, other=0.0)  # [BLOCK]
    counts = tl.load(counts_ptr + place, mask=is_token, other=0.0)
    is_output = counts > 0.0
    is_used = is_output | (tl.load(in_prompt_ptr + place, mask=is_token, other=0) != 0)
    factor = tl.where(is_used, tl.load(repetition_ptr + row), 1.0)
    logits = tl.where(logits > 0.0, logits / factor, logits * factor)
    logits -= tl.load(frequency_ptr + row) * counts
    logits -= tl.load(presence_ptr + row) * is_output.to(tl.float32)
    tl.store(out_ptr + place, logits, mask=is_token)
