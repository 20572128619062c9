"""LoadedModel: a model on its device, and how it is to be run: what caches, graphs and measurements are made for."""

from dataclasses import dataclass, field

import torch

from pagoda_common.config.engine_config import EngineConfig
from pagoda_worker.attention.choice import AttentionChoice
from pagoda_worker.memory.kv_cache import KVCache
from pagoda_worker.models.model import Model
from pagoda_worker.parallel.tensor_parallel import ALONE, TensorParallel

LARGE_MODEL_BYTES = 64 << 20
"""Weights from which on a worker takes memory for its cache before the first request."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedModel:
    """One rank's."""

    model: Model
    config: EngineConfig
    max_model_len: int
    """Tokens; config.model.max_model_len, or the checkpoint's (also where no more than fits is wanted)."""
    weight_bytes: int
    """Of this rank."""
    dtype: torch.dtype
    """Of weights and activations."""
    cache_dtype: torch.dtype
    """Of the KV cache; int8 and FP8 are quantized ones."""
    device: torch.device
    parallel: TensorParallel = ALONE
    attention: AttentionChoice = field(default_factory=AttentionChoice)
    """Who computes attention in steps without a CUDA graph."""

    @property
    def is_large(self) -> bool:
        """Whether memory is taken before it is used."""
        return self.weight_bytes >= LARGE_MODEL_BYTES

    def make_cache(self, *, num_blocks: int, num_cpu_blocks: int = 0) -> KVCache:
        """A new cache."""
        return KVCache(
            layers=self.model.attention_layers,
            num_blocks=num_blocks,
            num_cpu_blocks=num_cpu_blocks,
            block_size=self.config.cache.block_size,
            dtype=self.cache_dtype,
            device=self.device,
            takes_memory_early=self.is_large,
        )
