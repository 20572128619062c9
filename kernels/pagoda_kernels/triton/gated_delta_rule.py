"""The gated delta rule in Triton: some columns of one head's state a program, token by token in registers.

Columns of a state do not meet, so a head is divided among programs. What is computed does not depend on chunks.
"""

import triton
import triton.language as tl
from torch import Tensor

MAX_STATE_VALUES = 4096
"""Maximum size of a program's part of a state, in registers."""


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    states: Tensor,
    starts: Tensor,
    rows: Tensor,
    kept: Tensor | None,
    output: Tensor,
) -> None:
    """`pagoda_kernels.recurrent.gated_delta_rule.gated_delta_rule`, with the columns of its batch; all contiguous."""
    num_key_heads, key_dim = key.shape[1:]
    num_value_heads, value_dim = value.shape[1:]
    if not rows.shape[0]:
        return
    block_k = triton.next_power_of_2(key_dim)
    block_v = min(triton.next_power_of_2(value_dim), max(1, MAX_STATE_VALUES // block_k))
    grid = (rows.shape[0], num_value_heads, triton.cdiv(value_dim, block_v))
    _gated_delta_rule_kernel[grid](
        query,
        key,
        value,
        decay,
        beta,
        states,
        starts,
        rows,
        kept,
        output,
        key_dim**-0.5,
        NUM_KEY_HEADS=num_key_heads,
        NUM_VALUE_HEADS=num_value_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        BLOCK_K=block_k,
        BLOCK_V=block_v,
        HAS_KEPT=kept is not None,
        num_warps=4,
    )


@triton.jit
def _gated_delta_rule_kernel(
    query_ptr, key_ptr, value_ptr, decay_ptr, beta_ptr, states_ptr, starts_ptr, rows_ptr, kept_ptr, output_ptr, scale,
    NUM_KEY_HEADS: tl.constexpr, NUM_VALUE_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, HAS_KEPT: tl.constexpr,
):  # fmt: skip
    """Program: sequence, value head, columns of the state."""
    seq, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    key_head = head // (NUM_VALUE_HEADS // NUM_KEY_HEADS)
    keys = tl.arange(0, BLOCK_K)
    columns = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_key, is_column = keys < KEY_DIM, columns < VALUE_DIM
    is_state = is_key[:, None] & is_column[None, :]
    offsets = head * KEY_DIM * VALUE_DIM + keys[:, None] * VALUE_DIM + columns[None, :]
    row_size = NUM_VALUE_HEADS * KEY_DIM * VALUE_DIM
    row = tl.load(rows_ptr + seq)
    state = tl.load(states_ptr + row * row_size + offsets, mask=is_state, other=0.0)  # [K, V]
    for token in range(tl.load(starts_ptr + seq), tl.load(starts_ptr + seq + 1)):
        place = token * NUM_VALUE_HEADS + head
        key_place = (token * NUM_KEY_HEADS + key_head) * KEY_DIM + keys
        q = tl.load(query_ptr + key_place, mask=is_key, other=0.0)
        k = tl.load(key_ptr + key_place, mask=is_key, other=0.0)
        q = q * (scale / tl.sqrt(tl.sum(q * q, axis=0) + 1e-6))
        k = k / tl.sqrt(tl.sum(k * k, axis=0) + 1e-6)
        v = tl.load(value_ptr + place * VALUE_DIM + columns, mask=is_column, other=0.0)
        state = state * tl.exp(tl.load(decay_ptr + place))
        recalled = tl.sum(state * k[:, None], axis=0)
        change = (v - recalled) * tl.load(beta_ptr + place)
        state = state + k[:, None] * change[None, :]
        tl.store(output_ptr + place * VALUE_DIM + columns, tl.sum(state * q[:, None], axis=0), mask=is_column)
        if HAS_KEPT:
            kept = tl.load(kept_ptr + token)
            if kept >= 0:
                tl.store(states_ptr + kept * row_size + offsets, state, mask=is_state)
    tl.store(states_ptr + row * row_size + offsets, state, mask=is_state)
