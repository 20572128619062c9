"""Where in a module of transformers an exception comes from. Knows tracebacks; no models."""

import traceback

from torch import nn


def part_at_fault(error: BaseException) -> str | None:
    """Class name of the innermost part of transformers that was at work; None: there was none."""
    found = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        part = frame.f_locals.get("self")
        if isinstance(part, nn.Module) and type(part).__module__.startswith("transformers."):
            found = type(part).__name__
    return found
