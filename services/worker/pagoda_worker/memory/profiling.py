"""Measures the memory of steps on an accelerator besides weights and KV cache, and the rest for the cache."""

import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pagoda_common.params.sampling_params import SamplingParams
from pagoda_worker.graphs.cuda_graphs import CudaGraphRecorder, make_decode_graphs, why_eager
from pagoda_worker.graphs.decode_graphs import DecodeGraphs, graph_sizes
from pagoda_worker.loader.loaded_model import LoadedModel
from pagoda_worker.memory.device import free_memory_bytes
from pagoda_worker.steps.model_runner import ModelRunner
from pagoda_worker.steps.step import NewRequest, StepInput

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryBudget:
    """Division of an accelerator's memory, in bytes."""

    total_bytes: int
    utilization: float
    """Share of the total that may be in use."""
    free_bytes: int
    """Free bytes now, with the weights and everything except the following."""
    activation_bytes: int
    """Bytes that the largest step needs."""
    graph_bytes: int = 0

    @property
    def kv_cache_bytes(self) -> int:
        """Bytes left for the KV cache, so that the sum is total * utilization."""
        reserve = int(self.total_bytes * (1 - self.utilization))
        return max(self.free_bytes - reserve - self.activation_bytes - self.graph_bytes, 0)


def measured_budget(loaded: LoadedModel) -> MemoryBudget:
    """Run the largest step and record the largest graphs, on a CUDA device; all ranks of a group together."""
    device = loaded.device
    activations = peak_activation_bytes(loaded)
    graphs = 0 if why_eager(loaded) is not None else _graph_bytes(loaded)
    budget = MemoryBudget(
        total_bytes=torch.cuda.mem_get_info(device)[1],
        utilization=loaded.config.cache.gpu_memory_utilization,
        # What the measurements took and gave back counts as free; what libraries and kernels took, they keep.
        free_bytes=free_memory_bytes(device),
        activation_bytes=activations,
        graph_bytes=graphs,
    )
    logger.info(
        "%.2f GiB for the KV cache: %.2f GiB of %.2f are free, the largest step takes %.2f and CUDA graphs %.2f",
        *(size / 2**30 for size in (budget.kv_cache_bytes, budget.free_bytes, budget.total_bytes, activations, graphs)),
    )
    return budget


def bytes_of_graphs(sizes: Sequence[int], record: Callable[[int], None], free_bytes: Callable[[], int]) -> int:
    """Bytes that graphs of all sizes need, estimated from the two largest. The first graph shows the shared memory, the
    second one the memory of each.

    Args:
        sizes: rising.
        record: makes and keeps the graph of a size; the first call also makes the graphs' buffers.
        free_bytes: of the device.
    """
    free = [free_bytes()]
    for size in sizes[:-3:-1]:
        record(size)
        free.append(free_bytes())
    costs = [max(before - after, 0) for before, after in itertools.pairwise(free)]
    return costs[0] + sum(costs[1:]) * (len(sizes) - 1)


def _graph_bytes(loaded: LoadedModel) -> int:
    """The same, but 0 if recording fails: the real recording will fail as well, and report that."""
    kv_cache = loaded.make_cache(num_blocks=1)
    graphs: list[DecodeGraphs] = []

    def record(size: int) -> None:
        if not graphs:
            graphs.append(make_decode_graphs(loaded, kv_cache, CudaGraphRecorder(loaded.device)))
        graphs[0].record(size)

    try:
        return bytes_of_graphs(
            graph_sizes(loaded.config.scheduler.max_num_seqs), record, lambda: free_memory_bytes(loaded.device)
        )
    except Exception:
        logger.debug("CUDA graphs could not be measured", exc_info=True)
        return 0


def peak_activation_bytes(loaded: LoadedModel) -> int:
    """Bytes that the largest step takes: max_num_batched_tokens as one long prompt, or as max_num_seqs short ones that
    are all sampled with filters."""
    config = loaded.config
    num_tokens, num_seqs = config.scheduler.max_num_batched_tokens, config.scheduler.max_num_seqs
    longest = max(1, min(loaded.max_model_len - 1, num_tokens))
    num_sampled = num_seqs * (1 + config.speculative.num_speculative_tokens)
    many = min(num_sampled, num_tokens)
    shapes = ((num_tokens // longest, longest), (many, max(1, min(longest, num_tokens // many))))
    return max(_measure(loaded, count, length) for count, length in shapes)


def _measure(loaded: LoadedModel, count: int, length: int) -> int:
    blocks_each, num_groups = -(-length // loaded.config.cache.block_size), len(loaded.layout.groups)
    block_ids = np.arange(num_groups * count * blocks_each).reshape(num_groups, count, blocks_each)
    runner = ModelRunner(
        model=loaded.model,
        kv_cache=loaded.make_cache(num_blocks=max(1, block_ids.size)),
        max_num_seqs=count,
        max_model_len=loaded.max_model_len,
        dtype=loaded.dtype,
        device=loaded.device,
        parallel=loaded.parallel,
        attention=loaded.attention,
        states=loaded.make_states(num_snapshots=0, num_slots=count),
    )
    requests = [
        NewRequest(
            slot=slot,
            request_id=f"profile-{slot}",
            prompt_token_ids=np.zeros(length, dtype=np.int64),
            sampling_params=SamplingParams(temperature=1.0, top_p=0.9, seed=0),
            block_ids=block_ids[0, slot] if num_groups else np.zeros(0, dtype=np.int64),
            group_block_ids=block_ids[1:, slot],
        )
        for slot in range(count)
    ]
    step = StepInput(
        new_requests=requests, num_seqs=count, slots=np.arange(count), num_scheduled_tokens=np.full(count, length)
    )
    device = loaded.device
    # Reserved, not allocated: what the allocator cannot use for gaps is gone for others as well.
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_reserved(device)
    runner.execute(step)
    torch.cuda.synchronize(device)
    return int(torch.cuda.max_memory_reserved(device)) - before
