"""The gated delta rule: a matrix for each head that decays, and takes what the tokens' keys do not recall yet."""

import torch
from torch import Tensor

from pagoda_kernels.native.library import native
from pagoda_kernels.recurrent.batch import RecurrentBatch
from pagoda_kernels.selection import triton_kernel

NORM_EPS = 1e-6
"""Added to the squared length of queries and keys."""


def gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, states: Tensor, batch: RecurrentBatch
) -> Tensor:
    """For each token t of a sequence and each value head, with q and k of length 1 and q * key_dim^-0.5:

        S = exp(decay_t) S;  S += k_t (beta_t (v_t - S^T k_t))^T;  out_t = S^T q_t

    Sequences go token by token over a state that stays in a core's cache: what is computed does not depend on how a
    prompt is cut into chunks.

    Args:
        query, key: [num_tokens, num_key_heads, key_dim]; consecutive value heads share a key head.
        value: [num_tokens, num_value_heads, value_dim].
        decay, beta: [num_tokens, num_value_heads] float32.
        states: [num_rows, num_value_heads, key_dim, value_dim] float32, changed at the batch's rows.

    Returns:
        [num_tokens, num_value_heads, value_dim] float32.

    Source: gated delta networks, Yang et al. 2024 (arXiv 2412.06464).
    """
    if states.shape[1:] != (value.shape[1], key.shape[2], value.shape[2]) or states.dtype != torch.float32:
        raise ValueError(f"states {tuple(states.shape)} do not fit {tuple(key.shape)} and {tuple(value.shape)}")
    if value.shape[1] % key.shape[1] or query.shape != key.shape:
        raise ValueError(f"{value.shape[1]} value heads cannot share {key.shape[1]} key heads evenly")
    query, key, value = (x.float().contiguous() for x in (query, key, value))
    decay, beta = decay.contiguous(), beta.contiguous()
    kernel = triton_kernel("gated_delta_rule", query)
    if kernel is None and query.is_cpu:
        kernel = native("gated_delta_rule")
    if kernel is not None and states.is_contiguous():
        output = torch.empty_like(value)
        kernel(query, key, value, decay, beta, states, *batch.columns(), output)
        return output
    return gated_delta_rule_reference(query, key, value, decay, beta, states, batch)


def gated_delta_rule_reference(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, states: Tensor, batch: RecurrentBatch
) -> Tensor:
    """The specification of `gated_delta_rule`."""
    group, output = value.shape[1] // key.shape[1], torch.empty_like(value)
    query, key = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS) for x in (query.float(), key.float()))
    query, key = (x.repeat_interleave(group, dim=1) for x in (query * key.shape[2] ** -0.5, key))
    token = 0
    for row, query_len in zip(batch.rows.tolist(), batch.query_lens.tolist(), strict=True):
        state = states[row]  # [Hv, Dk, Dv]
        for _ in range(query_len):
            state = state * decay[token].exp()[:, None, None]
            recalled = (state * key[token, :, :, None]).sum(1)
            change = (value[token] - recalled) * beta[token, :, None]
            state = state + key[token, :, :, None] * change[:, None]
            output[token] = (state * query[token, :, :, None]).sum(1)
            if batch.kept_rows is not None and batch.kept_rows[token] >= 0:
                states[int(batch.kept_rows[token])] = state
            token += 1
        states[row] = state
    return output
