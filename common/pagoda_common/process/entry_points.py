"""What installed packages offer by entry points. Knows no group."""

import importlib.metadata
import sys
from functools import lru_cache


def entry_points(*, group: str) -> importlib.metadata.EntryPoints:
    """Those of one group. The packages, often hundreds, are looked through once for each search path."""
    return _by_group(tuple(sys.path)).get(group, importlib.metadata.EntryPoints(()))


@lru_cache(maxsize=4)
def _by_group(path: tuple[str, ...]) -> dict[str, importlib.metadata.EntryPoints]:
    found = importlib.metadata.entry_points()
    return {group: found.select(group=group) for group in found.groups}
