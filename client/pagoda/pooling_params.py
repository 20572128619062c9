"""Parameters of embeddings, under vLLM's module names."""

from pagoda import PoolingParams

__all__ = ["PoolingParams"]
