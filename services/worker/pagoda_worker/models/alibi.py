"""Slopes of linear biases (ALiBi) by the number of heads. Knows no tensors.

Source: Press et al. 2021 (arXiv 2108.12409).
"""


def power_slopes(num_heads: int, bias_max: float = 8.0) -> list[float]:
    """2^(-bias_max i / num_heads), i from 1; for a power of two heads."""
    return [2.0 ** (-bias_max * (head + 1) / num_heads) for head in range(num_heads)]


def alibi_slopes(num_heads: int) -> list[float]:
    """Of any number of heads: those beyond a power of two take every other slope of twice as many."""
    power = 1 << (num_heads.bit_length() - 1)
    return power_slopes(power) + power_slopes(2 * power)[::2][: num_heads - power]
