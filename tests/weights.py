"""Copies of the embedded model with other weights, or with something wrong: what ReloadWeights may be given."""

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pagoda_common.config.checkpoint.model_files import resolve_model
from pagoda_common.config.engine_config import EMBEDDED_MODEL

FILE = "model.safetensors"


def embedded_model() -> Path:
    """The directory of the embedded model."""
    directory = resolve_model(EMBEDDED_MODEL)
    assert isinstance(directory, Path)
    return directory


def same_weights(directory: Path) -> Path:
    """A copy."""
    directory.mkdir(parents=True)
    for name in ("config.json", "generation_config.json", FILE):
        shutil.copy(embedded_model() / name, directory)
    return directory


def other_weights(directory: Path) -> Path:
    """A copy that thinks the opposite: the last norm has its sign turned."""
    same_weights(directory)
    data = bytearray((directory / FILE).read_bytes())
    (length,) = struct.unpack("<Q", data[:8])
    entry = json.loads(data[8 : 8 + length])["model.norm.weight"]
    assert entry["dtype"] == "BF16"
    start, end = (8 + length + offset for offset in entry["data_offsets"])
    data[start + 1 : end : 2] = bytes(byte ^ 0x80 for byte in data[start + 1 : end : 2])
    (directory / FILE).write_bytes(data)
    return directory


def with_config(directory: Path, **changes: Any) -> Path:
    """A copy with another config.json."""
    path = same_weights(directory) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return directory


def with_header(directory: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy whose tensors are called or shaped otherwise."""
    same_weights(directory)
    data = (directory / FILE).read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (directory / FILE).write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
    return directory


def cut_short(directory: Path) -> Path:
    """A copy that a full disk has ended early."""
    same_weights(directory)
    data = (directory / FILE).read_bytes()
    (directory / FILE).write_bytes(data[: len(data) // 2])
    return directory
