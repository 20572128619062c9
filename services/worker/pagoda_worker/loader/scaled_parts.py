"""Builds a rank's matrix of small floats from the stored parts. Knows tensors and sources; no files."""

from collections.abc import Sequence

import torch

from pagoda_kernels.linear.scaled_matrix import ScaledMatrix, common_group
from pagoda_worker.loader.held_parts import copy_part, in_order
from pagoda_worker.models.linear_method import MatrixLayer
from pagoda_worker.models.model import WeightSharding
from pagoda_worker.models.weights import WeightSource


def join_scaled(
    parts: Sequence[tuple[WeightSource, ScaledMatrix]],
    layer: MatrixLayer,
    sharding: WeightSharding,
    *,
    num_rows: int,
    device: torch.device,
) -> ScaledMatrix | None:
    """A rank's layer from all parts, with groups that fit all of them; None: no kernel reads it. A border between ranks
    may be inside a group: then groups become smaller.

    Args:
        parts: all rows of the whole matrix together.
        num_rows: of the whole matrix.
    """
    matrices = [matrix for _, matrix in parts]
    first = matrices[0]
    group_size = common_group([matrix.group_size for matrix in matrices], first.num_inputs, layer.columns)
    codes = torch.empty(layer.rows, layer.columns * first.bits // 8, dtype=torch.uint8, device=device)
    num_groups = -(-layer.columns // group_size)
    joined = ScaledMatrix(
        codes=codes.view(first.codes.dtype),
        scales=torch.empty(layer.rows, num_groups, dtype=first.scales.dtype, device=device),
        group_size=group_size,
    )
    if not joined.is_readable or any(matrix.bits != first.bits for matrix in matrices):
        return None
    for source, matrix in parts:
        for tensor, target in (
            (matrix.codes.view(torch.uint8), codes),
            (matrix.with_groups(group_size).scales, joined.scales),
        ):
            copy_part(in_order(tensor, source), source, target, sharding, num_rows=num_rows)
    return joined
