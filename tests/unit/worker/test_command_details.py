"""pagoda-worker's main: it starts one rank or several, passes flags to each, and reserves the device."""

import argparse
import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pagoda_common.config.engine_config import CacheConfig, EngineConfig, ModelConfig
from pagoda_common.config.observability_config import ObservabilityConfig
from pagoda_common.config.security_config import SecurityConfig
from pagoda_common.errors import ConfigError
from pagoda_common.process.supervisor import Service
from pagoda_common.rpc import service
from pagoda_worker import __main__ as command
from pagoda_worker import worker as worker_module
from pagoda_worker.parallel.local_ranks import run_ranks
from pagoda_worker.worker import Worker


class Main:
    """Runs the command with its parts pretended; notes what is called, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[Any] = []
        self._monkeypatch = monkeypatch
        for name in ("LWS_GROUP_INDEX", "LWS_WORKER_INDEX", "LWS_GROUP_SIZE", "PAGODA_LOG_LEVEL"):
            monkeypatch.delenv(name, raising=False)
        for name in ("configure_logging", "die_with_parent", "run_plugins", "enable_marks", "set_wait_policy"):
            monkeypatch.setattr(command, name, self._noted(name))
        monkeypatch.setattr(command, "keep_freed_memory", self._noted("keep_freed_memory"))
        monkeypatch.setattr(command, "protect_caches", lambda environment: ["a cache is others' too"])
        monkeypatch.setattr(command, "with_found_token", lambda security, place: ("with a token for", place))
        for name in ("serve", "_serve_ranks"):
            monkeypatch.setattr(command, name, self._served(name))

    def _noted(self, name: str) -> Any:
        return lambda *args, **more: self.calls.append((name, args, more))

    def _served(self, name: str) -> Any:
        async def serve(args: argparse.Namespace, security: Any, observability: ObservabilityConfig) -> int:
            self.calls.append((name, args, security, observability))
            return 7

        return serve

    def run(self, *flags: str) -> int:
        self._monkeypatch.setattr("sys.argv", ["pagoda-worker", "--scheduler=127.0.0.1:1", *flags])
        return command.main()

    def names(self) -> list[str]:
        return [call[0] for call in self.calls]

    def of(self, name: str) -> Any:
        (found,) = [call for call in self.calls if call[0] == name]
        return found


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> Main:
    return Main(monkeypatch)


def test_one_rank_is_served_here_with_the_token_of_its_scheduler(main: Main, caplog: pytest.LogCaptureFixture) -> None:
    assert main.run("--log-format=json") == 0
    _, args, security, observability = main.of("serve")
    assert (args.rank, args.world_size, security) == (0, 1, ("with a token for", "127.0.0.1:1"))
    assert observability.log_format == "json"
    assert main.of("configure_logging")[1:] == (("worker", "info", "json"), {"is_child": False})
    assert main.names()[-3:] == ["set_wait_policy", "keep_freed_memory", "serve"], "before torch is imported"
    assert "die_with_parent" not in main.names()
    assert "a cache is others' too" in caplog.text


def test_several_ranks_are_processes_of_their_own(main: Main, caplog: pytest.LogCaptureFixture) -> None:
    assert main.run("--tensor-parallel-size=2", "--group=0") == 7, "as they ended"
    _, args, security, _ = main.of("_serve_ranks")
    assert (args.rank, args.world_size, args.tensor_parallel_size) == (0, 2, 2)
    assert isinstance(security, SecurityConfig)
    assert not {"serve", "set_wait_policy", "keep_freed_memory"} & set(main.names())
    assert caplog.text == ""


def test_a_child_ends_with_its_parent_and_logs_as_one(main: Main, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGODA_LOG_LEVEL", "debug")
    main.run("--die-with-parent=123")
    assert main.of("die_with_parent")[1] == (123,)
    assert main.of("configure_logging")[1:] == (("worker", "debug", "text"), {"is_child": True})


@pytest.mark.parametrize(
    ("flags", "field"),
    [
        (("--host=0.0.0.0",), "host"),
        (("--scheduler=10.0.0.9:1",), "scheduler"),
        (("--rank=1",), "rank"),
    ],
)
def test_what_is_not_safe_or_not_possible_ends_it_with_2(
    flags: tuple[str, ...], field: str, main: Main, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main.run(*flags)
    assert ended.value.code == 2
    assert field in capsys.readouterr().err
    assert "serve" not in main.names()


@pytest.mark.parametrize(("log_format", "with_names"), [("text", True), ("json", False)])
async def test_ranks_run_until_the_signal_and_tell_that_they_live(
    log_format: Any, with_names: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped, ended = asyncio.Event(), asyncio.Event()
    given: list[Any] = []

    @contextmanager
    def signals() -> Iterator[asyncio.Event]:
        yield stopped

    async def beat() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def run(services: tuple[Service, ...], until: asyncio.Event, *, with_names: bool) -> int:
        given.append(([each.name for each in services], until is stopped, with_names))
        await asyncio.sleep(0)
        return 3

    monkeypatch.setattr(service, "stop_signals", signals)
    monkeypatch.setattr(command, "beat", beat)
    monkeypatch.setattr(command, "run_ranks", run)
    args = command.make_parser().parse_args(["--tensor-parallel-size=2", "--group=0"])
    command._count_ranks(args)
    code = await command._serve_ranks(args, SecurityConfig(), ObservabilityConfig(log_format=log_format))
    assert (code, given) == (3, [(["rank-0", "rank-1"], True, with_names)])
    for _ in range(3):
        await asyncio.sleep(0)
    assert ended.is_set()


async def test_lines_of_json_stay_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    code = "import sys; print('{\"a\": 1}', file=sys.stderr); sys.exit(2)"
    one = Service(name="rank-0", command=(sys.executable, "-c", code), stop_timeout_s=60)
    assert await run_ranks((one,), asyncio.Event(), with_names=False) == 2
    assert '{"a": 1}' in capsys.readouterr().err.splitlines()


# The device.


@pytest.mark.parametrize("index", [0, 3])
def test_a_worker_claims_the_device_that_it_was_given_and_checks_what_runs_there(
    index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    claimed: Any = SimpleNamespace(device=torch.device("cpu"))

    def claim(kind: str, number: int) -> Any:
        calls.append(("claim", kind, number))
        return claimed

    monkeypatch.setattr(worker_module, "claim_device", claim)
    for name in ("check_cache_dtype", "check_attention_backend"):
        monkeypatch.setattr(worker_module, name, lambda *args, name=name: calls.append((name, *args)))
    config = EngineConfig(
        model=ModelConfig(device="cuda", attention_backend="triton"), cache=CacheConfig(kv_cache_dtype="fp8")
    )
    worker = Worker(num_threads=1, device_index=index)
    assert worker.init_device(config) is claimed
    worker.init_device(config)
    device = claimed.device
    assert calls == [
        ("claim", "cuda", index),
        ("check_cache_dtype", "fp8", device),
        ("check_attention_backend", "triton", device),
    ], "once for the same config"


@pytest.mark.parametrize("name", ["claim_device", "check_cache_dtype", "check_attention_backend"])
def test_a_device_that_is_refused_is_not_claimed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(num_threads=1)
    worker.init_device(EngineConfig(model=ModelConfig(device="cpu")))

    def refuse(*_: Any) -> None:
        raise ConfigError("no")

    with monkeypatch.context() as patch:
        patch.setattr(worker_module, name, refuse)
        with pytest.raises(ConfigError):
            worker.init_device(EngineConfig(model=ModelConfig(device="cpu", model="other")))
    assert worker.state == "started"
    worker.init_device(EngineConfig(model=ModelConfig(device="cpu", model="other")))
    assert worker.state == "device"


def test_steps_are_launched_ahead_on_a_gpu_that_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: Any = SimpleNamespace(device=torch.device("cuda"))
    for reason, kind, expected in ((None, "cuda", True), ("a rank", "cuda", False), (None, "cpu", False)):
        monkeypatch.setattr(worker_module, "what_waits", lambda loaded, reason=reason: reason)
        loaded.device = torch.device(kind)
        assert Worker._can_overlap(loaded) is expected
