"""Facts about Triton and the device for every launch."""

from functools import cache
from typing import Any

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


@cache
def max_shared_bytes(device: torch.device) -> int:
    """Shared memory that a program may have; without a device, of compute capability 8.9, which has the least."""
    if device.type != "cuda":
        return 99 << 10
    properties: Any = torch.cuda.get_device_properties(device)  # torch: its types lack this field
    return int(properties.shared_memory_per_block_optin)
