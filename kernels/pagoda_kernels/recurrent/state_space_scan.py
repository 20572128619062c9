"""The scan of a state space with one decay a head: a matrix for each head that decays, and takes what tokens bring."""

import torch
import torch.nn.functional as F
from torch import Tensor

from pagoda_kernels.native.library import native
from pagoda_kernels.recurrent.batch import RecurrentBatch
from pagoda_kernels.selection import triton_kernel

Steps = tuple[float, float]
"""Least and most that a step may be."""


def state_space_scan(
    x: Tensor,
    b: Tensor,
    c: Tensor,
    step: Tensor,
    states: Tensor,
    batch: RecurrentBatch,
    *,
    step_bias: Tensor,
    decay_log: Tensor,
    skip: Tensor,
    steps: Steps = (0.0, float("inf")),
) -> Tensor:
    """For each token t of a sequence and each head, with d = softplus(step_t + step_bias) within `steps`:

        S = exp(-exp(decay_log) d) S + b_t (d x_t)^T;  out_t = S^T c_t + skip x_t

    Sequences go token by token over a state that stays in a core's cache: what is computed does not depend on how a
    prompt is cut into chunks.

    Args:
        x: [num_tokens, num_heads, head_dim].
        b, c: [num_tokens, num_groups, state_size]; consecutive heads share a group.
        step: [num_tokens, num_heads].
        states: [num_rows, num_heads, state_size, head_dim] float32, changed at the batch's rows.
        step_bias, decay_log, skip: [num_heads] float32.

    Returns:
        [num_tokens, num_heads, head_dim] float32.

    Source: Mamba-2, Dao and Gu 2024 (arXiv 2405.21060).
    """
    if states.shape[1:] != (x.shape[1], b.shape[2], x.shape[2]) or states.dtype != torch.float32:
        raise ValueError(f"states {tuple(states.shape)} do not fit {tuple(x.shape)} and {tuple(b.shape)}")
    if x.shape[1] % b.shape[1] or b.shape != c.shape:
        raise ValueError(f"{x.shape[1]} heads cannot share {b.shape[1]} groups evenly")
    x, b, c, step = (one.float().contiguous() for one in (x, b, c, step))
    step_bias, decay_log, skip = (one.contiguous() for one in (step_bias, decay_log, skip))
    kernel = triton_kernel("state_space_scan", x)
    if kernel is None and x.is_cpu:
        kernel = native("state_space_scan")
    if kernel is not None and states.is_contiguous():
        output = torch.empty_like(x)
        kernel(x, b, c, step, step_bias, decay_log, skip, *steps, states, *batch.columns(), output)
        return output
    return state_space_scan_reference(
        x, b, c, step, states, batch, step_bias=step_bias, decay_log=decay_log, skip=skip, steps=steps
    )


def state_space_scan_reference(
    x: Tensor,
    b: Tensor,
    c: Tensor,
    step: Tensor,
    states: Tensor,
    batch: RecurrentBatch,
    *,
    step_bias: Tensor,
    decay_log: Tensor,
    skip: Tensor,
    steps: Steps = (0.0, float("inf")),
) -> Tensor:
    """The specification of `state_space_scan`."""
    group, output = x.shape[1] // b.shape[1], torch.empty_like(x, dtype=torch.float32)
    b, c = (one.float().repeat_interleave(group, dim=1) for one in (b, c))  # [T, H, N]
    sizes = F.softplus(step.float() + step_bias).clamp(*steps)  # [T, H]
    decay = (-decay_log.exp() * sizes).exp()
    token = 0
    for row, query_len in zip(batch.rows.tolist(), batch.query_lens.tolist(), strict=True):
        state = states[row]  # [H, N, P]
        for _ in range(query_len):
            value = x[token].float()
            brought = b[token, :, :, None] * (value * sizes[token, :, None])[:, None]
            state = state * decay[token, :, None, None] + brought
            output[token] = (state * c[token, :, :, None]).sum(1) + skip[:, None] * value
            if batch.kept_rows is not None and batch.kept_rows[token] >= 0:
                states[int(batch.kept_rows[token])] = state
            token += 1
        states[row] = state
    return output
