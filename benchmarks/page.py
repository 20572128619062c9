"""Write the tables and pictures of docs/benchmarks.md from benchmarks/results: ``python -m benchmarks.page``.

Measures nothing. The test tests/unit/docs/test_benchmarks_page.py fails when the page or a picture is older than the
results.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.tools.bars import Bars

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "benchmarks.md"
PICTURES = ROOT / "docs" / "assets" / "benchmarks"
MACHINES = {
    "AMX": ("cpu_compare.jsonl", "Xeon"),
    "Zen 5": ("cpu_compare_zen5.jsonl", "EPYC"),
    "Zen 4": ("cpu_compare_zen4.jsonl", "Zen 4"),
}
"""File of each machine, and a part of the machine's name in it."""
SHAPES = {"125m": "125M", "0.6b": "0.6B"}
WORKLOADS = ("W1", "W2", "W3", "W4", "W5")
ENGINES = {"vllm": "vLLM", "openvino": "OpenVINO", "llama.cpp": "llama.cpp", "transformers": "transformers"}
EMBEDDERS = {
    "pagoda": "Pagoda, library",
    "pagoda-http": "Pagoda, HTTP",
    "openvino": "OpenVINO",
    "sentence-transformers": "sentence-transf.",
    "onnxruntime": "onnxruntime",
}
TEXTS = {"BGE-small": "bge-small bfloat16 500 texts", "BGE-base": "bge-base bfloat16 200 texts"}
FAULTS = {
    "kill-worker": "worker killed",
    "kill-scheduler": "scheduler killed",
    "kill-both": "both killed",
    "stop-worker": "worker stopped",
    "stop-scheduler": "scheduler stopped",
    "drop-all": "connections cut",
}


def lines(name: str, machine: str) -> Iterator[dict[str, Any]]:
    """The figures of a file for the machines with `machine` in their names, oldest first."""
    for line in (RESULTS / name).read_text(encoding="utf-8").splitlines():
        figure = json.loads(line)
        if machine in figure["machine"]:
            yield figure


def ratio(machine: str, case: str, slower: str, faster: str = "pagoda") -> float | None:
    """Time of one engine by that of another in the last run that measured both; None if no run did.

    A run begins by measuring memory.
    """
    names = [f"{case}_{engine}_seconds" for engine in (slower, faster)]
    found, run = None, dict[str, float]()
    for figure in lines(*MACHINES[machine]):
        run = {} if figure["name"] == "read" else run
        run[figure["name"]] = figure["value"]
        if figure["name"] in names and all(name in run for name in names):
            found = run[names[0]] / run[names[1]]
    return found


def ratios(cases: dict[str, tuple[str, str, str]]) -> dict[str, float]:
    """Times of engines by Pagoda's, by name; without those that were not measured."""
    found = {name: ratio(*case) for name, case in cases.items()}
    return {name: value for name, value in found.items() if value is not None}


def table(head: Iterable[str], cells: Iterable[Iterable[str]]) -> str:
    """A table of Markdown."""
    names = list(head)
    return "\n".join("| " + " | ".join(row) + " |" for row in (names, ["---"] * len(names), *cells))


def engine_table() -> str:
    """Times as fast as each engine, by machine and shape."""
    cells = []
    for machine in MACHINES:
        for shape, size in SHAPES.items():
            for engine, name in ENGINES.items():
                found = ratios({work: (machine, f"{shape}_{work}", engine) for work in WORKLOADS})
                if found:
                    row = (f"{found[work]:.2f}" if work in found else "" for work in WORKLOADS)
                    cells.append((machine, size, name, *row))
    return table(("machine", "model", "than", *WORKLOADS), cells)


def weights_table() -> str:
    """Times as fast with integer weights as with bfloat16."""
    cases = [(shape, work) for shape in SHAPES for work in ("W1", "W2")]
    cells = []
    for machine in MACHINES:
        for bits in ("int8", "int4"):
            row = (ratio(machine, "_".join(case), "pagoda", f"pagoda-{bits}") for case in cases)
            cells.append((machine, bits, *(f"{value:.2f}" for value in row if value is not None)))
    return table(("machine", "weights", *(f"{SHAPES[shape]}, {work}" for shape, work in cases)), cells)


def embeddings(model: str) -> dict[str, float]:
    """Seconds for the texts of an encoder, by engine, on Zen 5."""
    figures = lines("embeddings.jsonl", "EPYC")
    newest = {figure["name"]: figure["value"] for figure in figures if "Zen 4" not in figure["machine"]}
    return {name: newest[f"{TEXTS[model]}, {engine}"] for engine, name in EMBEDDERS.items()}


def embeddings_table() -> str:
    """Seconds by engine and encoder."""
    columns = [embeddings(model) for model in TEXTS]
    return table(
        ("engine", *TEXTS), ((name, *(f"{column[name]:.2f}" for column in columns)) for name in EMBEDDERS.values())
    )


def faults() -> dict[str, dict[str, Any]]:
    """Figures by kind of fault."""
    found = json.loads((RESULTS / "chaos.json").read_text(encoding="utf-8"))["table"]
    return {name: found[fault] for fault, name in FAULTS.items()}


def faults_table() -> str:
    """Pauses by kind of fault."""
    cells = (
        (name, str(one["streams"]), f"{one['stall_p50_s']:.2f}", f"{one['stall_p99_s']:.2f}")
        for name, one in faults().items()
    )
    return table(("fault", "streams", "median pause, s", "99 %, s"), cells)


def pictures() -> dict[str, str]:
    """Every picture of the page by its file's name."""
    engines = [
        (work, ratios({name: ("AMX", f"0.6b_{work}", engine) for engine, name in ENGINES.items()}))
        for work in WORKLOADS
    ]
    machines = [(work, ratios({name: (name, f"0.6b_{work}", "vllm") for name in MACHINES})) for work in WORKLOADS]
    encoder = [(name, {"s": seconds}) for name, seconds in embeddings("BGE-small").items()]
    pauses = [(name, {"median": one["stall_p50_s"], "99 %": one["stall_p99_s"]}) for name, one in faults().items()]
    shown = {
        "engines": Bars(title="Time of other engines (Pagoda's is 1), 0.6B, AMX", groups=engines, mark=1),
        "machines": Bars(title="Time of vLLM (Pagoda's is 1), 0.6B", groups=machines, mark=1),
        "embeddings": Bars(title="500 texts through BGE-small, Zen 5", groups=encoder, unit=" s"),
        "faults": Bars(title="Pause of a stream after a fault", groups=pauses, unit=" s"),
    }
    return {f"{name}.svg": bars.svg() for name, bars in shown.items()}


PARTS = {"engines": engine_table, "weights": weights_table, "embeddings": embeddings_table, "faults": faults_table}


def page() -> str:
    """The page as it should be."""
    text = PAGE.read_text(encoding="utf-8")
    for name, make in PARTS.items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}\n{make()}\n{end}{rest.partition(end)[2]}"
    return text


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    for name, picture in pictures().items():
        (PICTURES / name).write_text(picture, encoding="utf-8")
