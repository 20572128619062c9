"""Linear layers on a CPU, with bfloat16 weights that were packed once for its dot-product instructions."""

import torch
import torch.nn.functional as F
from torch import Tensor

from pagoda_kernels.native.library import native

PANEL = 32
"""Rows of a weight that lie side by side in memory."""


def pack_weight(weight: Tensor) -> Tensor:
    """The layout of `packed_linear`: pairs of columns of 32 rows side by side, so that both stream through registers.

    Args:
        weight: [out_features, in_features]; on the meta device too.

    Returns:
        [ceil(out_features / 32), ceil(in_features / 2), 32, 2], a copy; what is after the last row and column is zero.
    """
    rows, columns = weight.shape
    kernel = native("pack_weight") if weight.is_cpu and weight.dtype == torch.bfloat16 else None
    if kernel is not None and not columns % 2:
        out = torch.empty(-(-rows // PANEL), columns // 2, PANEL, 2, dtype=weight.dtype)
        kernel(weight.contiguous(), out)
        return out
    padded = F.pad(weight, (0, columns % 2, 0, -rows % PANEL))
    return padded.view(-1, PANEL, padded.shape[1] // 2, 2).transpose(1, 2).contiguous()


def unpack_weight(packed: Tensor, out_features: int, in_features: int) -> Tensor:
    """The end of `pack_weight`: [out_features, in_features], a copy."""
    plain = packed.transpose(1, 2).reshape(packed.shape[0] * PANEL, -1)
    return plain[:out_features, :in_features].contiguous()


def packed_linear(
    x: Tensor,
    packed: Tensor,
    out_features: int,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """residual + x W^T + bias, summed in float32 and rounded once.

    A row of the result depends on that row of x alone, to the bit: however many rows there are, each sum takes its
    pairs of columns in the same order, so that a token is the same whatever else is in the batch.

    Args:
        x: [num_tokens, in_features] bfloat16.
        packed: W [out_features, in_features] bfloat16, as `pack_weight` gives it.
        bias: [out_features] bfloat16.
        residual: [num_tokens, out_features] bfloat16.
        out_dtype: bfloat16 or float32; None is bfloat16.

    Returns:
        [num_tokens, out_features] of out_dtype.

    Without the C++ kernel, or for other data types, this is the reference: it unpacks the weight for each call.

    Measured with `benchmarks/cpu/kernels/linear.py --rounds 1 --budget 0.08 --shapes llama125m.qkv llama125m.down`,
    2 cores of Zen 5, F.linear in brackets: 36-38 GB/s of weights at 1 row (18; the read limit was 38), 35 at
    16 (14-17), 21-24 at 32 (11-13); GFLOP/s, in another hour: 740-770 at 128 rows (620-670), 780-810 at 512 (740-770),
    800-810 at 2,048 (770-790). In registers, the two cores multiply at 890.
    """
    check_packed(x, packed, out_features, bias, residual)
    kernel = native("packed_linear") if x.is_cpu else None
    if kernel is None or x.dtype != torch.bfloat16:
        return packed_linear_reference(x, packed, out_features, bias=bias, residual=residual, out_dtype=out_dtype)
    if x.shape[1] % 2:
        x = F.pad(x, (0, 1))  # models do not have odd sizes
    out = torch.empty(x.shape[0], out_features, dtype=out_dtype or x.dtype)
    kernel(dense_rows(x), packed, dense(bias), None if residual is None else dense_rows(residual), out)
    return out


def packed_linear_reference(
    x: Tensor,
    packed: Tensor,
    out_features: int,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """The specification of `packed_linear`."""
    out = x.float() @ unpack_weight(packed, out_features, x.shape[1]).float().t()
    if bias is not None:
        out += bias.float()
    if residual is not None:
        out += residual.float()
    return out.to(out_dtype or x.dtype)


def packed_embedding(ids: Tensor, packed: Tensor, in_features: int) -> Tensor:
    """Rows of a packed weight, so that one that is also an embedding is held once.

    Args:
        ids: [num_tokens] int64, below out_features.
        packed: as `pack_weight` gives it.

    Returns:
        [num_tokens, in_features].

    Raises:
        IndexError: there is no such row.
    """
    num_rows = packed.shape[0] * PANEL
    check_ids(ids, num_rows)
    kernel = native("packed_embedding") if packed.is_cpu and packed.dtype == torch.bfloat16 else None
    if kernel is not None and not in_features % 2:
        out = torch.empty(ids.numel(), in_features, dtype=packed.dtype)
        kernel(ids.contiguous(), packed, out)
        return out
    return packed[ids // PANEL, :, ids % PANEL].flatten(1)[:, :in_features]


def check_ids(ids: Tensor, num_rows: int) -> None:
    """Raise IndexError for an id of a row that is not there."""
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < num_rows:
        raise IndexError(f"ids are between {int(ids.min())} and {int(ids.max())}, must be from 0 to {num_rows - 1}")


def check_addends(x: Tensor, out_features: int, bias: Tensor | None, residual: Tensor | None) -> None:
    """Raise ValueError for what cannot be added to a product with x [num_tokens, in_features]."""
    if bias is not None and bias.shape != (out_features,):
        raise ValueError(f"bias has shape {tuple(bias.shape)}, must be {(out_features,)}")
    for name, tensor in (("bias", bias), ("residual", residual)):
        if tensor is not None and (tensor.dtype != x.dtype or tensor.device != x.device):
            raise ValueError(f"{name} is {tensor.dtype} on {tensor.device}, must be {x.dtype} on {x.device} as x")
    if residual is not None and residual.shape != (x.shape[0], out_features):
        raise ValueError(f"residual has shape {tuple(residual.shape)}, must be {(x.shape[0], out_features)}")


def dense_rows(x: Tensor) -> Tensor:
    """With neighbours in a row side by side in memory."""
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def dense(bias: Tensor | None) -> Tensor | None:
    """`bias` contiguous, as the C++ kernels read it."""
    return None if bias is None else bias.contiguous()


def check_packed(x: Tensor, packed: Tensor, out_features: int, bias: Tensor | None, residual: Tensor | None) -> None:
    """Raise ValueError for what does not fit together in `packed_linear`."""
    panels, pairs = -(-out_features // PANEL), (x.shape[-1] + 1) // 2
    if x.dim() != 2 or tuple(packed.shape) != (panels, pairs, PANEL, 2):
        raise ValueError(
            f"x has shape {tuple(x.shape)}, packed {tuple(packed.shape)}: must be [num_tokens, in_features] and, for "
            f"{out_features} out_features, {(panels, pairs, PANEL, 2)}"
        )
    if packed.dtype != x.dtype or packed.device != x.device:
        raise ValueError(f"packed is {packed.dtype} on {packed.device}, must be {x.dtype} on {x.device} as x")
    check_addends(x, out_features, bias, residual)
