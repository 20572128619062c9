"""CUDA graphs of decode steps: the recorder, the conditions on models, and the memory that they take."""

import logging
from collections.abc import Callable

import torch

from pagoda_kernels.attention.paged_attention import MAX_TRITON_HEAD_DIM
from pagoda_kernels.selection import triton_kernel
from pagoda_worker.graphs.decode_buffers import DecodeBuffers
from pagoda_worker.graphs.decode_graphs import DecodeGraphs, Graph, GraphRecorder, graph_sizes
from pagoda_worker.loader.loaded_model import LoadedModel
from pagoda_worker.memory.device import free_memory_bytes
from pagoda_worker.memory.kv_cache import KVCache
from pagoda_worker.memory.transfers import new_stream

logger = logging.getLogger(__name__)


class CudaGraphRecorder:
    """CUDA graphs that share one memory pool: only one of them runs at a time, and keeps nothing for the next."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = new_stream(device)

    def record(self, run: Callable[[], None]) -> Graph:
        """See GraphRecorder. Raises what a launch or the recording raises; the current stream is restored."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            run()  # kernels are compiled and loaded, and libraries take their workspaces, before anything is recorded
        current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may allocate meanwhile (weights that are prepared): thread_local leaves them alone.
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                run()
        finally:
            torch.cuda.set_stream(current)  # a recording that fails at its end would leave its own stream behind
        return graph


def why_eager(loaded: LoadedModel) -> str | None:
    """The reason why a model on a CUDA device cannot have graphs; None if there is none."""
    if loaded.config.model.enforce_eager:
        return "--enforce-eager"
    if len(loaded.layout.groups) != 1 or loaded.layout.recurrent:
        return "its layers keep different things of a sequence, and graphs know one block table"
    if any(layer.chunk is not None and layer.chunk < loaded.max_model_len for layer in loaded.model.attention_layers):
        return "the host works out which chunk a query sees"
    return what_waits(loaded)


def what_waits(loaded: LoadedModel) -> str | None:
    """The part of a model's decode step on a CUDA device that waits for the device or for other ranks; None if nothing
    does."""
    if loaded.parallel.world_size > 1:
        return "its ranks sum over NCCL"
    if loaded.model.what_waits is not None:
        return loaded.model.what_waits
    layers = loaded.model.attention_layers
    head_dim = max((layer.head_dim for layer in layers if not layer.latent_rank), default=0)
    if head_dim > MAX_TRITON_HEAD_DIM:
        return f"attention with head_dim {head_dim} runs as PyTorch, with shapes of its own for each batch"
    probe = torch.empty(0, dtype=loaded.dtype, device=loaded.device)
    has_latents = any(layer.latent_rank for layer in layers)
    for operation in ("mla_attention", "store_kv_cache") if has_latents else ("paged_attention", "rope_store"):
        if triton_kernel(operation, probe) is None:
            return f"{operation} runs as plain PyTorch"
    return None


def make_decode_graphs(loaded: LoadedModel, kv_cache: KVCache, recorder: GraphRecorder) -> DecodeGraphs:
    """Graphs of all sizes with their buffers, not recorded yet."""
    sizes = graph_sizes(loaded.config.scheduler.max_num_seqs)
    buffers = DecodeBuffers(
        max_size=sizes[-1],
        max_model_len=loaded.max_model_len,
        block_size=kv_cache.block_size,
        vocab_size=loaded.model.vocab_size,
        dtype=loaded.dtype,
        device=loaded.device,
    )
    return DecodeGraphs(model=loaded.model, kv_cache=kv_cache, buffers=buffers, sizes=sizes, recorder=recorder)


def recorded_graphs(
    loaded: LoadedModel, kv_cache: KVCache, make_recorder: Callable[[torch.device], GraphRecorder] = CudaGraphRecorder
) -> DecodeGraphs | None:
    """Recorded graphs over the cache. None, with one log line, if there can be none or recording fails: then every step
    launches its kernels."""
    reason = why_eager(loaded)
    if reason is not None:
        logger.info("no CUDA graphs, every step launches its kernels: %s", reason)
        return None
    try:
        before = free_memory_bytes(loaded.device)
        graphs = make_decode_graphs(loaded, kv_cache, make_recorder(loaded.device))
        graphs.record_all()
        taken = before - free_memory_bytes(loaded.device)
        logger.info("CUDA graphs and what they read and write take %.2f GiB", taken / 2**30)
    except Exception as error:  # whatever it was: eagerly, the model may run all the same
        reason = str(error).partition("\n")[0]
        logger.warning("no CUDA graphs, every step launches its kernels: %s: %s", type(error).__name__, reason)
        return None
    return graphs
