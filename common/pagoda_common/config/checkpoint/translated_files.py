"""Translates checkpoints of other formats to the usual one: config and tokenizer are written once into the cache.

So every process reads them like any checkpoint; weights stay in place. Knows no specific format.
"""

import errno
import hashlib
import json
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pagoda_common.errors import ModelLoadError

logger = logging.getLogger(__name__)

VERSION = 1
"""Version of the written files: files of another version are written again."""

TOKENIZER_FAULT = "tokenizer_fault.txt"
"""In place of a tokenizer: why it cannot be read."""


def translated_directory(files: Sequence[Path], translate: Callable[[], Mapping[str, str]]) -> Path:
    """A directory with the results of `translate` and links to `files`; made again after one of these has changed.

    Args:
        files: absolute paths.
        translate: texts by the names of their files.

    Raises:
        ModelLoadError: a file cannot be read, or there is no place for the directory.
    """
    try:
        states = [(str(file), (found := file.stat()).st_size, found.st_mtime_ns) for file in files]
    except OSError as error:
        message = f"{error.filename} cannot be read: {error.strerror or error}"
        raise ModelLoadError(message, field="model") from error
    cache = _cache()
    directory = cache / hashlib.sha256(json.dumps([VERSION, states]).encode()).hexdigest()[:32]
    if not directory.is_dir():
        _write(files, translate(), cache, directory)
    return directory


def cache_home() -> Path:
    """Where such directories are, unless it cannot be written to."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pagoda" / "translated"


def _cache() -> Path:
    """A directory of this user alone."""
    user = os.geteuid()
    places = [cache_home(), Path(tempfile.gettempdir()) / f"pagoda-translated-{user}"]
    reasons = []
    for place in places:
        try:
            place.mkdir(parents=True, mode=0o700, exist_ok=True)
            found = place.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != user or found.st_mode & 0o022:
                raise PermissionError(errno.EPERM, "others may write to it")
            if not os.access(place, os.W_OK):
                raise PermissionError(errno.EACCES, "it cannot be written to")
            return place
        except OSError as error:
            reasons.append(f"{place}: {error.strerror or error}")
    message = f"there is no place for the config and tokenizer of this model: {'; '.join(reasons)}"
    raise ModelLoadError(message, field="model")


def _write(files: Sequence[Path], texts: Mapping[str, str], cache: Path, directory: Path) -> None:
    """Make the directory, whole or not at all; another process may do the same."""
    made = Path(tempfile.mkdtemp(prefix=".new-", dir=cache))
    try:
        for name, text in texts.items():
            (made / name).write_text(text, encoding="utf-8")
        for file in files:
            (made / file.name).symlink_to(file)
        made.rename(directory)
    except OSError as error:
        shutil.rmtree(made, ignore_errors=True)
        if not directory.is_dir():
            raise ModelLoadError(f"{directory} cannot be written: {error.strerror or error}", field="model") from error
    logger.info("the config of %s is in %s", files[0], directory)
