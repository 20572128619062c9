"""Times of operations on a device, and figures against what the device can do at best."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

CALLS_A_GRAPH = 10


@dataclass
class Figures:
    """Rows of the table that is being measured."""

    device: torch.device
    rows: list[dict[str, Any]] = field(default_factory=list)
    copy_gb_per_s: float = 0.0
    """Read and written bytes a second of a large copy; 0: not measured."""
    matmul_tflops: float = 0.0

    def add(
        self,
        part: str,
        case: str,
        seconds: float,
        *,
        num_bytes: float = 0,
        num_flops: float = 0,
        busy_seconds: float | None = None,
    ) -> None:
        """One row: the time, for how much of it the device had nothing to do where that is known, what it moved and
        computed in that time, and which share of the best that is."""
        row: dict[str, Any] = {"part": part, "case": case, "us": round(seconds * 1e6, 1)}
        if busy_seconds is not None:
            row["idle_us"] = round((seconds - busy_seconds) * 1e6, 1)
            row["idle"] = round(1 - busy_seconds / seconds, 3)
        if num_bytes:
            row["gb_per_s"] = round(num_bytes / seconds / 1e9, 1)
            if self.copy_gb_per_s:
                row["of_copy"] = round(num_bytes / seconds / 1e9 / self.copy_gb_per_s, 3)
        if num_flops:
            row["tflops"] = round(num_flops / seconds / 1e12, 1)
            if self.matmul_tflops:
                row["of_matmul"] = round(num_flops / seconds / 1e12 / self.matmul_tflops, 3)
        self.rows.append(row)

    def time(self, run: Callable[[], object], *, rounds: int = 20, in_graph: bool = True) -> float:
        """Median seconds of a call; the first calls, which compile, do not count.

        On a GPU it is the device's time: calls are replayed from a CUDA graph, because most kernels here take less time
        than the host takes to launch them. A call that cannot be captured is timed with its launches, and so is every
        call without `in_graph`.
        """
        for _ in range(3):
            run()
        if self.device.type != "cuda":
            return statistics.median(_timed(run) for _ in range(rounds))
        num_calls = 1
        if in_graph and (graph := _captured(run, CALLS_A_GRAPH)):
            run, num_calls = graph.replay, CALLS_A_GRAPH
            run()
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(rounds)]
        for begin, end in events:
            begin.record()
            run()
            end.record()
        torch.cuda.synchronize()
        return statistics.median(begin.elapsed_time(end) / 1e3 / num_calls for begin, end in events)


def _captured(run: Callable[[], object], num_calls: int) -> torch.cuda.CUDAGraph | None:
    """A graph of so many calls; None if a call waits for the device, which a graph cannot."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            for _ in range(num_calls):
                run()
    except RuntimeError:
        torch.cuda.synchronize()
        return None
    return graph


def _timed(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started
