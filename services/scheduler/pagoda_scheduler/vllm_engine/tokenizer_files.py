"""Packs a tokenizer's files into an archive, for routers that cannot read the model's directory."""

import hashlib
import io
import zipfile
from pathlib import Path

from pagoda_common.config.checkpoint.model_files import resolve_model
from pagoda_common.errors import Code, PagodaError

_NAMES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
    "config.json",
    "generation_config.json",
)
_TIMESTAMP = (1980, 1, 1, 0, 0, 0)
"""Fixed timestamp, so that the same files always make the same archive."""


def tokenizer_archive(name: str) -> tuple[bytes, str]:
    """The zip archive of model `name`'s tokenizer files and its SHA-256 in hexadecimal.

    Raises:
        PagodaError: FAILED_PRECONDITION, the model is not in a local directory; a router loads it from the hub itself.
    """
    directory = resolve_model(name)
    if not isinstance(directory, Path):
        raise PagodaError(
            f"model {name!r} comes from the hub: load its tokenizer from the hub", code=Code.FAILED_PRECONDITION
        )
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in (directory / known for known in _NAMES):
            if file.is_file():
                entry = zipfile.ZipInfo(file.name, date_time=_TIMESTAMP)
                entry.compress_type = zipfile.ZIP_DEFLATED
                archive.writestr(entry, file.read_bytes())
    data = buffer.getvalue()
    return data, hashlib.sha256(data).hexdigest()
