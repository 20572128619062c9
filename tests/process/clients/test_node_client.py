"""The Node.js example against a live `pagoda serve`. It installs nothing: `npm install` in examples/node does."""

import json
import os
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.process.stack import Stack

FOLDER = Path(__file__).parents[3] / "examples" / "node"
NODE = shutil.which("node")
API_KEY = "key-of-the-node-example"
PROMPT = "Once upon a time, there was a dog"
NUM_TOKENS = 600

if NODE is None:
    pytest.skip("node is not installed here", allow_module_level=True)
if not all((FOLDER / "node_modules" / "@grpc" / name).exists() for name in ("grpc-js", "proto-loader")):
    pytest.skip("its packages are not installed: run npm install in examples/node", allow_module_level=True)


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    stack = Stack("--api-key", API_KEY)
    try:
        stack.wait_ready()
        yield stack
    finally:
        stack.end()


def start(stack: Stack, *flags: str, api_key: str = API_KEY) -> subprocess.Popen[str]:
    """The example, its output in pipes."""
    command = [str(NODE), "stream.mjs", "--prompt", PROMPT, *flags, f"127.0.0.1:{stack.grpc_port}"]
    environment = {**os.environ, "API_KEY": api_key}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=FOLDER, env=environment, stdout=pipe, stderr=pipe, text=True, encoding="utf-8")


def greedy_text(stack: Stack) -> str:
    """The same completion over HTTP."""
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": NUM_TOKENS}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {API_KEY}"}
    request = urllib.request.Request(f"{stack.url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=240) as response:
        return str(json.load(response)["choices"][0]["text"])


def test_a_stream_is_whole_also_after_the_loss_of_its_frontend(stack: Stack) -> None:
    expected = greedy_text(stack) + "\n"
    flags = ("--max-tokens", str(NUM_TOKENS), "--deadline-s", "120")
    text, notes = start(stack, *flags).communicate(timeout=240)
    assert text == expected, notes
    frontend = stack.service("frontend")
    process = start(stack, *flags)
    assert process.stdout is not None
    first = process.stdout.read(1)
    frontend.kill()
    rest, notes = process.communicate(timeout=240)
    assert first + rest == expected, notes
    assert f"[127.0.0.1:{stack.grpc_port}: " in notes, "it ended before its frontend did"
    assert process.returncode == 0


def test_a_failure_is_told_with_its_status(stack: Stack) -> None:
    stack.wait_ready()
    for flags, api_key, status in (
        (("--max-tokens", "0"), API_KEY, "INVALID_ARGUMENT: max_tokens"),
        ((), "wrong", "UNAUTHENTICATED: "),
        (("--max-tokens", "900", "--deadline-s", "0.2"), API_KEY, "DEADLINE_EXCEEDED: "),
    ):
        process = start(stack, *flags, api_key=api_key)
        _, notes = process.communicate(timeout=240)
        assert status in notes
        assert process.returncode == 1
