"""What this machine does at best: bytes read a second and bf16 operations a second, measured with torch.

python -m benchmarks.cpu.probe
"""

import json
import time
from collections.abc import Callable

import torch
from torch.nn.functional import linear

READ_BYTES = 1 << 30
SHAPES = ((2048, 768, 2048), (2048, 1024, 3072), (2048, 2048, 2048), (1024, 4096, 4096), (512, 4096, 4096))
"""Rows, inner size and columns of the matrix products that are tried."""


def read_bytes_per_s() -> float:
    """Best of several sums over 1 GiB, far more than any cache holds."""
    best = 0.0
    whole = torch.ones(READ_BYTES // 4)
    views = (whole, whole.view(-1, 1 << 16), whole.view(torch.int32), whole.view(torch.int64))
    for view in views:
        best = max(best, READ_BYTES / _seconds(view.sum, times=4))
    vector = torch.ones(1 << 14)
    return max(best, READ_BYTES / _seconds(lambda: torch.mv(whole.view(-1, 1 << 14), vector), times=4))


def flop_per_s() -> float:
    """Best of several bf16 matrix products, of torch."""
    best = 0.0
    for rows, inner, columns in SHAPES:
        left = torch.randn(rows, inner, dtype=torch.bfloat16)
        right = torch.randn(columns, inner, dtype=torch.bfloat16)
        best = max(best, 2 * rows * inner * columns / _seconds(lambda a=left, b=right: linear(a, b), times=8))
    return best


def _seconds(run: Callable[[], object], *, times: int) -> float:
    """Seconds of the fastest run; the first is not counted."""
    run()
    best = float("inf")
    for _ in range(times):
        started = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - started)
    return best


if __name__ == "__main__":
    with torch.inference_mode():
        print(json.dumps({"read_bytes_per_s": read_bytes_per_s(), "flop_per_s": flop_per_s()}))
