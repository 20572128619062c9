"""WatchedFiles: reloads files after they change; invalid content keeps the old one. Knows no gRPC."""

import logging
import os
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from pagoda_common.errors import ConfigError

logger = logging.getLogger(__name__)

Value = TypeVar("Value")


class WatchedFiles(Generic[Value]):
    """The value read from some files. May be asked from any thread; asking costs one stat a file."""

    def __init__(self, paths: Sequence[str | None], read: Callable[[], Value]) -> None:
        """Reads at once, and passes on what `read` raises. None among `paths` is left out."""
        self._paths = [path for path in paths if path is not None]
        self._read = read
        self._seen = self._signature()
        self._value = read()

    def current(self) -> Value:
        """The value; the same object as long as nothing has changed.

        Files that are replaced one after the other do not fit for a moment: then the value stays what it was.
        """
        signature = self._signature()
        if signature != self._seen:
            self._seen = signature
            try:
                self._value = self._read()
            except ConfigError as error:
                logger.warning("%s; what was read before stays in use", error.message)
            else:
                logger.info("read again: %s", ", ".join(self._paths))
        return self._value

    def _signature(self) -> list[tuple[int, ...] | None]:
        return [_identity(path) for path in self._paths]


def _identity(path: str) -> tuple[int, ...] | None:
    """Changes whenever the content does; links are followed, since Kubernetes swaps the directories that they name."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
