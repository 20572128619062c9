"""A full disk, a model that vanishes, a checkpoint that is damaged: served as long as it can be, and said clearly."""

import json
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest

from pagoda_common.config.checkpoint.model_files import resolve_model
from pagoda_common.process.children import free_port
from tests.process.stack import MODULES, ask, get_status, poll_until


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """The embedded model in a directory of the test's own."""
    return Path(shutil.copytree(resolve_model("pagoda-tiny"), tmp_path / "model"))


def not_ready_reason(url: str) -> str:
    """What /ready gives as reason; empty when it answers 200, or no one does."""
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=240):
            return ""
    except urllib.error.HTTPError as error:
        return str(json.load(error)["error"]["message"])
    except OSError:
        return ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
def test_a_full_disk_ends_nothing_and_a_vanished_model_is_named_until_it_is_back(checkpoint: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    flags = [str(checkpoint), "--served-model-name=pagoda-tiny", f"--port={port}", "--grpc-port=0"]
    with Path("/dev/full").open("wb", buffering=0) as full:
        stack = subprocess.Popen(
            [sys.executable, "-m", "pagoda", "serve", *flags],
            stdin=subprocess.DEVNULL,
            stdout=full,
            stderr=full,
            start_new_session=True,
        )
    try:
        poll_until(lambda: get_status(f"{url}/ready") == 200 or stack.poll() is not None, what="/ready answers 200")
        assert stack.poll() is None, "a log that cannot be written has ended pagoda serve"
        answer = ask(url)
        away = checkpoint.rename(checkpoint.with_name("away"))
        children = psutil.Process(stack.pid).children(recursive=True)
        next(child for child in children if MODULES["worker"] in child.cmdline()).kill()
        poll_until(lambda: "is not a directory" in not_ready_reason(url), what="/ready says that the model is gone")
        assert stack.poll() is None
        away.rename(checkpoint)
        poll_until(lambda: get_status(f"{url}/ready") == 200, what="/ready answers 200 again")
        assert ask(url) == answer
        stack.send_signal(signal.SIGTERM)
        assert stack.wait(120) == 0
    finally:
        if stack.poll() is None:
            for child in psutil.Process(stack.pid).children(recursive=True):
                child.kill()
            stack.kill()
        stack.wait()


def test_a_damaged_checkpoint_ends_with_code_2_and_the_reason(checkpoint: Path) -> None:
    weights = checkpoint / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    command = [sys.executable, "-m", "pagoda", "serve", str(checkpoint), "--port=0", "--grpc-port=0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 2, done.stderr
    reason = next(line for line in done.stderr.splitlines() if "cannot serve" in line)
    assert "model.safetensors" in reason
    assert "Traceback" not in done.stderr
