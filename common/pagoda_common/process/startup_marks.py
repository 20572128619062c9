"""Progress marks of a service's start on stderr, for `pagoda serve --verbose`."""

import sys
import time
from collections.abc import Mapping

VARIABLE = "PAGODA_STARTUP_MARKS"
"""Set for a service that should print marks."""
_PREFIX = "startup mark "

_is_on = False


def enable_marks(environment: Mapping[str, str]) -> None:
    """Print marks from now on, if the environment asks for them."""
    global _is_on
    _is_on = bool(environment.get(VARIABLE))


def mark(phase: str) -> None:
    """`phase` has just ended."""
    if _is_on:
        print(f"{_PREFIX}{time.time():.4f} {phase}", file=sys.stderr, flush=True)


def parse_mark(line: str) -> tuple[float, str] | None:
    """Time (seconds since the epoch) and phase of a line that `mark` has printed; None for any other line."""
    if not line.startswith(_PREFIX):
        return None
    moment, _, phase = line.removeprefix(_PREFIX).partition(" ")
    return float(moment), phase
