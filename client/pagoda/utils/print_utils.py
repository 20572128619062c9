"""Long vectors in few words, as the examples of vLLM print them."""

from collections.abc import Sequence

NUM_SHOWN = 4
"""Values that are printed of a longer vector."""


def print_embeddings(embeds: Sequence[float], prefix: str = "Embeddings") -> None:
    """Print the first values of a vector and its size on one line.

    Args:
        prefix: what stands before them.
    """
    shown = ", ".join(str(value) for value in embeds[:NUM_SHOWN])
    dots = ", ..." if len(embeds) > NUM_SHOWN else ""
    print(f"{prefix}: [{shown}{dots}] (size={len(embeds)})")
