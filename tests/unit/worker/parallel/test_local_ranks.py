"""The processes that `pagoda-worker --tensor-parallel-size` starts: their flags, and how they end."""

import asyncio
import sys
from typing import Any

import pytest

from pagoda_common.config.observability_config import ObservabilityConfig
from pagoda_common.config.security_config import SecurityConfig
from pagoda_common.process.supervisor import Service
from pagoda_worker import __main__ as command
from pagoda_worker.parallel.local_ranks import STOP_MARGIN_S, rank_services, run_ranks


def services_of(
    *words: str, security: SecurityConfig | None = None, observability: ObservabilityConfig | None = None
) -> tuple[Service, ...]:
    args = command.make_parser().parse_args([*words])
    command._count_ranks(args)
    services = rank_services(
        args, security=security or SecurityConfig(), observability=observability or ObservabilityConfig()
    )
    assert [each.name for each in services] == [f"rank-{args.rank + number}" for number in range(len(services))]
    return services


def flags(*words: str, **configs: Any) -> list[dict[str, str]]:
    """Of each rank's command line."""
    services = services_of(*words, **configs)
    return [dict(word.partition("=")[::2] for word in each.command if word.startswith("--")) for each in services]


def test_ranks_of_one_pod_have_ports_and_devices_of_their_own_and_meet_on_loopback() -> None:
    first, second = flags(
        "--tensor-parallel-size=2",
        "--group=3",
        "--port=50053",
        "--metrics-port=9090",
        "--advertise-address=10.0.0.7:50053",
        "--threads=5",
    )
    assert {first[name] for name in ("--group", "--world-size", "--rank-host", "--threads")} == {
        *("3", "2", "127.0.0.1", "5")
    }
    own = ("--rank", "--device-index", "--port", "--metrics-port", "--advertise-address")
    assert [first[name] for name in own] == ["0", "0", "50053", "9090", "10.0.0.7:50053"]
    assert [second[name] for name in own] == ["1", "1", "50054", "9091", "10.0.0.7:50054"]
    assert {name for name in first if first[name] != second[name]} == set(own)


def test_free_ports_stay_free_ones_and_cores_are_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(7)))
    for each in flags("--tensor-parallel-size=3", "--group=0", "--metrics-port=0"):
        assert (each["--port"], each["--metrics-port"], each["--threads"]) == ("0", "0", "2")
        assert "--advertise-address" not in each


def test_pods_of_a_leader_worker_set_count_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LWS_WORKER_INDEX", "1")
    monkeypatch.setenv("LWS_GROUP_SIZE", "2")
    ranks = flags("--tensor-parallel-size=4", "--group=0")
    assert [each["--rank"] for each in ranks] == ["4", "5", "6", "7"]
    assert [each["--device-index"] for each in ranks] == ["0", "1", "2", "3"]
    assert {each["--world-size"] for each in ranks} == {"8"}
    assert all("--rank-host" not in each for each in ranks), "other pods are to reach them"


def test_ranks_count_on_from_a_device_that_was_given() -> None:
    ranks = flags("--tensor-parallel-size=2", "--group=0", "--device-index=4")
    assert [each["--device-index"] for each in ranks] == ["4", "5"]


def test_all_ranks_are_told_what_the_worker_was_told() -> None:
    told = {"--scheduler": "10.0.0.1:50052", "--host": "0.0.0.0", "--rank-host": "10.0.0.7", "--drain-timeout": "7.5"}
    words = ("--tensor-parallel-size=2", "--group=0", *(f"{name}={value}" for name, value in told.items()))
    observability = ObservabilityConfig(log_format="json", otlp_traces_endpoint="http://10.0.0.2:4318")
    for each in flags(*words, observability=observability):
        assert {name: each[name] for name in told} == told
        assert (each["--log-format"], each["--otlp-traces-endpoint"]) == ("json", "http://10.0.0.2:4318")
    assert {each.stop_timeout_s for each in services_of(*words)} == {7.5 + STOP_MARGIN_S}, "they drain before that"


def test_certificates_are_handed_on() -> None:
    security = SecurityConfig(tls_cert="cert", tls_key="key", tls_ca="ca")
    for each in flags("--tensor-parallel-size=2", "--group=0", security=security):
        assert (each["--tls-cert"], each["--tls-key"], each["--tls-ca"]) == ("cert", "key", "ca")


async def test_all_ranks_end_when_asked_and_a_wrong_configuration_ends_them_with_2(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def service(rank: int, code: str) -> Service:
        return Service(name=f"rank-{rank}", command=(sys.executable, "-c", code), stop_timeout_s=60)

    stopped = asyncio.Event()
    stopped.set()
    assert await run_ranks((service(0, "import time; time.sleep(60)"),), stopped, with_names=True) == 0
    wrong = service(1, "import sys; print('error: no'); sys.exit(2)")
    assert await run_ranks((wrong,), asyncio.Event(), with_names=True) == 2
    assert "rank-1 | error: no" in capsys.readouterr().err
