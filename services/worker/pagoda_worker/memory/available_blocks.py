"""How many blocks of KV cache there is memory for. Knows the loaded model; allocates nothing that stays."""

from dataclasses import dataclass

from pagoda_common.errors import OutOfMemory
from pagoda_worker.loader.loaded_model import LoadedModel
from pagoda_worker.memory.device import available_memory_bytes
from pagoda_worker.memory.kv_cache import block_bytes
from pagoda_worker.memory.profiling import measured_budget

MAX_CPU_CACHE_BYTES = 4 * 1024**3
CPU_CACHE_SHARE = 0.4
"""KV cache on a CPU unless its size is given: this share of the memory that is left, up to MAX_CPU_CACHE_BYTES."""


@dataclass(frozen=True, slots=True)
class AvailableBlocks:
    """Blocks that fit into the memory budgets."""

    num_blocks: int
    num_cpu_blocks: int
    block_bytes: int


def available_blocks(loaded: LoadedModel) -> AvailableBlocks:
    """Blocks that fit, and no more than every sequence could ever fill.

    Raises:
        OutOfMemory: not even one request of max_model_len would fit (with FIT_MEMORY: not one block); the message
            names the flags.
    """
    cache, is_cpu = loaded.config.cache, loaded.device.type == "cpu"
    size = block_bytes(loaded.model.attention_layers, block_size=cache.block_size, dtype=loaded.cache_dtype)
    budget = cache.kv_cache_memory_bytes or _free_bytes(loaded)
    per_request = -(-loaded.max_model_len // cache.block_size)
    num_blocks = min(budget // size, loaded.config.scheduler.max_num_seqs * per_request)
    if num_blocks < (1 if loaded.config.model.fits_max_model_len else per_request):
        flag = "--kv-cache-memory" if is_cpu else "--kv-cache-memory or --gpu-memory-utilization"
        raise OutOfMemory(
            f"the KV cache has room for {budget // size * cache.block_size} tokens ({budget / 2**20:.1f} MiB), one "
            f"request of max_model_len {loaded.max_model_len} needs {per_request * size / 2**20:.1f} MiB: "
            f"raise {flag}, or lower --max-model-len (auto takes what fits)"
        )
    return AvailableBlocks(
        num_blocks=num_blocks, num_cpu_blocks=cache.cpu_kv_cache_memory_bytes // size, block_bytes=size
    )


def _free_bytes(loaded: LoadedModel) -> int:
    if loaded.device.type == "cpu":
        return min(MAX_CPU_CACHE_BYTES, int(CPU_CACHE_SHARE * available_memory_bytes()))
    return measured_budget(loaded).kv_cache_bytes
