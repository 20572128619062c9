"""What services find in their environment."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pagoda_common.process.children import GRPC_ENVIRONMENT, service_command, service_environment

SERVER = "import grpc; from concurrent import futures; grpc.server(futures.ThreadPoolExecutor(1)).start()"


@pytest.mark.parametrize("module", ["pagoda_frontend", "pagoda_scheduler", "pagoda_worker"])
def test_ours_goes_before(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRPC_EXPERIMENTS", raising=False)
    command = service_command(module, [])
    assert service_environment(command).items() >= GRPC_ENVIRONMENT.items()
    monkeypatch.setenv("GRPC_EXPERIMENTS", "")
    assert service_environment(command)["GRPC_EXPERIMENTS"] == ""


def test_the_installed_grpc_knows_what_it_is_told() -> None:
    command = [sys.executable, "-c", SERVER]
    result = subprocess.run(command, env=GRPC_ENVIRONMENT, capture_output=True, text=True, check=True)
    assert "Unknown experiment" not in result.stderr
    wrong = {"GRPC_EXPERIMENTS": "-no_such_experiment"}
    result = subprocess.run(command, env=wrong, capture_output=True, text=True, check=True)
    assert "Unknown experiment" in result.stderr


def test_nothing_is_imported_from_a_directory_where_others_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "planted.py").write_text("print('planted')")
    command = [sys.executable, "-m", "planted"]
    for mode, is_found in ((0o700, True), (0o755, True), (0o777, False), (0o1777, False), (0o707, False)):
        tmp_path.chmod(mode)
        done = subprocess.run(command, env=service_environment(command), capture_output=True, text=True, check=False)
        assert (done.stdout == "planted\n") is is_found, mode


def test_a_group_of_this_user_alone_is_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o770)
    monkeypatch.chdir(tmp_path)
    is_own = tmp_path.stat().st_gid == os.getegid() == os.geteuid()
    assert ("PYTHONSAFEPATH" in service_environment(["python"])) is not is_own
    monkeypatch.setattr(os, "getegid", lambda: 100)
    assert "PYTHONSAFEPATH" in service_environment(["python"])


def test_images_set_the_same() -> None:
    for service in ("frontend", "scheduler", "worker"):
        text = Path("services", service, "Dockerfile").read_text(encoding="utf-8")
        for name, value in service_environment(service_command(f"pagoda_{service}", [])).items():
            if name in (*GRPC_ENVIRONMENT, "PYTHONMALLOC", "MALLOC_ARENA_MAX"):
                assert f"{name}={value}" in text, (service, name)


@pytest.mark.parametrize(
    ("statement", "given", "expected"),
    [
        ("import pagoda", None, None),
        ("from pagoda import LLM", None, GRPC_ENVIRONMENT["GRPC_EXPERIMENTS"]),
        ("from pagoda import AsyncLLM", "-event_engine_client", "-event_engine_client"),
    ],
)
def test_the_library_sets_what_grpc_reads_unless_its_user_has(
    statement: str, given: str | None, expected: str | None
) -> None:
    env = {name: value for name, value in os.environ.items() if name != "GRPC_EXPERIMENTS"}
    if given is not None:
        env["GRPC_EXPERIMENTS"] = given
    program = f"{statement}; import os; print(os.environ.get('GRPC_EXPERIMENTS'))"
    result = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == str(expected)
