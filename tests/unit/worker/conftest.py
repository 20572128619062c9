"""Workers that tests of overlapping steps share, and collections of garbage that leave out what is imported."""

import gc

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


@pytest.fixture(autouse=True)
def imports_stay_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that gives up a model thaws all objects; with half a million of them, each collection takes 0.2 s."""
    monkeypatch.setattr(gc, "unfreeze", lambda: None)
