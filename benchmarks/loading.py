"""Time and peak memory while a worker loads a checkpoint, beside `cat` of its files.

    python benchmarks/loading.py DIRECTORY --quantization int8 --json benchmarks/results/loading.jsonl

Each round loads in a process of its own. Memory is the most that the process holds above what it held before, in
multiples of the files; on Linux alone. A small cache is made at the end, since weights that are not in huge pages yet
are moved there before.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # so that it also runs as a plain script

import json
import subprocess
import time

from benchmarks.tools.figures import Report, median, parser

CHILD = """
import json, sys, time
from pathlib import Path
from pagoda_common.config.engine_config import EngineConfig, ModelConfig
from pagoda_worker.worker import Worker

def kilobytes(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(name)))

worker = Worker()
quantization = sys.argv[2] or None
worker.init_device(EngineConfig(model=ModelConfig(model=sys.argv[1], device="cpu", quantization=quantization)))
Path("/proc/self/clear_refs").write_text("5")
before, started = kilobytes("VmRSS"), time.monotonic()
facts = worker.load_model(lambda loaded, total: None)
seconds = time.monotonic() - started
peak = (kilobytes("VmHWM") - before) * 1024
worker.initialize_cache(num_blocks=16, num_cpu_blocks=0)
to_cache = time.monotonic() - started
print(json.dumps({"seconds": seconds, "to_cache": to_cache, "peak": peak, "held": facts.weight_bytes}))
"""


def cat_s(files: list[Path]) -> float:
    """Seconds that `cat` takes."""
    started = time.monotonic()
    subprocess.run(["cat", *map(str, files)], stdout=subprocess.DEVNULL, check=True)
    return time.monotonic() - started


def load(directory: Path, quantization: str) -> dict[str, float]:
    """One load: seconds, and bytes at the peak and at the end."""
    command = [sys.executable, "-c", CHILD, str(directory), quantization]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def main() -> None:
    """Command line."""
    arguments = parser(__doc__.splitlines()[0])
    arguments.add_argument("directory", type=Path)
    arguments.add_argument("--quantization", default="", help="as of pagoda serve")
    args = arguments.parse_args()
    report = Report(args.json)
    files = sorted(args.directory.glob("*.safetensors"))
    size = sum(file.stat().st_size for file in files)
    cat_s(files)  # the first one pays for files that are not in memory yet
    cats = [cat_s(files) for _ in range(args.rounds)]
    loads = [load(args.directory, args.quantization) for _ in range(args.rounds)]
    name = f"loading {args.quantization or 'floats'}"
    seconds = median([one["seconds"] for one in loads])
    report.add(f"{name}: seconds", seconds, "s", n=args.rounds)
    report.add(f"{name}: seconds to a cache", median([one["to_cache"] for one in loads]), "s", n=args.rounds)
    report.add(f"{name}: rate", size / 1e9 / seconds, "GB/s", n=args.rounds)
    report.add(f"{name}: by cat", seconds / median(cats), "x", n=args.rounds)
    report.add(f"{name}: peak memory by file", median([one["peak"] for one in loads]) / size, "x", n=args.rounds)
    report.add(f"{name}: held by file", loads[0]["held"] / size, "x", n=args.rounds)


if __name__ == "__main__":
    main()
