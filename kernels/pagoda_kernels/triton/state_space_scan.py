"""The scan of a state space in Triton: some columns of one head's state a program, token by token in registers.

Columns of a state do not meet, so a head is divided among programs. What is computed does not depend on chunks.
"""

import triton
import triton.language as tl
from torch import Tensor

MAX_STATE_VALUES = 4096
"""Maximum size of a program's part of a state, in registers."""


def state_space_scan(
    x: Tensor,
    b: Tensor,
    c: Tensor,
    step: Tensor,
    step_bias: Tensor,
    decay_log: Tensor,
    skip: Tensor,
    min_step: float,
    max_step: float,
    states: Tensor,
    starts: Tensor,
    rows: Tensor,
    kept: Tensor | None,
    output: Tensor,
) -> None:
    """`pagoda_kernels.recurrent.state_space_scan.state_space_scan`, with the columns of its batch; all contiguous."""
    num_heads, head_dim = x.shape[1:]
    num_groups, state_size = b.shape[1:]
    if not rows.shape[0]:
        return
    block_n = triton.next_power_of_2(state_size)
    block_p = min(triton.next_power_of_2(head_dim), max(1, MAX_STATE_VALUES // block_n))
    grid = (rows.shape[0], num_heads, triton.cdiv(head_dim, block_p))
    _state_space_scan_kernel[grid](
        x,
        b,
        c,
        step,
        step_bias,
        decay_log,
        skip,
        states,
        starts,
        rows,
        kept,
        output,
        float(min_step),
        float(max_step),
        NUM_HEADS=num_heads,
        NUM_GROUPS=num_groups,
        HEAD_DIM=head_dim,
        STATE_SIZE=state_size,
        BLOCK_N=block_n,
        BLOCK_P=block_p,
        HAS_KEPT=kept is not None,
        num_warps=4,
    )


@triton.jit
def _state_space_scan_kernel(
    x_ptr, b_ptr, c_ptr, step_ptr, step_bias_ptr, decay_log_ptr, skip_ptr, states_ptr, starts_ptr, rows_ptr, kept_ptr,
    output_ptr, min_step, max_step,
    NUM_HEADS: tl.constexpr, NUM_GROUPS: tl.constexpr, HEAD_DIM: tl.constexpr, STATE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, HAS_KEPT: tl.constexpr,
):  # fmt: skip
    """Program: sequence, head, columns of the state."""
    seq, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    group = head // (NUM_HEADS // NUM_GROUPS)
    places = tl.arange(0, BLOCK_N)
    columns = tl.program_id(2) * BLOCK_P + tl.arange(0, BLOCK_P)
    is_place, is_column = places < STATE_SIZE, columns < HEAD_DIM
    is_state = is_place[:, None] & is_column[None, :]
    offsets = head * STATE_SIZE * HEAD_DIM + places[:, None] * HEAD_DIM + columns[None, :]
    row_size = NUM_HEADS * STATE_SIZE * HEAD_DIM
    row = tl.load(rows_ptr + seq)
    state = tl.load(states_ptr + row * row_size + offsets, mask=is_state, other=0.0)  # [N, P]
    bias, rate, skip = tl.load(step_bias_ptr + head), -tl.exp(tl.load(decay_log_ptr + head)), tl.load(skip_ptr + head)
    for token in range(tl.load(starts_ptr + seq), tl.load(starts_ptr + seq + 1)):
        place = token * NUM_HEADS + head
        shared = (token * NUM_GROUPS + group) * STATE_SIZE + places
        b = tl.load(b_ptr + shared, mask=is_place, other=0.0)
        c = tl.load(c_ptr + shared, mask=is_place, other=0.0)
        x = tl.load(x_ptr + place * HEAD_DIM + columns, mask=is_column, other=0.0)
        given = tl.load(step_ptr + place) + bias
        # softplus, without what float32 loses of e^given beside 1, or cannot hold
        small = tl.exp(-tl.abs(given))
        log = tl.where(small < 1e-3, small - 0.5 * small * small, tl.log(1.0 + small))
        step = tl.minimum(tl.maximum(tl.maximum(given, 0.0) + log, min_step), max_step)
        state = state * tl.exp(rate * step) + b[:, None] * (x * step)[None, :]
        out = tl.sum(state * c[:, None], axis=0) + skip * x
        tl.store(output_ptr + place * HEAD_DIM + columns, out, mask=is_column)
        if HAS_KEPT:
            kept = tl.load(kept_ptr + token)
            if kept >= 0:
                tl.store(states_ptr + kept * row_size + offsets, state, mask=is_state)
    tl.store(states_ptr + row * row_size + offsets, state, mask=is_state)
