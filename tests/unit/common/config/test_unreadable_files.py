"""A file that a flag names and that cannot be read is one sentence, which names flag and file, whatever is wrong."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pagoda.bench.requests import read_file
from pagoda_common.config.checkpoint.generation_config import resolve_generation_config
from pagoda_common.config.flags.settings import SettingError, file_defaults
from pagoda_common.errors import ConfigError
from pagoda_common.rpc.bearer import read_keys
from pagoda_common.text.chat_template import load_chat_template

READERS: dict[str, tuple[Callable[[Path], Any], type[Exception], str]] = {
    "keys": (lambda path: read_keys(str(path), field="api_key_file"), ConfigError, "api_key_file"),
    "template": (lambda path: load_chat_template(str(path)), ConfigError, "chat_template"),
    "generation": (
        lambda path: resolve_generation_config("", source=str(path.parent), override=""),
        ConfigError,
        "generation_config",
    ),
    "settings": (lambda path: file_defaults(str(path), {}), SettingError, ""),
    "dataset": (
        lambda path: read_file(argparse.Namespace(dataset_path=str(path), dataset_name="custom")),
        ConfigError,
        "dataset_path",
    ),
}


def no_file(path: Path) -> None:
    """Nothing is there."""


def a_folder(path: Path) -> None:
    path.mkdir()


def no_utf8(path: Path) -> None:
    path.write_bytes(b"a: \xff\xfe")


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("make", [no_file, a_folder, no_utf8])
def test_what_cannot_be_read_is_one_error_of_its_flag(tmp_path: Path, name: str, make: Callable[[Path], None]) -> None:
    read, kind, field = READERS[name]
    path = tmp_path / "generation_config.json"
    make(path)
    with pytest.raises(kind) as caught:
        read(path)
    message = str(caught.value)
    assert str(tmp_path) in message or name == "dataset"
    assert "\n" not in message
    if isinstance(caught.value, ConfigError):
        assert caught.value.field == field


def test_keys_are_lines_without_comments_and_there_must_be_one(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# first\n\n one \n#two\nthree # four\n")
    assert read_keys(str(path), field="api_key_file") == ("one", "three # four")
    for empty in ("", "\n \n", "# one\n  # two"):
        path.write_text(empty)
        with pytest.raises(ConfigError, match=r"^operator_key_file '.*keys' has no key$") as caught:
            read_keys(str(path), field="operator_key_file")
        assert caught.value.field == "operator_key_file"
