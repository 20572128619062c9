"""The command for a GPU, on a machine without one: it says so, and tries every part with tiny shapes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "gpu" / "run_all.py"
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="here it would measure for minutes")
def test_everything_runs(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--budget-s", "250", "--out", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=800, env=ENVIRONMENT)
    assert result.returncode == 0, result.stderr
    (path,) = tmp_path.glob("cpu-*.json")
    report = json.loads(path.read_text())
    assert report["device"].startswith("no CUDA device")
    assert {name: outcome for name, outcome in report["parts"].items() if not outcome.startswith("done")} == {}
    assert [check for check in report["checks"] if not check["is_right"]] == []
    assert {check["operation"] for check in report["checks"]} >= {"paged_attention", "rope_store", "sample_tokens"}
    assert len([check for check in report["checks"] if check["operation"] == "tokens"]) == 4
    assert {row["part"] for row in report["figures"]} >= {
        "8B decode step",
        "8B mixed step",
        "0.6B prompt step",
        "prefill SDPA",
        "tiny split step",
    }
    assert "checks are right" in path.with_suffix(".txt").read_text()


def test_a_spent_budget_skips_parts_and_says_so(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--budget-s", "0", "--out", str(tmp_path)]
    subprocess.run(command, capture_output=True, check=True, timeout=800, env=ENVIRONMENT)
    (path,) = tmp_path.glob("*.json")
    assert set(json.loads(path.read_text())["parts"].values()) == {"skipped: the budget is spent"}
