"""SwapCost: whether swapping a block out and in is cheaper than recomputing its tokens, by measured step times."""

MIN_PREFILL_TOKENS = 64
"""Minimum tokens of a step whose time says something about the cost of a prompt token."""


class SwapCost:
    """Compares the measured cost of a move with the smoothed cost of a prompt token."""

    def __init__(self, *, swap_block_ns: int, block_size: int) -> None:
        """`swap_block_ns`: nanoseconds to move one block one way."""
        self._swap_block_ns = swap_block_ns
        self._block_size = block_size
        self._prefill_ns_per_token = 0.0

    def add(self, *, forward_ns: int, num_tokens: int) -> bool | None:
        """Add a step's forward time; returns whether swapping is cheaper now, or None if the step is too small."""
        if num_tokens < MIN_PREFILL_TOKENS:
            return None
        per_token, smoothed = forward_ns / num_tokens, self._prefill_ns_per_token
        self._prefill_ns_per_token = smoothed + (per_token - smoothed) / 8 if smoothed else per_token
        return 2 * self._swap_block_ns < self._prefill_ns_per_token * self._block_size
