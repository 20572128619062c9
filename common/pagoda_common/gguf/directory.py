"""A GGUF file as the directory of a checkpoint: config, tokenizer, and links to the file, written once into the cache.

So every process reads a GGUF file as it reads any checkpoint; weights stay where they are.
"""

import errno
import hashlib
import json
import logging
import os
import re
import shutil
import stat
import struct
import tempfile
from pathlib import Path

from pagoda_common.errors import ModelLoadError
from pagoda_common.gguf.config import ROPE_FACTORS, model_config
from pagoda_common.gguf.file import GgufFile
from pagoda_common.gguf.tokenizer import tokenizer_files

logger = logging.getLogger(__name__)

VERSION = 1
"""Of what is written: a new one is written anew."""
_SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
MAX_ROPE_FACTORS = 4096


def gguf_directory(path: Path) -> Path:
    """The directory of a GGUF file, or of the first one of several.

    Raises:
        ModelLoadError: the file cannot be read, or there is no place for the directory.
    """
    files = _shards(path)
    try:
        states = [(str(file), (found := file.stat()).st_size, found.st_mtime_ns) for file in files]
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error.strerror or error}", field="model") from error
    digest = hashlib.sha256(json.dumps([VERSION, states]).encode()).hexdigest()[:32]
    cache = _cache()
    directory = cache / digest
    if not directory.is_dir():
        _write(files, cache, directory)
    return directory


def _shards(path: Path) -> list[Path]:
    """All files of a model, whose first one has the metadata."""
    whole = Path(os.path.abspath(path))
    match = _SPLIT.fullmatch(whole.name)
    if match is None:
        return [whole]
    stem, number, count = match.groups()
    if int(number) != 1:
        raise ModelLoadError(
            f"{path} is a later part of a model: {stem}-00001-of-{count}.gguf is its first", field="model"
        )
    files = [whole.with_name(f"{stem}-{index:05}-of-{count}.gguf") for index in range(1, int(count) + 1)]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ModelLoadError(f"parts of {path} are missing: {', '.join(missing[:8])}", field="model")
    return files


def cache_home() -> Path:
    """Where directories of GGUF files are, unless it cannot be written to."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pagoda" / "gguf"


def _cache() -> Path:
    """A directory of this user alone."""
    user = os.geteuid()
    places = [cache_home(), Path(tempfile.gettempdir()) / f"pagoda-gguf-{user}"]
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
    raise ModelLoadError(
        f"there is no place for what a GGUF file says of its model: {'; '.join(reasons)}", field="model"
    )


def _write(files: list[Path], cache: Path, directory: Path) -> None:
    """Make the directory, whole or not at all; another process may do the same."""
    file = GgufFile.read(files[0])
    texts = {"config.json": json.dumps(model_config(file, _rope_factors(file)))} | tokenizer_files(file)
    made = Path(tempfile.mkdtemp(prefix=".new-", dir=cache))
    try:
        for name, text in texts.items():
            (made / name).write_text(text, encoding="utf-8")
        for shard in files:
            (made / shard.name).symlink_to(shard)
        made.rename(directory)
    except OSError as error:
        shutil.rmtree(made, ignore_errors=True)
        if not directory.is_dir():
            raise ModelLoadError(f"{directory} cannot be written: {error.strerror or error}", field="model") from error
    logger.info("%s is a GGUF file: its config and tokenizer are in %s", files[0], directory)


def _rope_factors(file: GgufFile) -> list[float] | None:
    tensor = file.tensors.get(ROPE_FACTORS)
    if tensor is None:
        return None
    if tensor.type.name != "F32" or len(tensor.shape) != 1 or tensor.shape[0] > MAX_ROPE_FACTORS:
        raise ModelLoadError(
            f"{file.path}: {ROPE_FACTORS} is {tensor.type.name} of shape {list(tensor.shape)}, must be F32 of at most "
            f"{MAX_ROPE_FACTORS} values"
        )
    with file.path.open("rb") as opened:
        opened.seek(tensor.offset)
        return list(struct.unpack(f"<{tensor.shape[0]}f", opened.read(tensor.num_bytes)))
