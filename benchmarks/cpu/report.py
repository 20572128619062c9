"""The tables of a comparison, in Markdown. Knows figures; starts and measures nothing."""

from collections.abc import Callable, Iterator, Mapping, Sequence

from benchmarks.cpu.goals import OURS, Goal, read_fraction
from benchmarks.cpu.results import Results
from benchmarks.cpu.shapes import BF16, Roofline, Shape, WeightBytes
from benchmarks.cpu.workloads import Workload


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns are as wide as what is in them."""
    widths = [max(len(row[place]) for row in (heads, *rows)) for place in range(len(heads))]
    lines = [heads, ["-" * width for width in widths], *rows]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    )


def report(
    results: Results,
    shape: Shape,
    workloads: Mapping[str, Workload],
    roofline: Roofline,
    goals: Sequence[Goal],
    weight_bytes: Mapping[str, WeightBytes],
) -> str:
    """Everything about one shape: times, ratios, fractions of the roofline, goals, and what could not be measured."""
    parts = [f"## {shape.name}: {shape.architecture}, {shape.num_params / 1e6:.0f} M weights in bf16"]
    parts.append("Medians; lower is better, but for tok/s.\n\n" + times(results))
    parts.append(f"Times as long as {OURS} takes (above 1: {OURS} is faster).\n\n" + ratios(results))
    parts.append(
        "Fraction of the roofline: least time by bytes and operations, divided by the time taken; W1 also as bytes "
        "read in the median gap by the read limit.\n\n" + fractions(results, shape, workloads, roofline, weight_bytes)
    )
    if goals:
        parts.append("Goals.\n\n" + demands(goals))
    if results.failures:
        lines = [f"- {engine}, {workload}: {why}" for (workload, engine), why in results.failures.items()]
        parts.append("Not measured.\n\n" + "\n".join(lines))
    return "\n\n".join(parts) + "\n"


def _rows(results: Results, cell: Callable[[str, str], str]) -> Iterator[list[str]]:
    for engine in results.engines():
        yield [engine, *(cell(workload, engine) for workload in results.workloads())]


def times(results: Results) -> str:
    """One row an engine: seconds, and what else the workload has."""

    def cell(workload: str, engine: str) -> str:
        seconds = results.median(workload, engine)
        if seconds is None:
            return "-"
        text, gap = f"{seconds:.3g} s", results.median(workload, engine, "gap_s")
        rate, ttft = results.median(workload, engine, "output_tok_s"), results.median(workload, engine, "ttft_s")
        if rate is not None and ttft is not None:
            text += f", {rate:.0f} tok/s, TTFT {ttft:.2f} s"
        elif gap:
            text += f", gap {1000 * gap:.2f} ms"
        spread = results.spread(workload, engine)
        return text + (f" (±{50 * (spread - 1):.0f} %)" if spread and spread > 1.1 else "")

    return table(["engine", *results.workloads()], list(_rows(results, cell)))


def ratios(results: Results) -> str:
    """One row an engine: its time by ours."""

    def cell(workload: str, engine: str) -> str:
        ratio = results.ratio(workload, engine, OURS)
        return "-" if ratio is None else f"{ratio:.2f}"

    return table(["engine", *results.workloads()], list(_rows(results, cell)))


def fractions(
    results: Results,
    shape: Shape,
    workloads: Mapping[str, Workload],
    roofline: Roofline,
    weight_bytes: Mapping[str, WeightBytes],
) -> str:
    """One row an engine: how near it comes to the least time."""

    def cell(workload: str, engine: str) -> str:
        seconds, gap = results.median(workload, engine), results.median(workload, engine, "gap_s")
        if seconds is None:
            return "-"
        size = weight_bytes.get(engine, BF16)
        text = f"{roofline.workload_s(shape, workloads[workload], weight_bytes=size) / seconds:.2f}"
        if gap:
            text += f", read {read_fraction(shape, workloads[workload], roofline, gap, size):.2f}"
        return text

    return table(["engine", *results.workloads()], list(_rows(results, cell)))


def demands(goals: Sequence[Goal]) -> str:
    """One row a goal."""
    rows = [
        [
            goal.text,
            f"{goal.value:.2f}",
            f"{'<=' if goal.is_at_most else '>='} {goal.bound}",
            "met" if goal.is_met else "NOT met",
        ]
        for goal in goals
    ]
    return table(["goal", "value", "bound", ""], rows)
