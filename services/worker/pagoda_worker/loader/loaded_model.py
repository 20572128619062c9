"""LoadedModel: a model on its device, and the settings that caches, graphs and measurements depend on."""

from dataclasses import dataclass, field

import torch

from pagoda_common.config.engine_config import EngineConfig
from pagoda_worker.attention.choice import AttentionChoice
from pagoda_worker.memory.kv_cache import KVCache
from pagoda_worker.memory.state_pool import StatePool
from pagoda_worker.models.cache_groups import CacheLayout
from pagoda_worker.models.model import Model
from pagoda_worker.parallel.tensor_parallel import ALONE, TensorParallel

LARGE_MODEL_BYTES = 64 << 20
"""Bytes of weights above which a worker takes memory for its cache before the first request."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedModel:
    """The loaded model of one rank."""

    model: Model
    config: EngineConfig
    max_model_len: int
    """Tokens; config.model.max_model_len, or the checkpoint's (even if only as much as fits is wanted)."""
    weight_bytes: int
    """Bytes of this rank's weights."""
    dtype: torch.dtype
    """Data type of weights and activations."""
    cache_dtype: torch.dtype
    """Data type of the KV cache; int8 and FP8 are quantized."""
    device: torch.device
    layout: CacheLayout
    """Layout of the data that its layers keep of a sequence."""
    parallel: TensorParallel = ALONE
    attention: AttentionChoice = field(default_factory=AttentionChoice)
    """Choice of kernels for attention in steps without a CUDA graph."""

    @property
    def is_large(self) -> bool:
        """Whether cache memory is taken before it is used."""
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
            layout=self.layout,
            takes_memory_early=self.is_large,
        )

    def make_states(self, *, num_snapshots: int, num_cpu_snapshots: int = 0, num_slots: int = 0) -> StatePool | None:
        """New states of recurrent layers; None if the model has none.

        Args:
            num_slots: 0 means one for each sequence that may run.
        """
        if not self.model.recurrent_layers:
            return None
        return StatePool(
            layers=self.model.recurrent_layers,
            num_slots=num_slots or self.config.scheduler.max_num_seqs,
            num_snapshots=num_snapshots,
            num_cpu_snapshots=num_cpu_snapshots,
            num_draft_tokens=self.config.speculative.num_speculative_tokens,
            dtype=self.dtype,
            device=self.device,
        )
