"""How many threads a worker takes, and how they wait."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pagoda_worker.models.decoder import Decoder
from pagoda_worker.steps import step_threads
from pagoda_worker.steps.step import StepInput
from pagoda_worker.threads import (
    ENCODER_PARAMETERS,
    FEW_ROWS,
    HELPED_ROWS,
    SINGLE_THREAD_PARAMETERS,
    ThreadCounts,
    num_usable_cores,
    set_wait_policy,
    thread_counts,
)
from pagoda_worker.worker import Worker
from tests.checkpoints import make_checkpoint
from tests.unit.worker.driver import Driver


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


def test_helpers_are_set_when_their_number_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[int] = []
    monkeypatch.setattr(step_threads, "set_num_helpers", heard.append)
    monkeypatch.setattr(torch, "set_num_threads", lambda num: None)
    threads = step_threads.StepThreads(3)
    threads.choose(SINGLE_THREAD_PARAMETERS, torch.bfloat16)
    for num_tokens in (1, HELPED_ROWS, HELPED_ROWS + 1, 1000, 2):
        threads.use_for(StepInput(num_seqs=1, num_scheduled_tokens=np.array([num_tokens])))
    assert heard == [2, 0, 2]


def test_a_small_model_computes_on_one_thread() -> None:
    assert thread_counts(SINGLE_THREAD_PARAMETERS - 1, leaves_core=False) == ThreadCounts(1, 1)
    cores = num_usable_cores()
    assert thread_counts(SINGLE_THREAD_PARAMETERS, leaves_core=False) == ThreadCounts(cores, cores)


def test_encoders_share_their_long_steps_among_all_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagoda_worker.threads.num_usable_cores", lambda: 4)
    counts = thread_counts(ENCODER_PARAMETERS, leaves_core=True, only_pools=True)
    assert (counts.of(FEW_ROWS), counts.of(FEW_ROWS + 1)) == (3, 4)
    assert thread_counts(ENCODER_PARAMETERS - 1, leaves_core=True, only_pools=True) == ThreadCounts(1, 1)
    assert thread_counts(ENCODER_PARAMETERS, leaves_core=True) == ThreadCounts(1, 1)
    used: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", used.append)
    threads = step_threads.StepThreads()
    for only_pools in (True, False):
        threads.choose(ENCODER_PARAMETERS, torch.bfloat16, only_pools=only_pools)
    assert used == [4, 1]


@pytest.mark.parametrize(("cores", "few_rows"), [(1, 1), (2, 1), (4, 3)])
def test_steps_of_few_tokens_leave_a_core_to_the_other_services(
    cores: int, few_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagoda_worker.threads.num_usable_cores", lambda: cores)
    counts = thread_counts(SINGLE_THREAD_PARAMETERS, leaves_core=True)
    assert counts.of(1) == counts.of(FEW_ROWS) == few_rows
    assert counts.of(FEW_ROWS + 1) == cores


@pytest.mark.parametrize("leaves_core", [False, True])
def test_steps_of_few_tokens_have_helpers_instead_of_the_other_threads(
    leaves_core: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagoda_worker.threads.num_usable_cores", lambda: 4)
    counts = thread_counts(SINGLE_THREAD_PARAMETERS, leaves_core=leaves_core)
    assert counts.helpers_of(1) == counts.helpers_of(HELPED_ROWS) == 3
    assert counts.helpers_of(HELPED_ROWS + 1) == 0
    assert thread_counts(SINGLE_THREAD_PARAMETERS - 1, leaves_core=leaves_core).helpers_of(1) == 0


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


@pytest.mark.parametrize(("dtype", "few_rows"), [("bfloat16", 2), ("float32", 3)])
def test_each_step_has_the_threads_of_its_tokens(
    dtype: str, few_rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagoda_worker.threads.num_usable_cores", lambda: 3)
    monkeypatch.setattr("pagoda_worker.threads.SINGLE_THREAD_PARAMETERS", 0)
    seen: list[tuple[int, int]] = []

    def forward(model: Decoder, input_ids: Tensor, *args: Any) -> Tensor:
        seen.append((input_ids.shape[0], torch.get_num_threads()))
        return whole(model, input_ids, *args)

    whole = Decoder.forward
    monkeypatch.setattr(Decoder, "forward", forward)
    before = torch.get_num_threads()
    try:
        driver = Driver(
            make_checkpoint("LlamaForCausalLM", tmp_path),
            dtype=dtype,
            reference_kernels=("decoder_layers", "composed_layers"),
            worker=Worker(shares_machine=True),
        )
        driver.generate([[5] * 9], max_tokens=3)
    finally:
        torch.set_num_threads(before)
    assert seen[-3:] == [(9, 3), (1, few_rows), (1, few_rows)]


@pytest.mark.parametrize(
    ("asked", "shares_machine", "dtype", "few", "many"),
    [
        (3, True, torch.bfloat16, 3, 3),
        (None, True, torch.bfloat16, 3, 4),
        (None, False, torch.bfloat16, 4, 4),
        (None, True, torch.float32, 4, 4),
    ],
)
def test_a_core_is_left_beside_other_services_in_bfloat16_unless_a_number_is_asked_for(
    asked: int | None,
    shares_machine: bool,
    dtype: torch.dtype,
    few: int,
    many: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pagoda_worker.threads.num_usable_cores", lambda: 4)
    used = [0]
    monkeypatch.setattr(torch, "set_num_threads", used.append)
    monkeypatch.setattr(torch, "get_num_threads", lambda: used[-1])
    monkeypatch.setattr(step_threads, "set_num_helpers", lambda count: None)
    threads = step_threads.StepThreads(asked, shares_machine=shares_machine)
    threads.choose(SINGLE_THREAD_PARAMETERS, dtype)
    assert used[-1] == many
    for step, expected in (
        (StepInput(num_seqs=FEW_ROWS), few),
        (StepInput(num_seqs=FEW_ROWS + 1), many),
        (StepInput(num_seqs=1, num_scheduled_tokens=np.array([FEW_ROWS + 1])), many),
        (StepInput(num_seqs=1, num_scheduled_tokens=np.array([FEW_ROWS])), few),
    ):
        threads.use_for(step)
        assert used[-1] == expected
