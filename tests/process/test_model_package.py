"""examples/model_package, installed in a virtual environment of its own, is served with its reference's tokens."""

import json
import subprocess
import sys
import sysconfig
import urllib.request
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

from pagoda_common.process.children import free_port
from tests.checkpoints import write_tokenizer
from tests.process.stack import get_status, poll_until

PACKAGE = Path(__file__).parents[2] / "examples" / "model_package"
PROMPT = [7, 11, 13, 17, 19, 23, 29]
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter that sees what this one sees, and the package."""
    directory = tmp_path_factory.mktemp("environment")
    venv.create(directory, with_pip=False)
    own = next(directory.glob("lib/python*/site-packages"))
    seen = [path for path in sys.path if path] + [sysconfig.get_path("purelib")]
    (own / "seen.pth").write_text("\n".join(dict.fromkeys(seen)))
    interpreter = str(directory / "bin" / "python")
    install = [sys.executable, "-m", "pip", "--python", interpreter, "install", "--no-deps", "--no-build-isolation"]
    subprocess.run([*install, "--no-index", str(PACKAGE)], check=True, capture_output=True, timeout=240)
    return interpreter


@pytest.fixture(scope="module")
def checkpoint(python: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    """A checkpoint, and what the reference says after the prompt."""
    directory = tmp_path_factory.mktemp("checkpoint")
    code = (
        "import sys, json, pathlib; from pagoda_squares.reference import greedy, write_checkpoint\n"
        f"path = pathlib.Path({str(directory)!r}); write_checkpoint(path)\n"
        f"print(json.dumps(greedy(path, {PROMPT}, {NUM_TOKENS})))"
    )
    done = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True, timeout=240)
    write_tokenizer(directory)
    return directory, json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def served(python: str, checkpoint: tuple[Path, list[int]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a `pagoda serve`; its log must show the plugin in every process."""
    port, log = free_port("127.0.0.1"), tmp_path_factory.mktemp("log") / "log"
    command = [python, "-m", "pagoda", "serve", str(checkpoint[0]), "--port", str(port), "--dtype", "float32"]
    ports = ["--grpc-port", str(free_port("127.0.0.1")), "--scheduler-port", str(free_port("127.0.0.1"))]
    with log.open("w") as file:
        process = subprocess.Popen([*command, *ports, "--device", "cpu"], stdout=file, stderr=subprocess.STDOUT)
    try:
        url = f"http://127.0.0.1:{port}"
        poll_until(
            lambda: process.poll() is not None or get_status(f"{url}/health") == 200,
            what="the example's model serves",
            log=log.read_text,
        )
        assert process.poll() is None, log.read_text()
        assert log.read_text().count("squares are installed") >= 4
        yield url
    finally:
        process.terminate()
        process.wait(60)


def test_the_model_of_a_package_says_what_its_reference_says(served: str, checkpoint: tuple[Path, list[int]]) -> None:
    body = {
        "model": str(checkpoint[0]),
        "prompt": PROMPT,
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
    }
    request = urllib.request.Request(
        f"{served}/v1/completions",
        json.dumps(body | {"return_token_ids": True}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=240) as response:
        choice = json.load(response)["choices"][0]
    assert choice["token_ids"] == checkpoint[1]
