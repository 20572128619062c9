"""Figures of the last 15 minutes, kept in memory, so that a reloaded page can show them.

Knows counters, no requests.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pagoda_common.metrics.lean_histogram import quantile
from pagoda_frontend.observability.statistics import Totals

PERIOD_S = 5.0
NUM_POINTS = 180
SHARES = (0.5, 0.95, 0.99)
"""Quantiles of latencies: p50, p95, p99."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Latencies:
    """A histogram's counts at one moment."""

    bounds: Sequence[float]
    """Upper bounds of the buckets, seconds, without the last one's."""
    counts: Sequence[int]
    """Counts by bucket (not cumulative); one more than bounds."""

    def quantiles_since(self, before: "Latencies | None") -> list[float | None]:
        """The quantiles SHARES of the observations since `before`; None for each if there were none."""
        counts = self.counts
        if before is not None and len(before.counts) == len(counts):
            counts = [now - then for now, then in zip(counts, before.counts, strict=True)]
        return [quantile(self.bounds, counts, share) for share in SHARES]


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """All figures of one point."""

    totals: Totals
    first_token: Latencies
    next_token: Latencies


class History:
    """A ring of points, one each PERIOD_S."""

    def __init__(self) -> None:
        self._points: deque[dict[str, float | None]] = deque(maxlen=NUM_POINTS)

    def add(self, now: Moment, before: Moment, *, elapsed_s: float, unix_s: float) -> None:
        """Figures of the `elapsed_s` seconds from `before` to `now`."""
        totals, earlier = now.totals, before.totals
        first = now.first_token.quantiles_since(before.first_token)
        following = now.next_token.quantiles_since(before.next_token)
        generated = max(0.0, totals.num_generation_tokens - earlier.num_generation_tokens)
        prompts = max(0.0, totals.num_prompt_tokens - earlier.num_prompt_tokens)
        point: dict[str, float | None] = {
            "time": round(unix_s, 1),
            "generated": round(generated / elapsed_s, 1),
            "prompts": round(prompts / elapsed_s, 1),
            "running": totals.num_running_reqs,
            "waiting": totals.num_waiting_reqs,
            "kv": round(totals.kv_cache_usage, 4),
        }
        for name, values in (("first_token", first), ("next_token", following)):
            for share, value in zip(SHARES, values, strict=True):
                point[f"{name}_p{share * 100:.0f}"] = value
        self._points.append(point)

    def columns(self) -> dict[str, list[float | None]]:
        """By figure, the oldest point first: time in Unix seconds, tokens per second, latencies in seconds."""
        names = list(self._points[0]) if self._points else []
        return {name: [point[name] for point in self._points] for name in names}

    async def keep(self, moment: Callable[[], Moment], *, period_s: float = PERIOD_S) -> None:
        """Add a point each period, until cancelled."""
        before, at = moment(), time.monotonic()
        while True:
            await asyncio.sleep(period_s)
            now, then = moment(), time.monotonic()
            self.add(now, before, elapsed_s=then - at, unix_s=time.time())
            before, at = now, then
