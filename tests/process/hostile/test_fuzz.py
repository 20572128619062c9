"""A short run of the fuzzer; `python -m tests.process.fuzz` is the long one."""

from collections.abc import Iterator

import pytest

from tests.process.fuzz import fuzz
from tests.process.hostile.fuzz_cases import FLAGS, make_case
from tests.process.stack import Stack

NUM_REQUESTS = 1500
SEED = 20


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    stack = Stack("--disable-uvicorn-access-log", *FLAGS)
    try:
        stack.wait_ready()
        yield stack
    finally:
        stack.end()


async def test_damaged_requests_are_refused_and_nothing_else_happens(stack: Stack) -> None:
    report = await fuzz(stack, num_requests=NUM_REQUESTS, seed=SEED)
    assert not report.violations, "\n".join(report.violations[:20])
    assert sum(report.counts.values()) == NUM_REQUESTS
    # The run must have tried something: answers, refusals of both kinds, broken sockets.
    assert report.counts["200"] > NUM_REQUESTS // 10, report.counts
    assert report.counts["400"] > NUM_REQUESTS // 10, report.counts
    assert report.counts["gRPC OK"] > 0
    assert report.counts["gRPC INVALID_ARGUMENT"] > 0
    assert "Traceback" not in stack.log
    print(report.counts, report.growth)


def test_a_case_depends_on_seed_and_number_alone() -> None:
    assert make_case(1, 5) == make_case(1, 5)
    assert len({make_case(1, number).content for number in range(100)}) > 80
