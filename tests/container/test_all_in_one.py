"""The image with all three services: one command serves, healthy by Docker's own check, whatever brings the model."""

import json
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoints import make_checkpoint
from tests.container.conftest import engine_fault
from tests.container.stack import BUILD_TIMEOUT_S, ROOT, wheels_dir

IMAGE = "pagoda:test"
WAIT_S = 240


@pytest.fixture(scope="module")
def image() -> str:
    if fault := engine_fault():
        pytest.skip(fault)
    wheels = wheels_dir()
    context = ["--build-context", f"wheels={wheels}"] if wheels else []
    command = ["docker", "build", "--quiet", "-f", "services/worker/Dockerfile", "--target", "all-in-one", "-t", IMAGE]
    done = subprocess.run(
        [*command, *context, "."], cwd=ROOT, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return IMAGE


def docker(*words: str) -> str:
    return subprocess.run(["docker", *words], capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture(params=["embedded", "mounted"])
def url(image: str, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A container that is healthy."""
    options = ["--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL", "-p", "127.0.0.1::8000"]
    if request.param == "mounted":
        model = make_checkpoint("Qwen3ForCausalLM", tmp_path / "model")
        for path in (tmp_path, *model.iterdir()):
            path.chmod(0o755)
        model.chmod(0o755)
        options += ["-v", f"{model}:/mnt/models:ro"]
    container = docker("run", "--detach", *options, image, "--served-model-name", request.param)
    try:
        deadline = time.monotonic() + WAIT_S
        while docker("inspect", "--format", "{{.State.Health.Status}}", container) != "healthy":
            assert time.monotonic() < deadline, docker("logs", "--tail", "50", container)
            time.sleep(0.5)
        yield f"http://{docker('port', container, '8000')}"
    finally:
        subprocess.run(["docker", "rm", "--force", "--volumes", container], capture_output=True, check=True)


def test_one_command_serves(url: str, request: pytest.FixtureRequest) -> None:
    name = request.node.callspec.params["url"]
    with urllib.request.urlopen(f"{url}/v1/models", timeout=30) as answer:
        assert [model["id"] for model in json.load(answer)["data"]] == [name]
    body = json.dumps({"model": name, "prompt": "Hello", "max_tokens": 5, "ignore_eos": True}).encode()
    call = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(call, timeout=60) as answer:
        assert json.load(answer)["usage"]["completion_tokens"] == 5
