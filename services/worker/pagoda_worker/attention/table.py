"""AttentionTable: measured times of each package's attention kernels by step shape, in memory and on disk.

Knows names and numbers; no kernels.
"""

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pagoda_worker.steps.step import IntArray

OURS = "triton"
"""The name of Pagoda's own kernels."""


class StepShape(NamedTuple):
    """The properties of a step that decide how long its attention takes."""

    kind: str
    """decode: one query token per sequence; prompt: several per sequence; mixed: both."""
    num_tokens: int
    """Number of query tokens."""
    num_keys: int
    """Keys per query token, averaged over query tokens."""

    def distance(self, other: "StepShape") -> float:
        """Distance between two shapes: the number of doublings in tokens and in keys."""
        tokens, keys = math.log2(self.num_tokens / other.num_tokens), math.log2(self.num_keys / other.num_keys)
        return abs(tokens) + abs(keys)


def shape_of(query_lens: IntArray, seq_lens: IntArray) -> StepShape:
    """The shape of a step of at least one sequence."""
    num_tokens = int(query_lens.sum())
    kind = "decode" if num_tokens == query_lens.size else "mixed" if query_lens.min() == 1 else "prompt"
    return StepShape(kind, num_tokens, max(1, int((query_lens * seq_lens).sum()) // num_tokens))


@dataclass(frozen=True, slots=True)
class AttentionTable:
    """The measurements."""

    rows: Mapping[StepShape, Mapping[str, float]]
    """Seconds of all layers of one step, work on the host included, by package."""

    def fastest(self, shape: StepShape, names: Iterable[str]) -> str:
        """The fastest of `names` and OURS at the nearest measured shape of this kind; OURS if none was measured."""
        near = min((row for row in self.rows if row.kind == shape.kind), key=shape.distance, default=None)
        if near is None:
            return OURS
        seconds = self.rows[near]
        return min((OURS, *names), key=lambda name: seconds.get(name, math.inf))

    def save(self, directory: Path, key: Mapping[str, Any]) -> Path:
        """Store the table for `load` with the same key. Raises OSError."""
        directory.mkdir(parents=True, exist_ok=True)
        path = _path(directory, key)
        rows = [{**shape._asdict(), "seconds": dict(seconds)} for shape, seconds in self.rows.items()]
        part = path.with_suffix(f".{os.getpid()}")  # several workers may start at the same time
        part.write_text(json.dumps({"key": key, "rows": rows}, indent=1) + "\n", encoding="utf-8")
        part.replace(path)
        return path


def load_table(directory: Path, key: Mapping[str, Any]) -> AttentionTable | None:
    """The table stored under this key; None if there is none or it is unreadable."""
    try:
        saved = json.loads(_path(directory, key).read_text(encoding="utf-8"))
        if saved["key"] != key:
            return None
        rows = {
            StepShape(str(row["kind"]), int(row["num_tokens"]), int(row["num_keys"])): {
                str(name): float(seconds) for name, seconds in row["seconds"].items()
            }
            for row in saved["rows"]
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return AttentionTable(rows)


def _path(directory: Path, key: Mapping[str, Any]) -> Path:
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return directory / f"{digest[:16]}.json"
