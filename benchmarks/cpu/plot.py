"""One picture of a comparison: how many times as long as Pagoda each engine takes. PNG with matplotlib, else SVG."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from benchmarks.cpu.goals import OURS
from benchmarks.cpu.results import Results

COLORS = ("#1b6ca8", "#e07a1f", "#3c9d4e", "#b5382f", "#7b5ea7", "#8a6248", "#d16ba5", "#5f6b73", "#b3a125")
TITLE = f"Time by that of {OURS} (logarithmic; above 1: {OURS} is faster)"


def plot(of_shape: Mapping[str, Results], folder: Path) -> Path:
    """Write compare.png, or compare.svg where matplotlib is not installed; a group of bars a shape and workload."""
    groups = [
        (f"{shape} {workload}", {engine: results.ratio(workload, engine, OURS) for engine in results.engines()})
        for shape, results in of_shape.items()
        for workload in results.workloads()
    ]
    engines = list(dict.fromkeys(engine for _, bars in groups for engine in bars if engine != OURS))
    try:
        return _png(groups, engines, folder / "compare.png")
    except ImportError:
        path = folder / "compare.svg"
        path.write_text(svg(groups, engines))
        return path


def _png(groups: Sequence[tuple[str, Mapping[str, float | None]]], engines: Sequence[str], path: Path) -> Path:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    figure, axes = pyplot.subplots(figsize=(max(7.0, 1.6 * len(groups)), 4.5))
    width = 0.8 / max(1, len(engines))
    for place, engine in enumerate(engines):
        bars = [(at, bars.get(engine)) for at, (_, bars) in enumerate(groups)]
        shown = [(at + (place - (len(engines) - 1) / 2) * width, ratio) for at, ratio in bars if ratio]
        if shown:
            axes.bar(
                [at for at, _ in shown],
                [ratio - 1 for _, ratio in shown],
                width,
                bottom=1,
                label=engine,
                color=COLORS[place % len(COLORS)],
            )
    axes.axhline(1, color="black", linewidth=1)
    axes.set_yscale("log")
    axes.set_xticks(range(len(groups)), [name for name, _ in groups])
    axes.set_title(TITLE, fontsize=10)
    axes.yaxis.set_major_locator(ticker.MaxNLocator(8))
    axes.minorticks_off()
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    if engines and axes.patches:
        axes.legend(fontsize=8, ncols=2)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


def svg(groups: Sequence[tuple[str, Mapping[str, float | None]]], engines: Sequence[str]) -> str:
    """The same bars as SVG text."""
    ratios = [ratio for _, bars in groups for engine, ratio in bars.items() if ratio and engine != OURS] or [1.0]
    low, high = math.log(min(0.5, *ratios)), math.log(max(2.0, *ratios))
    bar, gap, height, top = 14, 24, 240, 40
    group_width = bar * len(engines) + gap

    def y(ratio: float) -> float:
        return top + height * (high - math.log(ratio)) / (high - low)

    marks = [f'<text x="8" y="20">{escape(TITLE)}</text>']
    for at, (name, bars) in enumerate(groups):
        left = 30 + at * group_width
        marks.append(f'<text x="{left}" y="{top + height + 18}">{escape(name)}</text>')
        for place, engine in enumerate(engines):
            ratio = bars.get(engine)
            if ratio:
                upper, lower = sorted((y(ratio), y(1)))
                marks.append(
                    f'<rect x="{left + place * bar}" y="{upper:.1f}" width="{bar - 2}" height="{lower - upper:.1f}" '
                    f'fill="{COLORS[place % len(COLORS)]}"><title>{escape(engine)}: {ratio:.2f}</title></rect>'
                )
    width = max(500, 40 + group_width * len(groups))
    marks.append(f'<line x1="20" x2="{width - 10}" y1="{y(1):.1f}" y2="{y(1):.1f}" stroke="black"/>')
    for place, engine in enumerate(engines):
        x, row = 30 + 150 * (place % 3), top + height + 40 + 18 * (place // 3)
        marks.append(f'<rect x="{x}" y="{row - 10}" width="10" height="10" fill="{COLORS[place % len(COLORS)]}"/>')
        marks.append(f'<text x="{x + 16}" y="{row}">{escape(engine)}</text>')
    total = top + height + 60 + 18 * (len(engines) // 3)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{total}" font-family="sans-serif" '
        f'font-size="12">\n' + "\n".join(marks) + "\n</svg>\n"
    )
