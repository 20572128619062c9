"""Helpers of vLLM that scripts import: random_uuid, Counter, get_open_port, FlexibleArgumentParser."""

import itertools
import uuid
from collections.abc import Iterator

from pagoda.utils.argparse_utils import FlexibleArgumentParser
from pagoda_common.process.children import free_port

__all__ = ["Counter", "FlexibleArgumentParser", "get_open_port", "random_uuid"]


def random_uuid() -> str:
    """A fresh id of 32 hexadecimal digits, for requests."""
    return uuid.uuid4().hex


def get_open_port() -> int:
    """A TCP port that is free now on loopback."""
    return free_port()


class Counter(Iterator[int]):
    """Counts up from `start`, one for each next()."""

    def __init__(self, start: int = 0) -> None:
        self._numbers = itertools.count(start)

    def __next__(self) -> int:
        return next(self._numbers)
