"""Parameters of embeddings, where vLLM has them."""

from pagoda import PoolingParams

__all__ = ["PoolingParams"]
