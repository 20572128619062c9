"""What every benchmark prints and appends: one JSON line a figure."""

import argparse
import datetime
import json
import os
import platform
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

from pagoda_common.version import VERSION


def parser(description: str) -> argparse.ArgumentParser:
    """Flags that every benchmark has."""
    result = argparse.ArgumentParser(description=description)
    result.add_argument("--json", type=Path, metavar="PATH", help="append one JSON line a figure to this file")
    result.add_argument("--rounds", type=int, default=3, metavar="N", help="repetitions of each measurement")
    return result


def machine() -> str:
    """This machine in words."""
    names = [line.split(":", 1)[1].strip() for line in _cpuinfo() if line.startswith("model name")]
    return f"{os.cpu_count()} x {names[0] if names else platform.processor() or platform.machine()}"


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


@dataclass
class Report:
    """Figures of one run."""

    path: Path | None
    lines: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        versions = ", ".join(f"{name} {version(name)}" for name in ("grpcio", "protobuf", "torch"))
        print(f"machine: {machine()}; Python {platform.python_version()}; pagoda {VERSION}, {versions}")
        print(f"command: python {' '.join(sys.argv)}")

    def add(self, name: str, value: float, unit: str, *, n: int) -> None:
        """One figure: `n` is its number of samples."""
        print(f"{name:40} {value:12.4g} {unit}")
        figure = {
            "name": name,
            "value": round(value, 6),
            "unit": unit,
            "n": n,
            "machine": machine(),
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        }
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(json.dumps(figure) + "\n")


def median(values: Sequence[float]) -> float:
    """Median, for values that are there."""
    return statistics.median(values)
