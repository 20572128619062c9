"""What every launch needs to know about Triton and the device."""

from functools import cache

import torch
import triton


def is_interpreted(kernel: object) -> bool:
    """Whether the kernel runs in Triton's interpreter. It multiplies the bit patterns of bfloat16 matrices, so kernels
    widen them there."""
    return not isinstance(kernel, triton.runtime.JITFunction)


@cache
def num_multiprocessors(device: torch.device) -> int:
    """How many programs run at once, at least; 1 for the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
