"""The scan of a state space with a decay for each number of the state (Mamba-1)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from pagoda_kernels.recurrent.batch import RecurrentBatch

BLOCK_TOKENS = 32
"""Of a sequence, whose states are held at once."""


def selective_scan(
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
) -> Tensor:
    """For each token t of a sequence and each channel, with d = softplus(step_t + step_bias):

        S = exp(-exp(decay_log) d) S + d x_t b_t;  out_t = S · c_t + skip x_t

    Plain PyTorch on every device: all sequences at once where each has one token, else one token after the other.

    Args:
        x, step: [num_tokens, num_channels].
        b, c: [num_tokens, state_size], the same for all channels.
        states: [num_rows, num_channels, state_size] float32, changed at the batch's rows.
        step_bias, skip: [num_channels] float32.
        decay_log: [num_channels, state_size] float32.

    Returns:
        [num_tokens, num_channels] float32.

    Source: Mamba, Gu and Dao 2023 (arXiv 2312.00752).
    """
    if states.shape[1:] != (x.shape[1], b.shape[1]) or states.dtype != torch.float32:
        raise ValueError(f"states {tuple(states.shape)} do not fit {tuple(x.shape)} and {tuple(b.shape)}")
    if x.shape != step.shape or b.shape != c.shape or decay_log.shape != states.shape[1:]:
        raise ValueError(f"x {tuple(x.shape)}, step {tuple(step.shape)}, b {tuple(b.shape)} do not fit each other")
    x, b, c = x.float(), b.float(), c.float()
    sizes, rates = F.softplus(step.float() + step_bias), -decay_log.exp()
    brings = sizes * x
    _, rows, kept = batch.columns()
    if x.shape[0] == rows.shape[0]:
        decays, brought = _moves(sizes, brings, b, rates)
        after = torch.addcmul(brought, states.index_select(0, rows), decays)
        states.index_copy_(0, rows, after)
        if kept is not None:
            _keep(states, after, kept)
        return torch.addcmul((after * c[:, None]).sum(-1), skip, x)
    output, start = torch.empty_like(x), 0
    for row, query_len in zip(batch.rows.tolist(), batch.query_lens.tolist(), strict=True):
        state = states[row]
        for begin in range(start, start + query_len, BLOCK_TOKENS):
            block = slice(begin, min(begin + BLOCK_TOKENS, start + query_len))
            decays, each = _moves(sizes[block], brings[block], b[block], rates)
            for place in range(each.shape[0]):
                state = torch.addcmul(each[place], state, decays[place], out=each[place])
            output[block] = (each * c[block, None]).sum(-1)
            if kept is not None:
                _keep(states, each, kept[block])
        states[row] = state
        start += query_len
    return torch.addcmul(output, skip, x)


def _moves(sizes: Tensor, brings: Tensor, b: Tensor, rates: Tensor) -> tuple[Tensor, Tensor]:
    """What is left of the states at each token, and what it brings, [n, num_channels, state_size]."""
    return (rates * sizes[:, :, None]).exp(), brings[:, :, None] * b[:, None]


def _keep(states: Tensor, after: Tensor, kept: Tensor) -> None:
    """Copy the states after some tokens to their rows."""
    tokens = (kept >= 0).nonzero().view(-1)
    states.index_copy_(0, kept.index_select(0, tokens), after.index_select(0, tokens))


def selective_scan_reference(
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
) -> Tensor:
    """The specification of `selective_scan`."""
    output, token = torch.empty_like(x, dtype=torch.float32), 0
    for row, query_len in zip(batch.rows.tolist(), batch.query_lens.tolist(), strict=True):
        state = states[row].clone()  # [C, N]
        for _ in range(query_len):
            value, size = x[token].float(), F.softplus(step[token].float() + step_bias)
            state = (-decay_log.exp() * size[:, None]).exp() * state + (size * value)[:, None] * b[token].float()
            output[token] = state @ c[token].float() + skip * value
            if batch.kept_rows is not None and batch.kept_rows[token] >= 0:
                states[int(batch.kept_rows[token])] = state
            token += 1
        states[row] = state
    return output
