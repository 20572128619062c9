"""Prometheus histograms with cheap updates, for events in every step or with every token."""

import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class HistogramSeries:
    """The values of one set of labels."""

    __slots__ = ("_bounds", "_counts", "_created_s", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        """By bucket, the last one unbounded; each with its own values alone."""
        self._sum = 0.0
        self._created_s = time.time()

    def observe(self, value: float) -> None:
        """Count a value. Called on one thread; a scrape on another one may find it counted and not in the sum yet."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    @property
    def bounds(self) -> Sequence[float]:
        """Upper bounds of the buckets, without the last one's."""
        return self._bounds

    @property
    def counts(self) -> list[int]:
        """By bucket, each with its own values alone; the last one is unbounded."""
        return self._counts.copy()

    def add_to(self, family: HistogramMetricFamily, labels: dict[str, str], *, has_created: bool) -> None:
        """Put buckets, count, sum and, with `has_created`, the time of creation into `family`."""
        buckets, num_values = [], 0
        for bound, count in zip((*self._bounds, float("inf")), self._counts.copy(), strict=True):
            num_values += count
            buckets.append((floatToGoString(bound), num_values))  # type: ignore[no-untyped-call]  # the library's own
        family.add_metric(tuple(labels.values()), buckets, self._sum)
        if has_created:
            family.add_sample(f"{family.name}_created", labels, self._created_s)


def quantile(bounds: Sequence[float], counts: Sequence[int], share: float) -> float | None:
    """The value that `share` of all values are below, linear within a bucket; None: there are none.

    Args:
        bounds: upper bounds of all buckets but the last one, for which the last bound is given.
        counts: values of each bucket alone.
    """
    wanted, below, low = sum(counts) * share, 0, 0.0
    if not wanted > 0:
        return None
    for bound, count in zip(bounds, counts, strict=False):
        if below + count >= wanted:
            return low + (bound - low) * (wanted - below) / count
        below, low = below + count, bound
    return low


class LeanHistogram(Collector):
    """Shows what prometheus_client's Histogram does, and takes a value for a quarter of its cost.

    That one takes a lock for the sum and another one for the bucket, as values may come from any thread, and looks the
    bucket up one by one.
    """

    def __init__(
        self,
        name: str,
        text: str,
        label_names: Sequence[str] = (),
        *,
        buckets: Sequence[float],
        registry: CollectorRegistry,
    ) -> None:
        """`buckets`: their upper bounds, rising, without +Inf; a value on a bound is in its bucket."""
        self._name = name
        self._text = text
        self._label_names = tuple(label_names)
        self._bounds = tuple(map(float, buckets))
        self._series: dict[tuple[str, ...], HistogramSeries] = {}
        registry.register(self)

    def labels(self, *values: str) -> HistogramSeries:
        """The series with these values, in the order of the names."""
        return self._series.setdefault(values, HistogramSeries(self._bounds))

    def describe(self) -> list[Metric]:
        """Its name, for the registry."""
        return [HistogramMetricFamily(self._name, self._text, labels=self._label_names)]

    def collect(self) -> Iterator[Metric]:
        """Called for every scrape, on whatever thread."""
        family = HistogramMetricFamily(self._name, self._text, labels=self._label_names)
        has_created = _shows_created()
        for values, series in self._series.copy().items():
            series.add_to(family, dict(zip(self._label_names, values, strict=True)), has_created=has_created)
        yield family


def _shows_created() -> bool:
    """Whether prometheus_client's own histograms tell their time of creation, which users can turn off."""
    (empty,) = Histogram("empty", "", registry=None).collect()
    return any(sample.name.endswith("_created") for sample in empty.samples)
