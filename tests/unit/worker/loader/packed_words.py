"""Codes as checkpoints pack them into words."""

import torch
from torch import Tensor


def packed(codes: list[list[int]], bits: int) -> Tensor:
    """Rows of codes as int32 words, the lowest bits first."""
    rows = []
    for row in codes:
        number = sum(code << place * bits for place, code in enumerate(row))
        size = -(-len(row) * bits // 32) * 4
        rows.append(list(number.to_bytes(size, "little")))
    return torch.tensor(rows, dtype=torch.uint8).view(torch.int32)
