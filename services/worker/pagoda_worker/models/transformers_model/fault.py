"""Finds the transformers module that raised an exception. Knows tracebacks; no models."""

import traceback

from torch import nn


def part_at_fault(error: BaseException) -> str | None:
    """Class name of the innermost transformers module in the traceback; None if there is none."""
    found = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        part = frame.f_locals.get("self")
        if isinstance(part, nn.Module) and type(part).__module__.startswith("transformers."):
            found = type(part).__name__
    return found
