"""A scrape of Prometheus metrics, and what two of them say about the time between them. Knows no terminal."""

import math
from collections import defaultdict
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

Labels = dict[str, str]


@dataclass(frozen=True, slots=True)
class Sample:
    """A server's metrics at one time."""

    at_s: float
    """Time of a monotonic clock."""
    series: dict[str, list[tuple[Labels, float]]]
    """Labels and value of each series, by the name of the metric."""

    @classmethod
    def parse(cls, text: str, *, at_s: float) -> "Sample":
        """From Prometheus' text format.

        Raises:
            ValueError: it is none.
        """
        series: dict[str, list[tuple[Labels, float]]] = defaultdict(list)
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                series[sample.name].append((sample.labels, sample.value))
        return cls(at_s, dict(series))

    def total(self, name: str, **labels: str) -> float | None:
        """Sum over the series that have `labels`; None where there is none."""
        found = [value for known, value in self.series.get(name, ()) if labels.items() <= known.items()]
        return sum(found) if found else None

    def most(self, name: str) -> float | None:
        """The largest value of its series, for shares, which have no sum; None where there is none."""
        return max((value for _, value in self.series.get(name, ())), default=None)

    def labels(self, name: str, label: str) -> list[str]:
        """The values of `label` in all series, each once."""
        return list(dict.fromkeys(labels.get(label, "") for labels, _ in self.series.get(name, ())))

    def label(self, name: str, label: str) -> str:
        """`label` of the first series; empty where there is none."""
        return next((labels.get(label, "") for labels, _ in self.series.get(name, ())), "")

    def buckets(self, name: str) -> list[tuple[float, float]]:
        """(upper bound, count so far) of a histogram, all its series together."""
        sums: dict[float, float] = defaultdict(float)
        for labels, value in self.series.get(f"{name}_bucket", ()):
            sums[float(labels["le"])] += value
        return sorted(sums.items())


def growth(before: Sample, now: Sample, name: str, **labels: str) -> float | None:
    """How much a counter grew; its value, if it was reset in between. None if it is missing."""
    end = now.total(name, **labels)
    if end is None:
        return None
    start = before.total(name, **labels) or 0.0
    return end - start if end >= start else end


def rate(before: Sample, now: Sample, name: str, **labels: str) -> float | None:
    """The same a second."""
    grown = growth(before, now, name, **labels)
    return None if grown is None or now.at_s <= before.at_s else grown / (now.at_s - before.at_s)


def quantile(before: Sample, now: Sample, name: str, share: float) -> float | None:
    """Quantile of what a histogram observed in between, linear within a bucket; None without observations."""
    start, end = dict(before.buckets(name)), now.buckets(name)
    if not end:
        return None
    is_anew = start.get(math.inf, 0.0) > end[-1][1]
    counts = [count - (0.0 if is_anew else start.get(bound, 0.0)) for bound, count in end]
    if not counts[-1]:
        return None
    wanted = counts[-1] * share
    place = next(index for index, count in enumerate(counts) if count >= wanted)
    low, below = (end[place - 1][0], counts[place - 1]) if place else (0.0, 0.0)
    high = end[place][0]
    return low if math.isinf(high) else low + (high - low) * (wanted - below) / (counts[place] - below)
