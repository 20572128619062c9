"""What sentence-transformers' files say of a checkpoint's embeddings: refused unless it is what the pooler does."""

import json
from pathlib import Path
from typing import Any

from pagoda_common.errors import ModelLoadError

LAST_TOKEN = "lasttoken"
MODULES = frozenset(("Transformer", "Pooling", "Normalize"))
"""Last parts of the types in modules.json that are done here."""


def check_sentence_pooling(directory: Path) -> None:
    """An embedding is the hidden state of the last token, and nothing stands behind it but its normalization.

    Raises:
        ModelLoadError: modules.json or a module's config.json asks for another pooling, or for another module.
    """
    modules = _read(directory / "modules.json", [])
    paths = ["1_Pooling"]
    for module in modules if isinstance(modules, list) else []:
        kind = str(module.get("type", "")) if isinstance(module, dict) else repr(module)
        name = kind.rpartition(".")[2]
        if name not in MODULES:
            raise ModelLoadError(
                f"modules.json has a module of type {kind!r}, which is not supported; supported are "
                f"{', '.join(sorted(MODULES))}"
            )
        if name == "Pooling" and module.get("path"):
            path = str(module["path"])
            if path.startswith("/") or ".." in path.split("/"):
                raise ModelLoadError(f"modules.json names {path[:200]!r}, must be below the checkpoint's directory")
            paths.append(path)
    for path in dict.fromkeys(paths):
        config = _read(directory / path / "config.json", {})
        modes = _modes(config) if isinstance(config, dict) else [repr(config)]
        if modes not in ([], [LAST_TOKEN]):
            raise ModelLoadError(
                f"{path}/config.json asks for pooling {'+'.join(modes)}, which is not supported; only {LAST_TOKEN} is"
            )


def _modes(config: dict[str, Any]) -> list[str]:
    """The poolings that are switched on, of either form: a name, or a switch each."""
    named = config.get("pooling_mode")
    if isinstance(named, str):
        return [named]
    if isinstance(named, list):
        return [str(mode) for mode in named]
    prefix = "pooling_mode_"
    switched = [name.removeprefix(prefix) for name, value in config.items() if name.startswith(prefix) and value]
    return [name.removesuffix("_tokens").removesuffix("_token") for name in switched]


def _read(path: Path, missing: Any) -> Any:
    if not path.is_file():
        return missing
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"cannot read {path}: {error}") from error
