"""Everything that a GPU should tell us, in one command: kernels against references, and figures against the roofline.

    python benchmarks/gpu/run_all.py --budget-s 480 --out DIR

It writes DIR/h200-2026-11-21.json (named after the device and the day) and a table of the same name with .txt. A part
that fails is noted, and the others continue; a part without enough time is skipped, with a message. On a machine
without CUDA one check of each operation runs in Triton's interpreter with tiny shapes, and every measurement runs with
tiny shapes on the CPU, so that this command itself is tested: those figures mean nothing.
"""

import sys
from pathlib import Path

sys.path.extend(
    str(Path(__file__).parents[2] / folder)
    for folder in (".", "services/worker", "services/scheduler", "kernels", "common", "client")
)  # so that it also runs as a plain script

import argparse
import datetime
import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import subprocess
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

NUM_CHECKERS = max(1, (os.cpu_count() or 1) - 2)
"""Processes that compile and check at once: compiling is most of it."""


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--budget-s", type=float, default=480.0, help="seconds after which no further part begins")
    flags.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the two files go")
    flags.add_argument("--checks-only", metavar="I/N", help="run every Nth check from I on and print JSON lines")
    args = flags.parse_args()
    is_small = not torch.cuda.is_available()
    device = torch.device("cpu" if is_small else "cuda")
    if is_small:
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
        if importlib.util.find_spec("triton"):
            from benchmarks.gpu.interpreter import spare_work

            spare_work(importlib.import_module("triton.runtime.interpreter"))
    if args.checks_only:
        index, count = map(int, args.checks_only.split("/"))
        run_checks(device, index, count, is_small=is_small)
        return
    args.out.mkdir(parents=True, exist_ok=True)
    report = measure_all(device, args.budget_s, args.out, is_small=is_small)
    write(report, args.out)


def run_checks(device: torch.device, index: int, count: int, *, is_small: bool) -> None:
    """Print one JSON line a check. `is_small`: one check of each operation."""
    from benchmarks.gpu.checks import checks, is_chosen
    from pagoda_kernels.selection import triton_on_cpu

    if importlib.util.find_spec("triton") is None:
        print(json.dumps({"operation": "all", "case": "", "error": "triton is not installed"}), flush=True)
        return
    done: set[str] = set()
    with triton_on_cpu() if is_small else nullcontext():
        for number, check in enumerate(checks(device, is_small=is_small)):
            if number % count != index or (is_small and check.operation in done):
                continue
            done.add(check.operation)
            torch.manual_seed(number)
            row: dict[str, Any] = {"operation": check.operation, "case": check.case}
            try:
                worst = max(pair.error for pair in check.run())
                row |= {"worst": round(worst, 4), "is_right": worst <= 1 and is_chosen(check.operation, device)}
            except Exception as error:  # one kernel that does not compile must not hide the others
                row |= {"is_right": False, "error": f"{type(error).__name__}: {str(error)[-500:]}"}
            print(json.dumps(row), flush=True)


def measure_all(device: torch.device, budget_s: float, directory: Path, *, is_small: bool) -> dict[str, Any]:
    """Every part, guarded."""
    from benchmarks.gpu import (
        backends,
        kernels,
        latents,
        mixed_steps,
        mixtures,
        quantized,
        recurrent,
        small_cache,
        split,
        steps,
        tokens,
    )
    from benchmarks.gpu.tools.timing import Figures

    started = time.monotonic()
    figures = Figures(device)
    report: dict[str, Any] = describe(device) | {"checks": [], "figures": figures.rows, "parts": {}}

    def left() -> float:
        return budget_s - (time.monotonic() - started)

    def check() -> None:
        report["checks"] += gather_checks(directory, 1 if is_small else NUM_CHECKERS, left())

    def compare_tokens() -> None:
        report["checks"] += tokens.compare_tokens(device, is_small=is_small)

    parts: dict[str, Callable[[], None]] = {
        "device": lambda: kernels.measure_device(figures, is_small=is_small),
        "checks": check,
        "tokens": compare_tokens,
        "decode attention": lambda: kernels.measure_decode_attention(figures, is_small=is_small),
        "caches of 8 bits": lambda: small_cache.measure_small_caches(figures, is_small=is_small),
        "latent attention": lambda: latents.measure_latents(figures, is_small=is_small),
        "prefill attention": lambda: kernels.measure_prefill_attention(figures, is_small=is_small),
        "attention of others": lambda: backends.measure_backends(figures, is_small=is_small),
        "quantized linear": lambda: quantized.measure_quantized_linear(figures, is_small=is_small),
        "experts": lambda: mixtures.measure_mixtures(figures, is_small=is_small),
        "recurrent layers": lambda: recurrent.measure_recurrent(figures, is_small=is_small),
        "rows": lambda: kernels.measure_rows(figures, is_small=is_small),
        "steps 0.6B": lambda: steps.measure_steps(figures, "0.6B", is_small=is_small),
        "mixed steps 0.6B": lambda: mixed_steps.measure_mixed_steps(figures, "0.6B", is_small=is_small),
        "steps 8B": lambda: steps.measure_steps(figures, "8B", is_small=is_small),
        "mixed steps 8B": lambda: mixed_steps.measure_mixed_steps(figures, "8B", is_small=is_small),
        "split 8B": lambda: split.measure_split(figures, left(), is_small=is_small),
    }
    for name, part in parts.items():
        if left() <= 0:
            report["parts"][name] = "skipped: the budget is spent"
            continue
        begun = time.monotonic()
        try:
            part()
            report["parts"][name] = f"done in {time.monotonic() - begun:.1f} s"
        except Exception:  # the rest is still worth knowing
            report["parts"][name] = "failed: " + traceback.format_exc()[-2000:]
        print(f"{name}: {report['parts'][name]}", flush=True)
        write(report, directory)  # what is known so far, should the machine go away
    return report


def gather_checks(directory: Path, num_processes: int, timeout_s: float) -> list[dict[str, Any]]:
    """All checks, in several processes; what has not come in time is missing."""
    command = [sys.executable, __file__, "--out", str(directory), "--checks-only"]
    children = [
        subprocess.Popen([*command, f"{index}/{num_processes}"], stdout=subprocess.PIPE, text=True)
        for index in range(num_processes)
    ]
    rows, deadline = [], time.monotonic() + timeout_s
    for child in children:
        try:
            output, _ = child.communicate(timeout=max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            output, _ = child.communicate()
        rows += [json.loads(line) for line in output.splitlines() if line.startswith("{") and line.endswith("}")]
        if child.returncode:
            rows.append({"operation": "all", "case": f"a process ended with {child.returncode}", "is_right": False})
    return rows


def describe(device: torch.device) -> dict[str, Any]:
    """Date, device and versions."""
    from pagoda_kernels.external.adapters import installed_adapters

    versions = {"python": platform.python_version(), "torch": torch.__version__, "cuda": str(torch.version.cuda)}
    if importlib.util.find_spec("triton"):
        versions["triton"] = importlib.metadata.version("triton")
    versions |= {adapter.distribution: adapter.version() for adapter in installed_adapters()}
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "no CUDA device: tiny shapes on the CPU"
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return {"date": today, "device": name, "versions": versions, "command": " ".join(sys.argv)}


def table(report: dict[str, Any]) -> str:
    """The report for people."""
    lines = [f"{report['device']}, {report['date']}, {report['versions']}", ""]
    lines += [f"{name:20} {outcome}" for name, outcome in report["parts"].items()]
    right = [row for row in report["checks"] if row.get("is_right")]
    lines += ["", f"{len(right)} of {len(report['checks'])} checks are right"]
    lines += [f"  WRONG {row}" for row in report["checks"] if not row.get("is_right")]
    columns = ("us", "idle_us", "idle", "of_local", "gb_per_s", "of_copy", "tflops", "of_matmul")
    lines += ["", f"{'part':22} {'case':58}" + "".join(f"{column:>11}" for column in columns)]
    for row in report["figures"]:
        values = "".join(f"{row.get(column, ''):>11}" for column in columns)
        lines.append(f"{row['part']:22} {row['case']:58}{values}")
    return "\n".join(lines) + "\n"


def write(report: dict[str, Any], directory: Path) -> None:
    """Both files."""
    short = re.sub(r"[^a-z0-9]+", "-", report["device"].lower().removeprefix("nvidia ")).strip("-")
    short = "cpu" if report["device"].startswith("no CUDA") else short
    path = directory / f"{short}-{report['date']}.json"
    path.write_text(json.dumps(report, indent=1) + "\n")
    path.with_suffix(".txt").write_text(table(report))


if __name__ == "__main__":
    main()
