"""DecodeGraphs: decode steps recorded once at a few padded sizes, and replayed with one launch. Knows the model and its
buffers; CUDA only through `GraphRecorder`."""

import bisect
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from pagoda_worker.graphs.decode_buffers import DecodeBuffers
from pagoda_worker.memory.kv_cache import KVCache
from pagoda_worker.models.forward_context import ForwardContext
from pagoda_worker.models.model import Model
from pagoda_worker.steps.input_batch import ForwardInputs

logger = logging.getLogger(__name__)

SMALLEST_SIZES = (1, 2, 4)
SIZE_STEP = 8
MAX_GRAPH_SIZE = 512
"""Maximum batch size: larger batches keep the device busy for longer than their launches take."""
PROGRESS_S = 2.0
"""Seconds between two log lines."""


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes to record, rising: 1, 2, 4, 8, 16, 24 and so on, and max_num_seqs itself unless it is too large.

    Source: the ladder of vLLM's cudagraph_capture_sizes.
    """
    largest = min(max_num_seqs, MAX_GRAPH_SIZE)
    ladder = (*SMALLEST_SIZES, *range(SIZE_STEP, largest + 1, SIZE_STEP))
    return sorted({size for size in ladder if size < largest} | {largest})


class Graph(Protocol):
    """Work that was recorded."""

    def replay(self) -> None:
        """Replay the work on the current stream, with the current content of its inputs."""


class GraphRecorder(Protocol):
    """Records graphs."""

    def record(self, run: Callable[[], None]) -> Graph:
        """A graph of what `run` launches. It is called at least once outside of the recording as well."""


class DecodeGraphs:
    """Replays steps in which every sequence computes one token, its last one, and handles no other steps.

    A graph has the model's forward pass and logits over `buffers`, with the bounds of the longest possible step: the
    number of keys of a sequence is read on the device.
    """

    def __init__(
        self,
        *,
        model: Model,
        kv_cache: KVCache,
        buffers: DecodeBuffers,
        sizes: Sequence[int],
        recorder: GraphRecorder,
    ) -> None:
        """`sizes`: ascending, the last one at most the size of the buffers."""
        self._model = model
        self._kv_cache = kv_cache
        self._buffers = buffers
        self._sizes = list(sizes)
        self._recorder = recorder
        self._graphs: dict[int, Graph] = {}

    @property
    def sizes(self) -> list[int]:
        """In ascending order."""
        return self._sizes

    @torch.inference_mode()
    def record(self, size: int) -> None:
        """Record one size; larger sizes first, so that smaller ones fit into their memory.

        The recorded step consists of padding: it reads and writes no cache.
        """
        self._graphs[size] = self._recorder.record(partial(self._forward, size))

    def record_all(self) -> None:
        """Record every size, and log the progress."""
        started = told = time.monotonic()
        for number, size in enumerate(reversed(self._sizes), start=1):
            self.record(size)
            now = time.monotonic()
            if now - told >= PROGRESS_S:
                told = now
                logger.info("CUDA graphs: %d of %d recorded", number, len(self._sizes))
        logger.info("%d CUDA graphs recorded in %.1f s", len(self._sizes), time.monotonic() - started)

    def size_for(self, inputs: ForwardInputs, num_logit_rows: int) -> int:
        """The size to replay for a step; 0 if not every sequence computes and samples one token, or there are too many
        sequences."""
        num_seqs = inputs.slots.size
        if not inputs.input_ids.size == num_logit_rows == num_seqs or not 0 < num_seqs <= self._sizes[-1]:
            return 0
        return self._sizes[bisect.bisect_left(self._sizes, num_seqs)]

    def load(self, inputs: ForwardInputs, size: int, token_ids: Tensor | None = None) -> None:
        """Load a step into the buffers, on the current stream.

        Args:
            token_ids: [num_seqs] int64 on the device, instead of those in the inputs.
        """
        self._buffers.fill(inputs, size)
        if token_ids is not None:
            self._buffers.input_ids[: token_ids.numel()].copy_(token_ids)

    def replay(self, size: int, num_seqs: int) -> Tensor:
        """[num_seqs, vocab_size] float32 logits of the step that was loaded; the next step overwrites them."""
        self._graphs[size].replay()
        return self._buffers.logits[:num_seqs]

    def _forward(self, size: int) -> None:
        buffers, cache = self._buffers, self._kv_cache
        positions = buffers.positions[:size]
        context = ForwardContext(
            plans=[buffers.plan(size)],
            slot_mappings=[buffers.slot_mapping[:size]],
            k_caches=cache.k_caches,
            v_caches=cache.v_caches,
            places=cache.layout.places,
            rotary=self._model.rotary(positions),
            has_skips=True,
        )
        hidden = self._model(buffers.input_ids[:size], positions, context)
        # Into one buffer for all sizes: otherwise each graph would keep logits of its own.
        buffers.logits[:size].copy_(self._model.compute_logits(hidden))
