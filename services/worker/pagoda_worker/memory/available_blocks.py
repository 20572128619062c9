"""Computes how many KV-cache blocks fit into memory. Knows the loaded model; allocates nothing permanently."""

from dataclasses import dataclass

from pagoda_common.errors import OutOfMemory
from pagoda_worker.loader.loaded_model import LoadedModel
from pagoda_worker.memory.device import available_memory_bytes
from pagoda_worker.memory.kv_cache import block_bytes
from pagoda_worker.memory.profiling import measured_budget
from pagoda_worker.memory.state_pool import state_bytes

MAX_CPU_CACHE_BYTES = 4 * 1024**3
CPU_CACHE_SHARE = 0.4
"""Share of free memory for the KV cache on a CPU unless its size is given, up to MAX_CPU_CACHE_BYTES."""


SNAPSHOT_SHARE = 0.25
"""Share of the memory left by the slots' states for snapshots of recurrent states; blocks get the rest."""
SNAPSHOTS_A_SEQUENCE = 16
"""Maximum number of snapshots per running sequence."""
MIN_SNAPSHOTS = 2
"""Minimum number of snapshots: a preempted or forked sequence has one, and a step may need another."""


@dataclass(frozen=True, slots=True)
class AvailableBlocks:
    """Blocks that fit into the memory budgets."""

    num_blocks: int
    num_cpu_blocks: int
    block_bytes: int
    num_state_snapshots: int = 0
    """Number of snapshots of recurrent state, in addition to the slots' states."""
    num_cpu_state_snapshots: int = 0
    state_bytes: int = 0
    """Bytes of one snapshot."""


def available_blocks(loaded: LoadedModel) -> AvailableBlocks:
    """The blocks that fit, at most as many as all sequences could fill.

    Raises:
        OutOfMemory: one request of max_model_len does not fit (with FIT_MEMORY: not one block); the message names the
        flags.
    """
    if loaded.model.only_pools:
        return AvailableBlocks(num_blocks=0, num_cpu_blocks=0, block_bytes=0)
    cache, is_cpu = loaded.config.cache, loaded.device.type == "cpu"
    size = block_bytes(
        loaded.model.attention_layers, block_size=cache.block_size, dtype=loaded.cache_dtype, layout=loaded.layout
    )
    memory = cache.kv_cache_memory_bytes or _free_bytes(loaded)
    states = _states(loaded, memory)
    budget = memory - states.num_bytes
    chunk = loaded.config.scheduler.max_num_batched_tokens
    per_request = sum(
        group.num_blocks(loaded.max_model_len, block_size=cache.block_size, chunk=chunk)
        for group in loaded.layout.groups
    )
    if not size:  # recurrent layers alone
        return AvailableBlocks(num_blocks=0, num_cpu_blocks=0, block_bytes=0, **states.counts)
    num_blocks = min(budget // size, loaded.config.scheduler.max_num_seqs * per_request)
    if num_blocks < (1 if loaded.config.model.fits_max_model_len else per_request):
        flag = "--kv-cache-memory" if is_cpu else "--kv-cache-memory or --gpu-memory-utilization"
        num_tokens = budget // size * cache.block_size // len(loaded.layout.groups)
        raise OutOfMemory(
            f"the KV cache has room for {num_tokens} tokens ({budget / 2**20:.1f} MiB), one "
            f"request of max_model_len {loaded.max_model_len} needs {per_request * size / 2**20:.1f} MiB: "
            f"raise {flag}, or lower --max-model-len (auto takes what fits)"
        )
    return AvailableBlocks(
        num_blocks=num_blocks,
        num_cpu_blocks=(cache.cpu_kv_cache_memory_bytes - states.num_cpu_bytes) // size,
        block_bytes=size,
        **states.counts,
    )


@dataclass(frozen=True, slots=True)
class _States:
    """Memory of recurrent states."""

    size: int = 0
    """Bytes of one sequence's states."""
    num_rows: int = 0
    """Number of states for slots and drafts."""
    num_snapshots: int = 0
    num_cpu_snapshots: int = 0

    @property
    def num_bytes(self) -> int:
        return self.size * (self.num_rows + self.num_snapshots)

    @property
    def num_cpu_bytes(self) -> int:
        return self.size * self.num_cpu_snapshots

    @property
    def counts(self) -> dict[str, int]:
        return {
            "num_state_snapshots": self.num_snapshots,
            "num_cpu_state_snapshots": self.num_cpu_snapshots,
            "state_bytes": self.size,
        }


def _states(loaded: LoadedModel, budget: int) -> _States:
    """
    Raises:
        OutOfMemory: the states of the slots do not fit.
    """
    size = state_bytes(loaded.model.recurrent_layers, loaded.dtype)
    if not size:
        return _States()
    config = loaded.config
    num_seqs = config.scheduler.max_num_seqs
    num_rows = num_seqs * (1 + config.speculative.num_speculative_tokens)
    share = int((budget - num_rows * size) * SNAPSHOT_SHARE)
    num_snapshots = min(share // size, SNAPSHOTS_A_SEQUENCE * num_seqs)
    if num_snapshots < MIN_SNAPSHOTS:
        raise OutOfMemory(
            f"{num_rows} recurrent states and {MIN_SNAPSHOTS} snapshots of {size / 2**20:.1f} MiB do not fit the cache "
            f"of {budget / 2**20:.1f} MiB: raise --kv-cache-memory, or lower --max-num-seqs"
        )
    num_cpu = int(config.cache.cpu_kv_cache_memory_bytes * SNAPSHOT_SHARE) // size
    return _States(size, num_rows, num_snapshots, num_cpu)


def _free_bytes(loaded: LoadedModel) -> int:
    if loaded.device.type == "cpu":
        return min(MAX_CPU_CACHE_BYTES, int(CPU_CACHE_SHARE * available_memory_bytes()))
    return measured_budget(loaded).kv_cache_bytes
