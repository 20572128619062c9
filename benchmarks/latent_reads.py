"""Bytes of the cache that a decode over latents reads for each token of its context, counted load by load.

    python benchmarks/latent_reads.py --json benchmarks/results/latent_reads.jsonl

The Triton kernel runs in Triton's interpreter, which is asked for the addresses of every load. The shape is
DeepSeek-V3's: latents of 512 numbers and a rotated key of 64, bfloat16, with all 128 heads and with the 16 of a rank of
eight. Programs of other heads load the same bytes again, out of the device's own cache: `distinct` counts an address
once, which is what memory has to give; `loaded` counts each time.
"""

import os
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # so that it also runs as a plain script
os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.latents import KEY_DIM, RANK, ROTARY_DIM, SCALE, VALUE_DIM, latent_case
from benchmarks.tools.figures import Report, parser
from pagoda_kernels.attention.mla_attention import mla_attention
from pagoda_kernels.selection import triton_on_cpu

DTYPE = torch.bfloat16


class Reads:
    """Bytes that were loaded from one tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self._begin = tensor.data_ptr()
        self._is_read = np.zeros(tensor.nbytes, dtype=bool)
        self.loaded = 0

    @property
    def distinct(self) -> int:
        """Bytes, each once."""
        return int(self._is_read.sum())

    def add(self, addresses: np.ndarray[Any, Any], size: int) -> None:
        """Loads of `size` bytes each."""
        offsets = addresses.astype(np.int64).reshape(-1) - self._begin
        offsets = offsets[(offsets >= 0) & (offsets < self._is_read.size)]
        self.loaded += offsets.size * size
        for byte in range(size):
            self._is_read[offsets + byte] = True


@contextmanager
def counted(tensor: Tensor) -> Iterator[Reads]:
    """Within: what interpreted kernels load from a tensor."""
    from triton.runtime.interpreter import interpreter_builder

    reads, load = Reads(tensor), interpreter_builder.create_masked_load

    def watched(ptrs: Any, mask: Any, *options: Any) -> Any:
        reads.add(ptrs.data[mask.data], ptrs.get_element_ty().primitive_bitwidth // 8)
        return load(ptrs, mask, *options)

    interpreter_builder.create_masked_load = watched
    try:
        yield reads
    finally:
        interpreter_builder.create_masked_load = load


def decode_reads(num_heads: int, num_tokens: int) -> Reads:
    """Of one decode over a context."""
    query, cache, plan, up = latent_case([1], [num_tokens], num_heads, DTYPE, torch.device("cpu"))
    with triton_on_cpu(), counted(cache) as reads:
        mla_attention(query, cache, plan, **up, scale=SCALE)
    return reads


def main() -> None:
    flags = parser(__doc__ or "")
    flags.add_argument("--tokens", type=int, default=200, help="tokens of the context")
    args = flags.parse_args()
    report = Report(args.json)
    latent = (RANK + ROTARY_DIM) * DTYPE.itemsize
    report.add("latent_bytes", latent, "bytes a token", n=1)
    made = 128 * (KEY_DIM + ROTARY_DIM + VALUE_DIM) * DTYPE.itemsize
    report.add("key_and_value_bytes_128_heads", made, "bytes a token", n=1)
    for num_heads in (16, 128):
        reads = decode_reads(num_heads, args.tokens)
        for name, count in (("distinct", reads.distinct), ("loaded", reads.loaded)):
            report.add(f"{name}_{num_heads}_heads", count / args.tokens, "bytes a token", n=1)
        report.add(f"distinct_share_{num_heads}_heads", reads.distinct / args.tokens / latent, "of the latents", n=1)


if __name__ == "__main__":
    main()
