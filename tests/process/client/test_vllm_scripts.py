"""The usual programs for vLLM run on Pagoda when `vllm` in their import lines becomes `pagoda`."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.process.stack import Stack

SCRIPTS = Path(__file__).parent / "vllm_scripts"
OFFLINE = sorted(path.name for path in SCRIPTS.glob("*.py") if path.name != "openai_client.py")


def run(source: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", source],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("name", OFFLINE)
def test_a_program_for_vllm_runs_with_its_imports_changed_alone(name: str) -> None:
    source = (SCRIPTS / name).read_text(encoding="utf-8")
    changed, num_changes = re.subn(r"^from vllm\b", "from pagoda", source, flags=re.MULTILINE)
    assert num_changes
    assert run(changed).strip()


def test_the_openai_package_talks_to_a_server() -> None:
    pytest.importorskip("openai")
    stack = Stack()
    try:
        stack.wait_ready()
        assert run((SCRIPTS / "openai_client.py").read_text(encoding="utf-8"), BASE_URL=f"{stack.url}/v1").strip()
    finally:
        stack.end()
