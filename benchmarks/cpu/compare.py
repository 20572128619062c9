"""Pagoda and other engines on the same random-weight checkpoints, workloads and cores of a CPU.

    python benchmarks/cpu/peers.py --peers-dir DIR          # once: a virtual environment for each peer
    python benchmarks/cpu/compare.py --peers-dir DIR --output-dir OUT --json OUT/compare.jsonl

Every round goes through the workloads, and each workload through the engines, in the other order every second round; an
engine computes alone (the others are stopped), after an untimed pass. A peer that is not installed is skipped and said.
Writes compare.md, compare.png (or .svg) and the engines' logs; benchmarks/cpu/README.md has the rest.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))  # so that it also runs as a plain script

import argparse
import json
import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence

from benchmarks.cpu.engines.catalog import OURS, PEERS, VARIANTS, Engine, Setup
from benchmarks.cpu.goals import IN_PROCESS, goals
from benchmarks.cpu.peers import DEFAULT_DIR
from benchmarks.cpu.plot import plot
from benchmarks.cpu.report import report
from benchmarks.cpu.results import Results
from benchmarks.cpu.runner import Runner
from benchmarks.cpu.session import ROOT, EngineFailure
from benchmarks.cpu.shapes import SHAPES, Roofline, Shape
from benchmarks.cpu.workloads import SMOKE, WORKLOADS, Workload
from benchmarks.tools import figures


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = figures.parser(__doc__.splitlines()[0] if __doc__ else "")
    parser.set_defaults(rounds=2)
    parser.add_argument("--models", nargs="+", choices=sorted(SHAPES), default=["125m"], help="shapes (default: 125m)")
    parser.add_argument("--workloads", nargs="+", choices=sorted(WORKLOADS), default=sorted(WORKLOADS))
    parser.add_argument(
        "--peers", nargs="*", choices=sorted(PEERS), default=list(PEERS), help="default: all that are there"
    )
    parser.add_argument(
        "--pagoda-variants",
        nargs="*",
        choices=[name.removeprefix("pagoda-") for name in VARIANTS],
        default=[],
        help="Pagoda with quantized weights or speculation, beside bf16",
    )
    parser.add_argument(
        "--skip", nargs="*", default=[], metavar="ENGINE:WORKLOAD", help="leave these out, for example llama.cpp:W4"
    )
    parser.add_argument(
        "--repeat-below-s",
        type=float,
        default=30.0,
        metavar="S",
        help="what took longer is measured once, not in every round (default: %(default)s)",
    )
    parser.add_argument(
        "--peers-dir", type=Path, default=DEFAULT_DIR, metavar="DIR", help="of peers.py (default: %(default)s)"
    )
    parser.add_argument(
        "--output-dir", type=Path, default=Path("compare-cpu"), metavar="DIR", help="(default: %(default)s)"
    )
    parser.add_argument(
        "--budget-s", type=float, default=float("inf"), metavar="S", help="start no measurement after so many seconds"
    )
    parser.add_argument(
        "--timeout-s", type=float, default=300.0, metavar="S", help="for a measurement (default: %(default)s)"
    )
    parser.add_argument(
        "--threads",
        type=int,
        default=len(os.sched_getaffinity(0)),
        metavar="N",
        help="of every engine (default: all cores)",
    )
    parser.add_argument("--smoke", action="store_true", help="a tiny shape and small workloads, to see that it runs")
    return parser.parse_args()


def measure_roofline() -> Roofline:
    """Probe this machine, in a process of its own."""
    done = subprocess.run([sys.executable, "-m", "benchmarks.cpu.probe"], cwd=ROOT, check=True, stdout=subprocess.PIPE)
    return Roofline(**json.loads(done.stdout))


def chosen_engines(args: argparse.Namespace, setup: Setup) -> Iterator[Engine]:
    """Pagoda, its variants and the peers that are installed."""
    yield OURS
    yield from (VARIANTS[f"pagoda-{name}"] for name in args.pagoda_variants)
    for name in args.peers:
        why = PEERS[name].missing(setup)
        if why is None:
            yield PEERS[name]
        else:
            print(f"skipped: {name}: {why}")


class Comparison:
    """All rounds of one shape."""

    def __init__(
        self, args: argparse.Namespace, shape: Shape, workloads: Mapping[str, Workload], deadline: float
    ) -> None:
        self.results = Results()
        self._args = args
        self._shape = shape
        self._workloads = workloads
        self._deadline = deadline

    def run(self, runner: Runner, engines: Sequence[Engine]) -> None:
        """Measure until all rounds are through or the time is up."""
        for place in range(self._args.rounds):
            for name in self._args.workloads:
                for engine in engines if place % 2 == 0 else reversed(engines):
                    self._visit(runner, engine, self._workloads[name], place)

    def _visit(self, runner: Runner, engine: Engine, workload: Workload, place: int) -> None:
        if f"{engine.name}:{workload.name}" in self._args.skip:
            return
        measurements = []
        if not workload.is_served or engine.serve is not None:
            measurements.append((engine.name, False))
        if workload.is_served and engine is OURS:
            measurements.append((IN_PROCESS, True))
        for name, in_process in measurements if place % 2 == 0 else reversed(measurements):
            self._measure(runner, engine, workload, place, name=name, in_process=in_process)

    def _measure(
        self, runner: Runner, engine: Engine, workload: Workload, place: int, *, name: str, in_process: bool = False
    ) -> None:
        longest = self.results.median(workload.name, name) or 0.0
        key = workload.name, name
        if longest > self._args.repeat_below_s or key in self.results.failures:
            return
        if time.monotonic() > self._deadline:
            if not longest:
                self.results.failures[key] = "the time was up"
            return
        try:
            found = runner.measure(engine, workload, place=place, in_process=in_process)
        except EngineFailure as error:
            self.results.failures[key] = str(error)
            print(f"round {place + 1}  {self._shape.name}  {workload.name}  {name}: failed: {error}", flush=True)
            return
        self.results.add(workload.name, name, found)
        shown = ", ".join(f"{figure} {value:.4g}" for figure, value in found.items())
        print(f"round {place + 1}  {self._shape.name}  {workload.name}  {name}: {shown}", flush=True)


def main() -> None:
    """Measure every shape, write the files, print the tables."""
    args = arguments()
    if args.smoke:
        args.models, args.rounds = ["smoke"], 1
    started = time.monotonic()
    workloads = SMOKE if args.smoke else WORKLOADS
    args.output_dir.mkdir(parents=True, exist_ok=True)
    setup = Setup(peers_dir=args.peers_dir.resolve(), threads=args.threads)
    lines = figures.Report(args.json)
    engines = list(chosen_engines(args, setup))
    for shape in args.models:
        for engine in engines:
            engine.model(setup, SHAPES[shape])  # made before anything is measured
    roofline = measure_roofline()
    lines.add("read", roofline.read_bytes_per_s / 1e9, "GB/s", n=1)
    lines.add("bf16_matmul", roofline.flop_per_s / 1e9, "GFLOP/s", n=1)
    texts, of_shape = [], {}
    versions: dict[str, dict[str, str]] = {}
    for name in args.models:
        shape = SHAPES[name]
        comparison = Comparison(args, shape, workloads, started + args.budget_s)
        of_shape[name] = results = comparison.results
        logs = args.output_dir.resolve() / "logs"
        with Runner(setup=setup, shape=shape, logs=logs, timeout_s=args.timeout_s) as runner:
            comparison.run(runner, engines)
        versions |= runner.versions
        for figure, value, unit, count in results.figures():
            lines.add(f"{name}_{figure}", value, unit, n=count)
        peers = [engine.name for engine in engines if engine.name in PEERS]
        found = list(goals(results, shape, workloads, roofline, peers))
        sizes = {engine.name: engine.weight_bytes for engine in engines}
        texts.append(report(results, shape, workloads, roofline, found, sizes))
    head = heading(roofline, versions, workloads, args)
    text = "\n".join([head, *texts])
    (args.output_dir / "compare.md").write_text(text)
    print("\n" + text)
    print(f"{args.output_dir / 'compare.md'}, {plot(of_shape, args.output_dir)}; {time.monotonic() - started:.0f} s")


def heading(
    roofline: Roofline,
    versions: Mapping[str, Mapping[str, str]],
    workloads: Mapping[str, Workload],
    args: argparse.Namespace,
) -> str:
    """Machine, limits, versions and workloads."""
    lines = [
        "# Engines on a CPU",
        "",
        f"{figures.machine()}, {args.threads} threads, {args.rounds} rounds; reads "
        f"{roofline.read_bytes_per_s / 1e9:.1f} GB/s, multiplies bf16 matrices at "
        f"{roofline.flop_per_s / 1e9:.0f} GFLOP/s. Greedy, end of sequence ignored.",
        "",
    ]
    for engine, found in versions.items():
        if found:
            lines.append(f"- {engine}: " + ", ".join(f"{package} {number}" for package, number in found.items()))
    return "\n".join([*lines, "", *(f"- {name}: {workloads[name].title}" for name in args.workloads), ""])


if __name__ == "__main__":
    main()
