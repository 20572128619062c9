"""How many threads a worker takes, and how they wait."""

import os
from pathlib import Path

import pytest

from pagoda_worker.threads import SINGLE_THREAD_PARAMETERS, default_num_threads, num_usable_cores, set_wait_policy


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Four cores with two threads each: 0 and 4, 1 and 5, … This process may use six of the CPUs, on four cores."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3, 4, 5})
    for cpu in range(8):
        path = tmp_path / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        path.parent.mkdir(parents=True)
        path.write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    (tmp_path / "fs/cgroup/cpu").mkdir(parents=True)
    return tmp_path


def test_the_threads_of_one_core_count_once(root: Path) -> None:
    assert num_usable_cores(root) == 4


@pytest.mark.parametrize(("limit", "expected"), [("max 100000", 4), ("250000 100000", 2), ("50000 100000", 1)])
def test_a_control_group_limits_them(root: Path, limit: str, expected: int) -> None:
    (root / "fs/cgroup/cpu.max").write_text(f"{limit}\n")
    assert num_usable_cores(root) == expected


@pytest.mark.parametrize(("quota", "expected"), [("-1", 4), ("300000", 3)])
def test_so_does_one_of_the_first_version(root: Path, quota: str, expected: int) -> None:
    (root / "fs/cgroup/cpu/cpu.cfs_quota_us").write_text(quota)
    (root / "fs/cgroup/cpu/cpu.cfs_period_us").write_text("100000")
    assert num_usable_cores(root) == expected


def test_without_the_files_every_cpu_is_a_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 7})
    assert num_usable_cores(tmp_path) == 2


def test_a_small_model_computes_on_one_thread() -> None:
    assert default_num_threads(SINGLE_THREAD_PARAMETERS - 1) == 1
    assert default_num_threads(SINGLE_THREAD_PARAMETERS) == num_usable_cores()


def test_threads_spin_shortly_unless_the_environment_says_otherwise() -> None:
    environment = {"HOME": "/"}
    set_wait_policy(environment)
    assert environment["OMP_WAIT_POLICY"] == "PASSIVE"
    assert int(environment["GOMP_SPINCOUNT"]) > 0
    chosen = {"OMP_WAIT_POLICY": "ACTIVE"}
    set_wait_policy(chosen)
    assert chosen == {"OMP_WAIT_POLICY": "ACTIVE"}
    own = {"GOMP_SPINCOUNT": "7"}
    set_wait_policy(own)
    assert own["GOMP_SPINCOUNT"] == "7"
