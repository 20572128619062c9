"""The worker's command: its defaults, the addresses that it tells, and the ranks that it counts."""

import argparse
from typing import Any

import pytest

from pagoda_common.config.security_config import SecurityConfig
from pagoda_common.errors import ConfigError
from pagoda_worker import __main__ as command
from pagoda_worker.loader.loaded_model import LARGE_MODEL_BYTES
from pagoda_worker.parallel.local_ranks import STOP_MARGIN_S, rank_host


def parse(*flags: str) -> argparse.Namespace:
    args = command.make_parser().parse_args([*flags])
    command._count_ranks(args)
    return args


@pytest.fixture(autouse=True)
def no_pods(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LWS_GROUP_INDEX", "LWS_WORKER_INDEX", "LWS_GROUP_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(command.socket, "gethostname", lambda: "this-machine")


def test_flags_have_defaults() -> None:
    args = parse()
    assert (args.host, args.port, args.drain_timeout, args.tensor_parallel_size) == ("127.0.0.1", 0, 30.0, 1)
    assert (args.rank, args.world_size, args.group, args.device_index) == (0, 1, None, None)
    assert (args.advertise_address, args.rank_host, args.metrics_port, args.threads) == (None,) * 4
    assert (command.STOP_GRACE_S, STOP_MARGIN_S, LARGE_MODEL_BYTES) == (1.0, 10.0, 64 * 2**20)


@pytest.mark.parametrize(
    ("flags", "pods", "rank", "world_size"),
    [
        ((), {}, 0, 1),
        (("--tensor-parallel-size=2",), {}, 0, 2),
        ((), {"LWS_WORKER_INDEX": "1", "LWS_GROUP_SIZE": "3"}, 1, 3),
        (("--tensor-parallel-size=4",), {"LWS_WORKER_INDEX": "2", "LWS_GROUP_SIZE": "3"}, 8, 12),
        (("--rank=1", "--world-size=5"), {"LWS_WORKER_INDEX": "2", "LWS_GROUP_SIZE": "3"}, 1, 5),
        ((), {"LWS_WORKER_INDEX": "x", "LWS_GROUP_SIZE": ""}, 0, 1),
    ],
)
def test_ranks_are_those_of_flags_then_of_pods(
    flags: tuple[str, ...], pods: dict[str, str], rank: int, world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in pods.items():
        monkeypatch.setenv(name, value)
    args = parse(*flags)
    assert (args.rank, args.world_size) == (rank, world_size)


def test_the_group_is_that_of_the_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LWS_GROUP_INDEX", "4")
    assert parse().group == 4
    assert parse("--group=2").group == 2


@pytest.mark.parametrize(
    ("host", "reachable"),
    [("0.0.0.0", "this-machine"), ("::", "this-machine"), ("", "this-machine"), ("10.0.0.1", "10.0.0.1")],
)
def test_all_interfaces_are_reached_by_the_name_of_the_machine(host: str, reachable: str) -> None:
    assert command._reachable_host(host) == reachable


@pytest.mark.parametrize(
    ("flags", "security", "is_local"),
    [
        (("--scheduler=127.0.0.1:1",), SecurityConfig(), True),
        (("--scheduler=localhost:1",), SecurityConfig(), True),
        (("--scheduler=10.0.0.1:1",), SecurityConfig(), False),
        (("--scheduler=127.0.0.1:1", "--advertise-address=127.0.0.1:3"), SecurityConfig(), False),
        (("--scheduler=127.0.0.1:1",), SecurityConfig(tls_ca="ca.pem"), False),
    ],
)
def test_a_scheduler_beside_it_has_an_address_of_its_own(
    flags: tuple[str, ...], security: SecurityConfig, is_local: bool
) -> None:
    address = command._local_address(parse(*flags), security)
    assert (address is not None) is is_local
    assert address is None or "worker" in address


@pytest.mark.parametrize(
    ("flags", "host"),
    [
        ((), "127.0.0.1"),
        (("--host=0.0.0.0",), "this-machine"),
        (("--advertise-address=10.0.0.7:3",), "10.0.0.7"),
        (("--advertise-address=10.0.0.7:3", "--rank-host=10.0.0.8"), "10.0.0.8"),
        (("--advertise-address=10.0.0.7:3", "--tensor-parallel-size=2"), "127.0.0.1"),
        (("--advertise-address=10.0.0.7:3", "--tensor-parallel-size=2", "--world-size=4"), "10.0.0.7"),
        (("--tensor-parallel-size=2", "--rank-host=10.0.0.8"), "10.0.0.8"),
    ],
)
def test_where_other_ranks_reach_this_one(flags: tuple[str, ...], host: str) -> None:
    assert command._own_host(parse(*flags)) == host


def test_one_rank_needs_no_place_to_meet() -> None:
    assert rank_host(parse()) is None


@pytest.mark.parametrize(
    ("flags", "security", "field"),
    [
        ((), SecurityConfig(), None),
        (("--rank=1",), SecurityConfig(), "rank"),
        (("--rank=1", "--world-size=2", "--group=0"), SecurityConfig(), None),
        (("--rank=2", "--world-size=2", "--group=0"), SecurityConfig(), "rank"),
        (("--rank=1", "--world-size=2"), SecurityConfig(), "group"),
        (("--tensor-parallel-size=2", "--rank=2", "--world-size=4", "--group=0"), SecurityConfig(), None),
        (
            ("--tensor-parallel-size=2", "--rank=3", "--world-size=4", "--group=0"),
            SecurityConfig(),
            "tensor_parallel_size",
        ),
        (("--host=10.0.0.7", "--world-size=2", "--group=0"), SecurityConfig(), "advertise_address"),
        (("--host=10.0.0.7", "--world-size=2", "--group=0"), SecurityConfig(insecure=True), None),
        (("--host=10.0.0.7", "--world-size=2", "--group=0", "--rank-host=127.0.0.1"), SecurityConfig(), None),
        (("--host=10.0.0.7",), SecurityConfig(), None),
    ],
)
def test_flags_make_a_rank_of_a_group(flags: tuple[str, ...], security: SecurityConfig, field: str | None) -> None:
    args = parse(*flags)
    if field is None:
        command._check_ranks(args, security)
        return
    with pytest.raises(ConfigError) as error:
        command._check_ranks(args, security)
    assert error.value.field == field


@pytest.mark.parametrize(
    ("flag", "least"),
    [
        *(("threads", 1), ("group", 0), ("rank", 0), ("world-size", 1), ("tensor-parallel-size", 1)),
        *(("device-index", 0), ("drain-timeout", 0)),
    ],
)
def test_numbers_have_least_values(
    flag: str, least: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    served: list[Any] = []

    async def serve(args: argparse.Namespace, *more: object) -> int:
        served.append(args)
        return 0

    for name in ("serve", "_serve_ranks"):
        monkeypatch.setattr(command, name, serve)
    for name in ("configure_logging", "run_plugins", "keep_freed_memory", "set_wait_policy"):
        monkeypatch.setattr(command, name, lambda *args, **more: None)
    monkeypatch.setattr(command, "protect_caches", lambda environment: [])
    argv = ["pagoda-worker", "--scheduler=127.0.0.1:1"]
    monkeypatch.setattr("sys.argv", [*argv, f"--{flag}={least}"])
    assert command.main() == 0
    assert len(served) == 1
    monkeypatch.setattr("sys.argv", [*argv, f"--{flag}={least - 1}"])
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code == 2
    assert f"must be at least {least}" in capsys.readouterr().err


class Calls:
    """What `main` calls, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[Any] = []
        self.served: list[Any] = []
        self.reasons: list[str] = []

        async def serve(args: argparse.Namespace, *more: object) -> int:
            self.made.append("serve")
            self.served += [args, *more]
            return 7

        async def serve_ranks(args: argparse.Namespace, *more: object) -> int:
            self.made.append("serve ranks")
            return 7

        monkeypatch.setattr(command, "serve", serve)
        monkeypatch.setattr(command, "_serve_ranks", serve_ranks)
        for name in ("run_plugins", "keep_freed_memory", "die_with_parent", "enable_marks", "set_wait_policy"):
            monkeypatch.setattr(command, name, self._noting(name))
        monkeypatch.setattr(command, "configure_logging", self._noting("logging"))
        monkeypatch.setattr(command, "protect_caches", lambda environment: self.reasons)
        monkeypatch.setattr(command, "with_found_token", lambda security, scheduler: (security, scheduler))

    def _noting(self, name: str) -> Any:
        def note(*args: Any, **more: Any) -> None:
            given = tuple("environment" if arg is command.os.environ else arg for arg in args)
            self.made.append((name, *given, more) if more else (name, *given))

        return note


def test_a_worker_is_set_up_before_it_serves(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    calls = Calls(monkeypatch)
    calls.reasons.append("the cache is open to others")
    monkeypatch.setenv("PAGODA_LOG_LEVEL", "debug")
    flags = ("--scheduler=127.0.0.1:1", "--die-with-parent=99", "--log-format=json")
    monkeypatch.setattr("sys.argv", ["pagoda-worker", *flags])
    assert command.main() == 0
    assert calls.made == [
        ("die_with_parent", 99),
        ("enable_marks", "environment"),
        ("logging", "worker", "debug", "json", {"is_child": True}),
        ("run_plugins",),
        ("set_wait_policy", "environment"),
        ("keep_freed_memory",),
        "serve",
    ]
    assert "the cache is open to others" in caplog.text
    (_, (security, scheduler), observability) = calls.served
    assert (scheduler, observability.log_format) == ("127.0.0.1:1", "json")
    assert isinstance(security, SecurityConfig)


def test_a_group_of_ranks_ends_with_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch)
    monkeypatch.delenv("PAGODA_LOG_LEVEL", raising=False)
    flags = ("--scheduler=127.0.0.1:1", "--tensor-parallel-size=2", "--group=0")
    monkeypatch.setattr("sys.argv", ["pagoda-worker", *flags])
    assert command.main() == 7
    assert calls.made[1] == ("logging", "worker", "info", "text", {"is_child": False})
    assert calls.made[-1] == "serve ranks"
    assert "serve" not in calls.made


@pytest.mark.parametrize(
    "flags", [("--scheduler=127.0.0.1:1", "--host=0.0.0.0"), ("--scheduler=10.0.0.9:1",)], ids=["listens", "dials"]
)
def test_a_worker_without_tls_neither_listens_nor_dials_beyond_its_machine(
    flags: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = Calls(monkeypatch)
    monkeypatch.setattr("sys.argv", ["pagoda-worker", *flags])
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code == 2
    assert "--insecure" in capsys.readouterr().err
    assert "serve" not in calls.made
    monkeypatch.setattr("sys.argv", ["pagoda-worker", *flags, "--insecure"])
    assert command.main() == 0
