"""Samples of every figure, their medians and what follows from them. Knows no engine and starts nothing."""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

UNITS = {"seconds": "s", "gap_s": "s", "ttft_s": "s", "output_tok_s": "tok/s"}


@dataclass
class Results:
    """What was measured of one shape."""

    samples: dict[tuple[str, str, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    """By workload, engine and figure (a key of UNITS), one a round."""
    failures: dict[tuple[str, str], str] = field(default_factory=dict)
    """By workload and engine: why there is no figure."""

    def add(self, workload: str, engine: str, figures: dict[str, float]) -> None:
        """Keep the figures of one round."""
        for name, value in figures.items():
            self.samples[workload, engine, name].append(value)

    def median(self, workload: str, engine: str, figure: str = "seconds") -> float | None:
        """Median over the rounds; None where nothing was measured."""
        values = self.samples.get((workload, engine, figure))
        return statistics.median(values) if values else None

    def spread(self, workload: str, engine: str) -> float | None:
        """Longest by shortest time over the rounds."""
        values = self.samples.get((workload, engine, "seconds"))
        return max(values) / min(values) if values else None

    def engines(self) -> list[str]:
        """Those with at least one figure, in the order they came."""
        return list(dict.fromkeys(engine for _, engine, _ in self.samples))

    def workloads(self) -> list[str]:
        """Those with at least one figure, by name."""
        return sorted({workload for workload, _, _ in self.samples})

    def ratio(self, workload: str, engine: str, to: str) -> float | None:
        """How many times as long as `to` an engine takes; None where either was not measured.

        The median of the rounds' ratios, where both were measured in all of them: what the machine does from one minute
        to the next changes both.
        """
        mine, theirs = (self.samples.get((workload, name, "seconds"), []) for name in (engine, to))
        if not mine or not theirs:
            return None
        if len(mine) != len(theirs):
            return statistics.median(mine) / statistics.median(theirs)
        return statistics.median(a / b for a, b in zip(mine, theirs, strict=True))

    def best(self, workload: str, engines: Iterable[str]) -> str | None:
        """The fastest of `engines`; None where none was measured."""
        times = {engine: self.median(workload, engine) for engine in engines}
        measured = {engine: seconds for engine, seconds in times.items() if seconds is not None}
        return min(measured, key=measured.__getitem__) if measured else None

    def figures(self) -> Iterator[tuple[str, float, str, int]]:
        """Name, median, unit and number of samples of every figure."""
        for (workload, engine, name), values in self.samples.items():
            yield f"{workload}_{engine}_{name}", statistics.median(values), UNITS[name], len(values)
