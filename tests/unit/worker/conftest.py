"""Workers that tests of overlapping steps share."""

import pytest

from pagoda_worker.worker import Worker
from tests.unit.worker.steps.overlap import empty_cache, make_worker


@pytest.fixture(scope="module")
def overlap_workers() -> tuple[Worker, Worker]:
    return make_worker(overlaps=False), make_worker(overlaps=True)


@pytest.fixture
def one_by_one(overlap_workers: tuple[Worker, Worker]) -> Worker:
    worker, _ = overlap_workers
    empty_cache(worker)
    return worker


@pytest.fixture
def ahead(overlap_workers: tuple[Worker, Worker]) -> Worker:
    _, worker = overlap_workers
    empty_cache(worker)
    return worker
