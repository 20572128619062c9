"""Which worker processes `pagoda serve` and LLM keep running."""

import os

import pytest

from pagoda.server.worker_services import worker_services
from pagoda_common.config.engine_config import EngineConfig, ParallelConfig
from pagoda_common.process.supervisor import Service


def services(metrics_port: int = 9000, **parallel: int) -> tuple[Service, ...]:
    config = EngineConfig(parallel=ParallelConfig(**parallel))
    return worker_services(
        config,
        scheduler="127.0.0.1:1",
        host="127.0.0.1",
        drain_timeout_s=1.0,
        stop_timeout_s=2.0,
        metrics_port=metrics_port,
    )


def flags_of(service: Service, *names: str) -> tuple[str | None, ...]:
    given = dict(word.split("=", 1) for word in service.command if word.startswith("--") and "=" in word)
    return tuple(given.get(name) for name in names)


def test_one_worker_is_told_nothing_of_groups() -> None:
    (worker,) = services()
    assert worker.name == "worker"
    assert flags_of(worker, "--group", "--rank", "--world-size", "--device-index", "--threads") == (None,) * 5


def test_ranks_of_a_model_are_told_who_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    ranks = services(tensor_parallel_size=2)
    assert [rank.name for rank in ranks] == ["worker-rank-0", "worker-rank-1"]
    assert [flags_of(rank, "--group", "--rank", "--world-size") for rank in ranks] == [("0", "0", "2"), ("0", "1", "2")]
    assert {flags_of(rank, "--threads") for rank in ranks} == {("4",)}, "they share the cores"


def test_copies_of_several_ranks_have_numbers_devices_and_ports_of_their_own() -> None:
    ranks = services(tensor_parallel_size=2, data_parallel_size=1, standby_workers=1, threads=1)
    assert [rank.name for rank in ranks] == ["worker-0-rank-0", "worker-0-rank-1", "worker-1-rank-0", "worker-1-rank-1"]
    assert [flags_of(rank, "--group", "--rank") for rank in ranks] == [("0", "0"), ("0", "1"), ("1", "0"), ("1", "1")]
    assert [flags_of(rank, "--device-index", "--metrics-port") for rank in ranks] == [
        ("0", "9000"),
        ("1", "9001"),
        ("2", "9002"),
        ("3", "9003"),
    ]


def test_more_workers_than_cores_have_a_thread_each_and_any_port_stays_any_port(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    workers = services(metrics_port=0, data_parallel_size=3)
    assert [flags_of(worker, "--threads", "--metrics-port") for worker in workers] == [("1", "0")] * 3
