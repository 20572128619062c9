"""How long `pagoda serve` takes to its first answer, as a user sees it: from the command to the response's last byte.

    python benchmarks/startup.py --json benchmarks/results/startup.jsonl

The first round is not counted: it pays for files that are not in memory yet. `-- FLAGS` go to `pagoda serve`.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # so that it also runs as a plain script

import json
import os
import re
import signal
import subprocess
import time
import urllib.request
from dataclasses import dataclass

from benchmarks.tools.figures import Report, median, parser
from pagoda_common.process.children import free_port

READY = re.compile(r"Pagoda serves (.+); ready in ([\d.]+) s")
PHASE = re.compile(r"^  (frontend|scheduler|worker) +(\S.*?)  +([\d.]+) +[\d.]+$")
STOP_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Start:
    """One start, seconds."""

    ready_s: float
    first_answer_s: float
    phases: dict[str, float]
    """By service and phase, as --verbose prints them."""


def start(flags: list[str]) -> Start:
    """Start, ask once, end."""
    port = free_port()
    command = [sys.executable, "-m", "pagoda", "serve", f"--port={port}", "--grpc-port=0", "--verbose", *flags]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    started = time.monotonic()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    ) as serve:
        assert serve.stdout is not None
        try:
            phases: dict[str, float] = {}
            ready_s, model = 0.0, ""
            for line in serve.stdout:
                if found := READY.search(line):
                    model, ready_s = found[1], time.monotonic() - started
                    _ask(port, model)
                    first_answer_s = time.monotonic() - started
                if found := PHASE.match(line.rstrip()):
                    phases[f"{found[1]}: {found[2]}"] = float(found[3])
                if phases and line.split()[:2] == ["all", "ready"]:
                    break
            if not model:
                raise SystemExit(f"pagoda serve ended with exit code {serve.wait()} and was never ready")
        finally:
            serve.send_signal(signal.SIGTERM)
            serve.wait(STOP_TIMEOUT_S)
    return Start(ready_s, first_answer_s, phases)


def _ask(port: int, model: str) -> None:
    body = json.dumps({"model": model, "prompt": "Once upon a time", "max_tokens": 1}).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", data=body, headers=headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        response.read()


def main() -> None:
    """Command line."""
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("flags", nargs="*", metavar="FLAG", help="flags of `pagoda serve`, after --")
    args = arguments.parse_args()
    report = Report(args.json)
    starts = [start(args.flags) for _ in range(args.rounds + 1)][1:]
    report.add("startup: ready", median([one.ready_s for one in starts]), "s", n=len(starts))
    report.add("startup: first answer", median([one.first_answer_s for one in starts]), "s", n=len(starts))
    for name in starts[0].phases:
        took = [one.phases[name] for one in starts if name in one.phases]
        report.add(f"startup: {name}", median(took), "s", n=len(took))


if __name__ == "__main__":
    main()
