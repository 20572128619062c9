"""What the split into processes costs a decode step on a GPU: benchmarks/step_overhead.py, run as a child."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.gpu.tools.timing import Figures

SCRIPT = Path(__file__).parents[1] / "step_overhead.py"


def measure_split(figures: Figures, timeout_s: float, *, is_small: bool) -> None:
    """A step of 64 sequences at the shape of Llama-3.1-8B, with the worker in the scheduler's process and over gRPC.

    Raises:
        RuntimeError: the child has failed: it needs gRPC and the generated contracts, which nothing else here does.
        subprocess.TimeoutExpired: it took too long.
    """
    model, batch = ("tiny", 2) if is_small else ("8B", 64)
    options = ["--device", figures.device.type, "--models", model, "--batch-sizes", str(batch)]
    options += ["--rounds", "1", "--steps", "10"] if is_small else ["--rounds", "3"]
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "figures.jsonl"
        child = subprocess.run(
            [sys.executable, str(SCRIPT), *options, "--json", str(path)],
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )
        if child.returncode:
            raise RuntimeError(child.stderr[-2000:])
        found = {line["name"]: line["value"] for line in map(json.loads, path.read_text().splitlines())}
    for kind, case in (("in_process", "in the scheduler's process"), ("grpc", "over gRPC")):
        figures.add(f"{model} split step", f"batch {batch}, {case}", found[f"{kind}_ms_{model}_{batch}"] / 1e3)
    figures.rows[-1]["of_local"] = round(found[f"ratio_{model}_{batch}"], 3)
