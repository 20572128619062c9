"""Whether moving a block to the host and back costs less than computing its tokens again, by what steps have taken."""

MIN_PREFILL_TOKENS = 64
"""Steps with fewer tokens tell nothing about the cost of a prompt token."""


class SwapCost:
    """Compares the measured cost of a move with the smoothed cost of a prompt token."""

    def __init__(self, *, swap_block_ns: int, block_size: int) -> None:
        """`swap_block_ns`: nanoseconds to move one block one way."""
        self._swap_block_ns = swap_block_ns
        self._block_size = block_size
        self._prefill_ns_per_token = 0.0

    def add(self, *, forward_ns: int, num_tokens: int) -> bool | None:
        """Take a step's forward time; whether swapping is cheaper now, None when the step tells nothing."""
        if num_tokens < MIN_PREFILL_TOKENS:
            return None
        per_token, smoothed = forward_ns / num_tokens, self._prefill_ns_per_token
        self._prefill_ns_per_token = smoothed + (per_token - smoothed) / 8 if smoothed else per_token
        return 2 * self._swap_block_ns < self._prefill_ns_per_token * self._block_size
