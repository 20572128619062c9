"""Jobs in processes: one that breaks its process ends alone, and another caller's does not wait for it."""

import asyncio
import contextvars
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest

from pagoda_common.errors import NotReady
from pagoda_frontend.budget.caller import caller
from pagoda_frontend.budget.helpers import HelperPool, JobFailed

PROGRAM = """
import os, sys, time
from pagoda_common.process.job_limits import limit_cpu, limit_memory
limit_memory(256 << 20)
print("ready", flush=True)
for line in sys.stdin:
    word = line.split()[0]
    with limit_cpu(0.2):
        if word == "spin":
            while True: pass
        if word == "grow":
            try:
                kept = bytearray(1 << 30)
            except MemoryError:
                word = "full"
        if word == "die":
            os._exit(3)
        if word == "hang":
            time.sleep(3600)
    print(word, os.getpid(), flush=True)
"""


@pytest.fixture
async def pool() -> AsyncIterator[HelperPool]:
    pool = HelperPool([sys.executable, "-c", PROGRAM], what="jobs", max_job_s=240)
    yield pool
    await pool.close()


def ask_as(pool: HelperPool, name: str, line: bytes) -> "asyncio.Task[bytes]":
    context = contextvars.copy_context()
    context.run(caller.set, name)
    return asyncio.create_task(pool.ask(line), context=context)


async def test_jobs_are_answered_by_a_process_that_stays(pool: HelperPool) -> None:
    answers = [await pool.ask(b"hello") for _ in range(3)]
    assert answers[0].startswith(b"hello ")
    assert len(set(answers)) == 1, "one process"


@pytest.mark.parametrize("job", [b"spin", b"die"])
async def test_a_job_that_ends_its_process_is_the_only_one_that_fails(pool: HelperPool, job: bytes) -> None:
    before = await pool.ask(b"hello")
    with pytest.raises(JobFailed):
        await pool.ask(job)
    after = await pool.ask(b"hello")
    assert after.startswith(b"hello ")
    assert after != before, "another process"


async def test_a_job_that_takes_no_processor_time_has_a_limit_on_the_clock(pool: HelperPool) -> None:
    await pool.ask(b"hello")
    pool.max_job_s = 0.2
    with pytest.raises(JobFailed):
        await pool.ask(b"hang")


async def test_memory_is_bounded(pool: HelperPool) -> None:
    assert (await pool.ask(b"grow")).startswith(b"full ")


async def test_another_callers_job_does_not_wait_for_heavy_ones(pool: HelperPool) -> None:
    heavy = [ask_as(pool, "a", b"hang " + b"x" * 5000) for _ in range(12)]
    await ask_as(pool, "b", b"hello " + b"x" * 5000)
    await ask_as(pool, "a", b"hello"), "and a small one of the same caller's takes the free place"
    assert not any(task.done() for task in heavy)
    for task in heavy:
        task.cancel()


async def test_closing_ends_what_runs() -> None:
    pool = HelperPool([sys.executable, "-c", PROGRAM], what="jobs", max_job_s=240)
    await pool.ask(b"hello")
    task: Any = asyncio.create_task(pool.ask(b"hang"))
    await asyncio.sleep(0.1)
    await pool.close()
    with pytest.raises(NotReady):
        await task
    with pytest.raises(NotReady):
        await pool.ask(b"hello")


async def test_a_process_that_does_not_start_is_no_fault_of_the_job() -> None:
    pool = HelperPool(["/bin/false"], what="jobs", max_job_s=240)
    with pytest.raises(NotReady, match="cannot start the process for jobs"):
        await pool.ask(b"hello")
    await pool.close()
