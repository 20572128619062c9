"""The log's lines of statistics: what they say, and when there are none."""

import asyncio
import contextlib
import logging
from dataclasses import replace

import pytest

from pagoda_frontend.observability.statistics import Totals, line, log_statistics

IDLE = Totals(
    num_prompt_tokens=0,
    num_generation_tokens=0,
    num_running_reqs=0,
    num_waiting_reqs=0,
    kv_cache_usage=0.0,
    prefix_cache_queries=0,
    prefix_cache_hits=0,
)
BUSY = replace(
    IDLE,
    num_prompt_tokens=500,
    num_generation_tokens=1000,
    num_running_reqs=3,
    num_waiting_reqs=2,
    kv_cache_usage=0.125,
    prefix_cache_queries=500,
    prefix_cache_hits=200,
)


def test_a_line_has_rates_of_the_time_and_figures_of_now() -> None:
    assert line(BUSY, IDLE, elapsed_s=10.0) == (
        "prompt throughput: 50.0 tokens/s, generation throughput: 100.0 tokens/s, running: 3 reqs, waiting: 2 reqs, "
        "KV cache usage: 12.5%, prefix cache hit rate: 40.0%"
    )


def test_counters_of_a_new_scheduler_give_no_negative_rate() -> None:
    assert "prefix cache hit rate: 0.0%" in line(IDLE, BUSY, elapsed_s=1.0)
    assert "prompt throughput: 0.0" in line(IDLE, BUSY, elapsed_s=1.0)


async def test_there_are_lines_while_there_is_load_and_one_after_it(caplog: pytest.LogCaptureFixture) -> None:
    done = replace(BUSY, num_running_reqs=0, num_waiting_reqs=0)
    moments = [IDLE, IDLE, BUSY, done, done, done, done]
    is_over = asyncio.Event()

    def totals() -> Totals:
        if len(moments) == 1:
            is_over.set()
            return moments[0]
        return moments.pop(0)

    caplog.set_level(logging.INFO)
    task = asyncio.create_task(log_statistics(totals, period_s=0.0))
    await is_over.wait()
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    lines = [record.getMessage() for record in caplog.records]
    assert ["running: 3" in text for text in lines] == [True, False]
