"""The scripts of examples/clients against a live `pagoda serve`: those whose packages are installed here."""

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.process.stack import Stack

FOLDER = Path(__file__).parents[3] / "examples" / "clients"
PACKAGES = {
    "openai_client": "openai",
    "langchain_client": "langchain_openai",
    "litellm_client": "litellm",
    "lm_eval_client": "lm_eval",
    "guidellm_client": "guidellm",
    "anthropic_client": "anthropic",
    "instructor_client": "instructor",
}


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    stack = Stack("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    try:
        stack.wait_ready()
        yield stack
    finally:
        stack.end()


@pytest.mark.parametrize("script", PACKAGES)
def test_the_client_gets_sane_answers(stack: Stack, script: str) -> None:
    if importlib.util.find_spec(PACKAGES[script]) is None:
        pytest.skip(f"{PACKAGES[script]} is not installed here")
    command = [sys.executable, str(FOLDER / f"{script}.py"), "--base-url", f"{stack.url}/v1", "--model", "pagoda-tiny"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_script_is_tried() -> None:
    assert {path.stem for path in FOLDER.glob("*_client.py")} == set(PACKAGES)
