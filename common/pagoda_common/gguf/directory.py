"""Turns a GGUF file (or several parts) into a checkpoint directory."""

import json
import os
import re
import struct
from pathlib import Path

from pagoda_common.config.checkpoint.translated_files import TOKENIZER_FAULT, translated_directory
from pagoda_common.errors import ModelLoadError
from pagoda_common.gguf.config import ROPE_FACTORS, model_config
from pagoda_common.gguf.file import GgufFile
from pagoda_common.gguf.tokenizer import tokenizer_files

_SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
MAX_ROPE_FACTORS = 4096


def gguf_directory(path: Path) -> Path:
    """The directory of a GGUF file, or of the first one of several.

    Raises:
        ModelLoadError: the file cannot be read, or there is no place for the directory.
    """
    files = _shards(path)

    def translate() -> dict[str, str]:
        file = GgufFile.read(files[0])
        config = {"config.json": json.dumps(model_config(file, _rope_factors(file)))}
        try:
            return config | tokenizer_files(file)
        except ModelLoadError as error:
            if error.field != "tokenizer":
                raise
            return config | {TOKENIZER_FAULT: error.message}  # --tokenizer may name another one

    return translated_directory(files, translate)


def _shards(path: Path) -> list[Path]:
    """All files of a model, whose first one has the metadata."""
    whole = Path(os.path.abspath(path))
    match = _SPLIT.fullmatch(whole.name)
    if match is None:
        return [whole]
    stem, number, count = match.groups()
    if int(number) != 1:
        message = f"{path} is a later part of a model: {stem}-00001-of-{count}.gguf is its first"
        raise ModelLoadError(message, field="model")
    files = [whole.with_name(f"{stem}-{index:05}-of-{count}.gguf") for index in range(1, int(count) + 1)]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ModelLoadError(f"parts of {path} are missing: {', '.join(missing[:8])}", field="model")
    return files


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
