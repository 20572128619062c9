"""Logs a line of statistics every ten seconds while there is load, as vLLM does. Knows counters, no requests."""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

logger = logging.getLogger(__name__)

PERIOD_S = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Totals:
    """Counters and gauges of one moment."""

    num_prompt_tokens: float
    """Prompt tokens of all requests that got a token."""
    num_generation_tokens: float
    num_running_reqs: int
    num_waiting_reqs: int
    kv_cache_usage: float
    """Share of the blocks that are in use."""
    prefix_cache_queries: int
    """Tokens that were looked up in the prefix cache."""
    prefix_cache_hits: int
    """Tokens that were found in the prefix cache."""

    def is_load_since(self, before: "Totals") -> bool:
        """Whether requests are open, or tokens have come."""
        return (
            self.num_running_reqs + self.num_waiting_reqs > 0
            or self.num_generation_tokens > before.num_generation_tokens
            or self.num_prompt_tokens > before.num_prompt_tokens
        )


def line(now: Totals, before: Totals, *, elapsed_s: float) -> str:
    """Figures of the `elapsed_s` seconds since `before`."""
    prompt = max(0.0, now.num_prompt_tokens - before.num_prompt_tokens) / elapsed_s
    generated = max(0.0, now.num_generation_tokens - before.num_generation_tokens) / elapsed_s
    queries = now.prefix_cache_queries - before.prefix_cache_queries
    hits = now.prefix_cache_hits - before.prefix_cache_hits
    rate = hits / queries if queries > 0 and hits >= 0 else 0.0  # another scheduler resets counters
    return (
        f"prompt throughput: {prompt:.1f} tokens/s, generation throughput: {generated:.1f} tokens/s, "
        f"running: {now.num_running_reqs} reqs, waiting: {now.num_waiting_reqs} reqs, "
        f"KV cache usage: {now.kv_cache_usage:.1%}, prefix cache hit rate: {rate:.1%}"
    )


async def log_statistics(totals: Callable[[], Totals], *, model: str = "", period_s: float = PERIOD_S) -> None:
    """Log a line each period with load, and one more after it has ended, until cancelled.

    Args:
        model: whose figures these are, where a frontend has several.
    """
    before, at, was_loaded = totals(), time.monotonic(), False
    while True:
        await asyncio.sleep(period_s)
        now, moment = totals(), time.monotonic()
        is_loaded = now.is_load_since(before)
        if is_loaded or was_loaded:
            logger.info("%s%s", f"{model}: " if model else "", line(now, before, elapsed_s=moment - at))
        before, at, was_loaded = now, moment, is_loaded
