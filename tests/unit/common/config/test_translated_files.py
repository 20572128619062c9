"""Directories that are made of a model's own files: once, whole or not at all, and where no one else may write."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from pagoda_common.config.checkpoint.translated_files import cache_home, translated_directory
from pagoda_common.errors import ModelLoadError


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """The cache of the user, and the directory for temporary files."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    return tmp_path / "cache" / "pagoda" / "translated", tmp_path / "tmp"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    made = tmp_path / "model.bin"
    made.write_text("weights")
    return made


def fails() -> dict[str, str]:
    raise AssertionError("it is there already")


def test_a_directory_has_the_texts_and_links_to_the_files(file: Path, places: tuple[Path, Path]) -> None:
    made = translated_directory([file], lambda: {"config.json": "{é}"})
    assert made.parent == places[0] == cache_home()
    assert {path.name for path in made.iterdir()} == {"config.json", "model.bin"}
    assert (made / "config.json").read_text(encoding="utf-8") == "{é}"
    assert (made / "model.bin").readlink() == file
    assert translated_directory([file], fails) == made
    assert places[0].stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    "change",
    [lambda file: file.write_text("more weights"), lambda file: os.utime(file, ns=(1, 1))],
    ids=["another size", "another time"],
)
def test_a_file_that_has_changed_has_another_directory(file: Path, change: Callable[[Path], object]) -> None:
    before = translated_directory([file], lambda: {"a": "1"})
    change(file)
    after = translated_directory([file], lambda: {"a": "2"})
    assert (after != before, (after / "a").read_text()) == (True, "2")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"none\.bin cannot be read: No such file or directory") as caught:
        translated_directory([tmp_path / "none.bin"], fails)
    assert caught.value.field == "model"


@pytest.mark.parametrize("mode", [0o720, 0o702])
def test_a_cache_that_others_may_write_to_is_passed_over(file: Path, places: tuple[Path, Path], mode: int) -> None:
    cache, temporary = places
    cache.mkdir(parents=True)
    cache.chmod(mode)
    made = translated_directory([file], lambda: {"a": "1"})
    assert made.parent == temporary / f"pagoda-translated-{os.geteuid()}"
    assert list(cache.iterdir()) == []


def test_without_any_place_both_are_named(file: Path, places: tuple[Path, Path]) -> None:
    for place in (places[0], places[1] / f"pagoda-translated-{os.geteuid()}"):
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text("no directory")
    with pytest.raises(ModelLoadError, match="there is no place for the config") as caught:
        translated_directory([file], fails)
    assert all(str(place) in caught.value.message for place in places)
    assert caught.value.field == "model"


def test_of_two_processes_the_first_one_s_directory_counts(file: Path, places: tuple[Path, Path]) -> None:
    def translate() -> dict[str, str]:
        translated_directory([file], lambda: {"a": "first"})
        return {"a": "second"}

    made = translated_directory([file], translate)
    assert (made / "a").read_text() == "first"
    assert list(places[0].iterdir()) == [made], "nothing is left of the other"


def test_a_directory_that_cannot_be_written_leaves_nothing(file: Path, places: tuple[Path, Path]) -> None:
    with pytest.raises(ModelLoadError, match="cannot be written: No such file or directory") as caught:
        translated_directory([file], lambda: {"config.json": "{}", "missing/folder": "x"})
    assert caught.value.field == "model"
    assert list(places[0].iterdir()) == []
