"""A causal convolution over the last few tokens of each channel, whose inputs are a state."""

import torch
import torch.nn.functional as F
from torch import Tensor

from pagoda_kernels.native.library import NATIVE_DTYPES, native
from pagoda_kernels.recurrent.batch import RecurrentBatch

MAX_NATIVE_WIDTH = 16
"""Tokens that a channel sees, of the C++ kernel."""


def short_convolution(
    x: Tensor,
    weight: Tensor,
    states: Tensor,
    batch: RecurrentBatch,
    *,
    bias: Tensor | None = None,
    has_silu: bool = True,
) -> Tensor:
    """bias + sum over i of weight[:, i] * x_{t - width + 1 + i} for each token t and channel, or silu of that.

    On a CPU sequences go token by token: what is computed does not depend on how a prompt is cut into chunks.

    Args:
        x: [num_tokens, num_channels].
        weight: [num_channels, width].
        states: [num_rows, width - 1, num_channels] of x's data type: the inputs of the tokens before, the latest last;
            changed at the batch's rows.
        bias: [num_channels].

    Returns:
        [num_tokens, num_channels].
    """
    width = weight.shape[1]
    if states.shape[1:] != (width - 1, x.shape[1]) or states.dtype != x.dtype:
        raise ValueError(f"states {tuple(states.shape)} do not fit x {tuple(x.shape)} and weight {tuple(weight.shape)}")
    kernel = native("short_convolution") if x.is_cpu and x.dtype in NATIVE_DTYPES else None
    is_plain = x.stride(1) == 1 and states.is_contiguous() and weight.is_contiguous() and weight.dtype == x.dtype
    if (
        kernel is not None
        and is_plain
        and 1 < width <= MAX_NATIVE_WIDTH
        and (bias is None or (bias.dtype == x.dtype and bias.is_contiguous()))
    ):
        output = torch.empty_like(x, memory_format=torch.contiguous_format)
        kernel(x, weight, bias, has_silu, states, *batch.columns(), output)
        return output
    return short_convolution_reference(x, weight, states, batch, bias=bias, has_silu=has_silu)


def short_convolution_reference(
    x: Tensor,
    weight: Tensor,
    states: Tensor,
    batch: RecurrentBatch,
    *,
    bias: Tensor | None = None,
    has_silu: bool = True,
) -> Tensor:
    """The specification of `short_convolution`, of few operations that no host waits for: what GPUs run."""
    starts, rows, kept = batch.columns()
    before = states.index_select(0, rows)  # [n, width - 1, C]
    if x.shape[0] == rows.shape[0]:  # one token each
        inputs = torch.cat((before, x[:, None]), dim=1)  # [n, width, C]
        states.index_copy_(0, rows, inputs[:, 1:])
        if kept is not None:
            _keep(states, inputs[:, 1:], kept)
        output = (inputs * weight.t().float()).sum(1)
    else:
        output = _over_chunks(x, weight, states, before, starts, rows, kept)
    if bias is not None:
        output += bias
    return (F.silu(output) if has_silu else output).to(x.dtype)


def _over_chunks(
    x: Tensor, weight: Tensor, states: Tensor, before: Tensor, starts: Tensor, rows: Tensor, kept: Tensor | None
) -> Tensor:
    """The sums of `short_convolution`, float32; `before`: the batch's states, [n, width - 1, C]."""
    width, num_seqs, num_tokens = weight.shape[1], rows.shape[0], x.shape[0]
    # All inputs with the states before them: sequence i's token t is in place starts[i] + t + (i + 1) * (width - 1).
    sequence = torch.repeat_interleave(torch.arange(num_seqs, device=x.device), starts.diff(), output_size=num_tokens)
    places = torch.arange(num_tokens, device=x.device) + (sequence + 1) * (width - 1)
    inputs = x.new_empty((num_tokens + num_seqs * (width - 1), x.shape[1]))
    inputs.index_copy_(0, places, x)
    each = torch.arange(width - 1, device=x.device)
    begins = starts[:-1] + torch.arange(num_seqs, device=x.device) * (width - 1)
    inputs.index_copy_(0, (begins[:, None] + each).view(-1), before.flatten(0, 1))
    output = torch.zeros_like(x, dtype=torch.float32)
    for i in range(width):
        output += inputs.index_select(0, places - (width - 1) + i) * weight[:, i].float()
    ends = starts[1:] + (torch.arange(num_seqs, device=x.device) + 1) * (width - 1)
    after = inputs.index_select(0, (ends[:, None] - (width - 1) + each).view(-1)).view_as(before)
    if kept is not None:
        windows = inputs.index_select(0, (places[:, None] - (width - 2) + each).view(-1))
        _keep(states, windows.view(num_tokens, width - 1, -1), kept)
    states.index_copy_(0, rows, after)
    return output


def _keep(states: Tensor, after: Tensor, kept: Tensor) -> None:
    """Copy the states after some tokens, [num_tokens, width - 1, C], to their rows."""
    tokens = (kept >= 0).nonzero().view(-1)
    states.index_copy_(0, kept.index_select(0, tokens), after.index_select(0, tokens))
