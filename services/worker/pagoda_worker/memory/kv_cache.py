"""KVCache: the paged cache of all layers on the device, and the host blocks for swapping."""

import math
import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pagoda_kernels.attention.copy_blocks import copy_blocks
from pagoda_kernels.attention.quantized_cache import FP8, cache_width, scales_of
from pagoda_worker.memory.memory_ahead import MemoryAhead
from pagoda_worker.memory.transfers import to_device
from pagoda_worker.models.cache_groups import CacheLayout, plain_layout
from pagoda_worker.models.model import AttentionLayer
from pagoda_worker.steps.step import IntArray


def block_bytes(
    layers: Sequence[AttentionLayer], *, block_size: int, dtype: torch.dtype, layout: CacheLayout | None = None
) -> int:
    """Bytes of one block's keys and values over all layers of a group; int8 is a quantized cache with its scales.

    Args:
        layout: None puts all layers into one group.
    """
    if layout is not None:
        layers = [layers[layer] for layer in layout.buffers]
    return sum(block_size * sum(map(math.prod, _row_shapes(layer, dtype))) * dtype.itemsize for layer in layers)


def _row_shapes(layer: AttentionLayer, dtype: torch.dtype) -> tuple[tuple[int, int], tuple[int, int]]:
    """Shapes of a token's keys and values: [num_kv_heads, width]; values of latents have width 0."""
    width = cache_width(layer.head_dim, dtype)
    return (layer.num_kv_heads, width), (layer.num_kv_heads, 0 if layer.latent_rank else width)


class KVCache:
    """Buffers of key and value blocks, [num_blocks, block_size, num_kv_heads, head_dim] each; in int8 and FP8, rows of
    `pagoda_kernels.attention.quantized_cache`, of int8 with a scale at their end. With one group there is a buffer for
    each layer; else the layout maps layers to buffers. Latents are keys without values: the values' last dimension is
    0."""

    def __init__(
        self,
        *,
        layers: Sequence[AttentionLayer],
        num_blocks: int,
        num_cpu_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        layout: CacheLayout | None = None,
        takes_memory_early: bool = False,
    ) -> None:
        """
        Args:
            layout: None puts all layers into one group.
            takes_memory_early: as in `MemoryAhead`, on a CPU.
        """
        self.layout = plain_layout(len(layers)) if layout is None else layout
        layers = [layers[layer] for layer in self.layout.buffers]
        self.num_blocks = num_blocks
        self.num_cpu_blocks = num_cpu_blocks
        self.block_size = block_size
        shapes = [_row_shapes(layer, dtype) for layer in layers]
        self.k_caches = [_zeros((num_blocks, block_size, *keys), dtype, device) for keys, _ in shapes]
        self.v_caches = [_zeros((num_blocks, block_size, *values), dtype, device) for _, values in shapes]
        self._caches = [cache for cache in (*self.k_caches, *self.v_caches) if cache.shape[-1]]
        self.memory_ahead = MemoryAhead(self._caches, is_early=takes_memory_early)
        host = torch.device("cpu")
        self._host = [_zeros((num_cpu_blocks, *cache.shape[1:]), dtype, host) for cache in self._caches]

    @property
    def num_bytes(self) -> int:
        """Bytes on the device."""
        return sum(cache.numel() * cache.element_size() for cache in self._caches)

    def copy(self, pairs: IntArray) -> None:
        """Copy blocks on the device; pairs [n, 2] (from, to)."""
        self._move(self._caches, self._caches, pairs, (self.num_blocks, self.num_blocks))

    def swap_out(self, pairs: IntArray) -> None:
        """Copy blocks to the host; pairs [n, 2] (device block, host block)."""
        self._move(self._caches, self._host, pairs, (self.num_blocks, self.num_cpu_blocks))

    def swap_in(self, pairs: IntArray) -> None:
        """Copy blocks from the host; pairs [n, 2] (host block, device block)."""
        self._move(self._host, self._caches, pairs, (self.num_cpu_blocks, self.num_blocks))

    def time_swap(self) -> int:
        """Nanoseconds to move one block one way; half of the round trip, measured on up to eight blocks."""
        count = min(8, self.num_blocks, self.num_cpu_blocks)
        pairs = np.stack([np.arange(count), np.arange(count)], axis=1)
        self.swap_out(pairs)  # the first run pays for memory that was never touched
        started = time.perf_counter_ns()
        self.swap_out(pairs)
        self.swap_in(pairs)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return max(1, (time.perf_counter_ns() - started) // (2 * count))

    def sanitize(self, block_ids: IntArray) -> None:
        """Replace NaN and infinity in some blocks: their next sequence reads past its own tokens (masked, but zero
        times NaN is NaN)."""
        if not self._caches:
            return
        ids = to_device(block_ids, self._caches[0].device)
        for cache in self._caches:
            if cache.dtype == FP8:
                cache = cache.view(torch.uint8)
                codes = cache.index_select(0, ids)
                cache.index_copy_(0, ids, codes.masked_fill_(codes & 127 == 127, 0))
                continue
            blocks = cache.index_select(0, ids)
            if cache.dtype == torch.int8:
                scales_of(blocks).nan_to_num_(0, posinf=0, neginf=0)
            else:
                blocks.nan_to_num_()
            cache.index_copy_(0, ids, blocks)

    def clear(self, block_ids: IntArray) -> None:
        """Fill some blocks with zeros, without waiting."""
        ids = to_device(block_ids, self._caches[0].device)
        for cache in self._caches:
            words = cache.view(torch.uint8) if cache.dtype == FP8 else cache
            words.index_fill_(0, ids, 0)

    def _move(self, source: list[Tensor], target: list[Tensor], pairs: IntArray, bounds: tuple[int, int]) -> None:
        if not pairs.size:
            return
        for column, bound in enumerate(bounds):
            if int(pairs[:, column].max()) >= bound:
                raise ValueError(f"block {int(pairs[:, column].max())} is not below {bound}")
        from_ids, to_ids = (torch.from_numpy(np.ascontiguousarray(pairs[:, column])) for column in (0, 1))
        for one, other in zip(source, target, strict=True):
            copy_blocks(one, other, from_ids, to_ids)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu" or 0 in shape:
        return torch.zeros(shape, dtype=dtype, device=device)
    # calloc: memory is taken when a block is first written (or by `MemoryAhead`), not now.
    count = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    return torch.from_numpy(np.zeros(count, dtype=np.uint8)).view(dtype).view(shape)
