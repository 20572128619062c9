"""From timed requests to the figures that users of vLLM's serving benchmark know, as JSON and as a table."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pagoda.bench.load import RequestResult

WIDTH = 50
NAMES = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}
"""Headings by the name in --percentile-metrics."""
DETAILS = ("input_lens", "output_lens", "start_times", "ttfts", "itls", "generated_texts", "errors")
"""Keys of a report that have an entry a request."""


@dataclass(frozen=True, slots=True)
class Statistics:
    """Statistics of one metric over all requests, in milliseconds."""

    mean: float
    median: float
    std: float
    percentiles: dict[float, float]

    @classmethod
    def of(cls, values_s: Sequence[float], percentiles: Sequence[float]) -> "Statistics":
        """`values_s` are seconds; without any, everything is 0."""
        values = np.asarray(values_s if values_s else [0.0], dtype=np.float64) * 1000
        ranks = {p: float(np.percentile(values, p)) for p in percentiles}
        return cls(float(values.mean()), float(np.median(values)), float(values.std()), ranks)


def report(
    results: Sequence[RequestResult],
    *,
    duration_s: float,
    percentiles: Sequence[float],
    goodput_ms: dict[str, float] | None = None,
) -> dict[str, Any]:
    """All figures, under vLLM's names.

    Args:
        percentiles: in percent.
        goodput_ms: bounds by metric; a request that meets them all is good.
    """
    done = [result for result in results if result.is_success]
    num_input = sum(result.prompt_len for result in done)
    num_output = sum(result.output_len for result in done)
    duration_s = max(duration_s, 1e-9)
    figures: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(done),
        "failed": len(results) - len(done),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(done) / duration_s,
        "request_goodput": sum(is_good(r, goodput_ms) for r in done) / duration_s if goodput_ms else None,
        "output_throughput": num_output / duration_s,
        "total_token_throughput": (num_input + num_output) / duration_s,
        "max_output_tokens_per_s": peak_tokens_per_s(done),
        "max_concurrent_requests": peak_concurrency(done),
        "input_lens": [result.prompt_len for result in results],
        "output_lens": [result.output_len if result.is_success else 0 for result in results],
        "start_times": [result.start_s for result in results],
        "ttfts": [result.ttft_s for result in results],
        "itls": [result.itl_s for result in results],
        "generated_texts": [result.text for result in results],
        "errors": [result.error for result in results],
    }
    for name, values_s in values_by_metric(done).items():
        statistics = Statistics.of(values_s, percentiles)
        figures |= {f"mean_{name}_ms": statistics.mean, f"median_{name}_ms": statistics.median}
        figures[f"std_{name}_ms"] = statistics.std
        figures |= {f"p{p:g}_{name}_ms": value for p, value in statistics.percentiles.items()}
    return figures


def values_by_metric(done: Sequence[RequestResult]) -> dict[str, list[float]]:
    """Seconds of each metric."""
    return {
        "ttft": [result.ttft_s for result in done],
        "tpot": [result.tpot_s for result in done if result.tpot_s is not None],
        "itl": [value for result in done for value in result.itl_s],
        "e2el": [result.latency_s for result in done],
    }


def is_good(result: RequestResult, goodput_ms: dict[str, float]) -> bool:
    """Whether a request stays within every bound."""
    values = {"ttft": result.ttft_s, "tpot": result.tpot_s or 0.0, "e2el": result.latency_s}
    return all(values[name] * 1000 <= bound for name, bound in goodput_ms.items())


def peak_tokens_per_s(done: Sequence[RequestResult]) -> float:
    """Most events with tokens in one second of the run."""
    seconds: dict[int, int] = {}
    for result in done:
        at_s = result.start_s + result.ttft_s
        for gap_s in (0.0, *result.itl_s):
            at_s += gap_s
            seconds[int(at_s)] = seconds.get(int(at_s), 0) + 1
    return float(max(seconds.values(), default=0))


def peak_concurrency(done: Sequence[RequestResult]) -> int:
    """Most requests under way at a time."""
    changes = sorted([(r.start_s, 1) for r in done] + [(r.end_s, -1) for r in done])
    most = now = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most


def table(
    figures: dict[str, Any],
    *,
    metrics: Sequence[str],
    percentiles: Sequence[float],
    max_concurrency: int | None = None,
    request_rate: float = float("inf"),
) -> str:
    """The report for people; `metrics` are keys of NAMES."""
    rows: list[tuple[str, Any]] = [
        ("Successful requests:", figures["completed"]),
        ("Failed requests:", figures["failed"]),
    ]
    if max_concurrency is not None:
        rows.append(("Maximum request concurrency:", max_concurrency))
    if request_rate != float("inf"):
        rows.append(("Request rate configured (RPS):", request_rate))
    rows += [
        ("Benchmark duration (s):", figures["duration"]),
        ("Total input tokens:", figures["total_input_tokens"]),
        ("Total generated tokens:", figures["total_output_tokens"]),
        ("Request throughput (req/s):", figures["request_throughput"]),
    ]
    if figures["request_goodput"] is not None:
        rows.append(("Request goodput (req/s):", figures["request_goodput"]))
    rows += [
        ("Output token throughput (tok/s):", figures["output_throughput"]),
        ("Peak output token throughput (tok/s):", figures["max_output_tokens_per_s"]),
        ("Peak concurrent requests:", float(figures["max_concurrent_requests"])),
        ("Total token throughput (tok/s):", figures["total_token_throughput"]),
    ]
    lines = [" Serving Benchmark Result ".center(WIDTH, "="), *(_row(*row) for row in rows)]
    for name in (name for name in NAMES if name in metrics):
        lines.append(NAMES[name].center(WIDTH, "-"))
        for statistic in ("mean", "median", *(f"p{p:g}" for p in percentiles)):
            label = f"{statistic.capitalize()} {name.upper()} (ms):"
            lines.append(_row(label, figures[f"{statistic}_{name}_ms"]))
    return "\n".join([*lines, "=" * WIDTH])


def _row(label: str, value: Any) -> str:
    return f"{label:<40} {value:<10.2f}" if isinstance(value, float) else f"{label:<40} {value:<10}"
