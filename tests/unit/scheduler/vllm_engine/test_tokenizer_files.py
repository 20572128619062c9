"""The archive of a tokenizer's files: which files, and the same bytes for the same files."""

import hashlib
import io
import zipfile
from pathlib import Path

import pytest

from pagoda_common.errors import Code, PagodaError
from pagoda_scheduler.vllm_engine import tokenizer_files
from pagoda_scheduler.vllm_engine.tokenizer_files import tokenizer_archive

NAMES = [
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
]


def test_all_files_of_a_tokenizer_are_there_and_no_weights(tmp_path: Path) -> None:
    for name in (*NAMES, "model.safetensors", "README.md"):
        (tmp_path / name).write_text(f"content of {name}")
    data, digest = tokenizer_archive(str(tmp_path))
    assert digest == hashlib.sha256(data).hexdigest()
    archive = zipfile.ZipFile(io.BytesIO(data))
    assert archive.namelist() == NAMES
    for entry in archive.infolist():
        assert archive.read(entry).decode() == f"content of {entry.filename}"
        assert (entry.date_time, entry.compress_type) == ((1980, 1, 1, 0, 0, 0), zipfile.ZIP_DEFLATED)
    assert tokenizer_archive(str(tmp_path)) == (data, digest)


def test_what_is_no_file_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").mkdir()
    (tmp_path / "config.json").write_text("{}")
    data, _ = tokenizer_archive(str(tmp_path))
    assert zipfile.ZipFile(io.BytesIO(data)).namelist() == ["config.json"]


def test_a_model_of_the_hub_has_no_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_files, "resolve_model", lambda name: name)
    with pytest.raises(
        PagodaError, match="model 'org/name' comes from the hub: load its tokenizer from the hub"
    ) as caught:
        tokenizer_archive("org/name")
    assert caught.value.code is Code.FAILED_PRECONDITION
