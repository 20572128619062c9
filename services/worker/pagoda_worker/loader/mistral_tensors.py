"""Reads tensors of consolidated.safetensors under transformers' names, with query and key rows in its order."""

import json
from collections.abc import Mapping
from pathlib import Path

from pagoda_common.errors import ModelLoadError
from pagoda_common.mistral.params import PARAMS, checkpoint_name
from pagoda_worker.loader.stored import StoredTensor


def is_mistral(files: list[Path]) -> bool:
    """Whether files of weights are in Mistral's form."""
    return files[0].name.startswith("consolidated") and (files[0].parent / PARAMS).exists()


def mistral_tensors(found: Mapping[str, StoredTensor], directory: Path) -> dict[str, StoredTensor]:
    """The same, renamed.

    Raises:
        ModelLoadError: rows of queries or keys are not a multiple of the head size.
    """
    head_dim = int(json.loads((directory / "config.json").read_text(encoding="utf-8")).get("head_dim") or 0)
    renamed = {}
    for name, tensor in found.items():
        if name.endswith((".attention.wq.weight", ".attention.wk.weight", ".attention.wq.bias", ".attention.wk.bias")):
            if not head_dim or head_dim % 2 or tensor.shape[0] % head_dim:
                raise ModelLoadError(
                    f"{name} has {tensor.shape[0]} rows, must be a multiple of the head size, {head_dim}"
                )
            tensor = tensor._replace(paired_rows=head_dim)
        renamed[checkpoint_name(name)] = tensor
    return renamed
