"""Names of the architectures that workers of this installation can run, found in their source: torch takes seconds."""

import ast
import importlib.util
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path

_TABLES = ("FAMILIES", "TOKEN_VECTORS")
_INSTALLED = "pagoda.models"
"""Entry points: models of packages, by architecture."""


@cache
def known_architectures() -> frozenset[str]:
    """The names; none where the worker is not installed here, or is written otherwise."""
    spec = importlib.util.find_spec("pagoda_worker")
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    names: set[str] = set()
    for place in places:
        try:
            tree = ast.parse((Path(place) / "models" / "registry.py").read_text(encoding="utf-8"))
        except (OSError, SyntaxError, ValueError):
            continue
        for statement in tree.body:
            if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.value, ast.Dict):
                continue
            if isinstance(statement.target, ast.Name) and statement.target.id in _TABLES:
                keys = [key.value if isinstance(key, ast.Constant) else None for key in statement.value.keys]
                if not all(isinstance(key, str) for key in keys):
                    return frozenset()  # some are named elsewhere
                names |= {key for key in keys if isinstance(key, str)}
    return frozenset(names)


def installed_architectures() -> frozenset[str]:
    """Those that packages bring."""
    return frozenset(entry_points(group=_INSTALLED).names)


def transformers_may_know(architecture: str) -> bool:
    """Whether the installed transformers names such a model; it is not imported."""
    spec = importlib.util.find_spec("transformers")
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    for place in places:
        for path in (Path(place) / "models" / "auto").glob("*.py"):
            try:
                if f'"{architecture}"' in path.read_text(encoding="utf-8"):
                    return True
            except (OSError, ValueError):
                return True
    return False
