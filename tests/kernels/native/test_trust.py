"""Where compiled kernels are loaded from: never where another user can have put them."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from pagoda_kernels.native import library
from pagoda_kernels.native.trust import CODE_CACHES, distrust, make_trusted, private_directory, protect_caches

ANOTHER = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs the right to give files away")


@pytest.fixture
def home() -> Iterator[Path]:
    """A directory of this user, whose path is as safe as that of /tmp."""
    directory = Path(tempfile.mkdtemp(prefix="pagoda-test-"))
    yield directory
    shutil.rmtree(directory)


def test_what_is_made_is_for_this_user_alone(home: Path) -> None:
    assert make_trusted(home / "a" / "b") is None
    assert [(home / part).stat().st_mode & 0o777 for part in ("a", "a/b")] == [0o700] * 2
    assert distrust(Path("/usr")) is None, "root's is as good"
    assert distrust(private_directory()) is None


@pytest.mark.parametrize("part", ["a", "a/b", "a/b/file.so"])
@pytest.mark.parametrize("mode", [0o777, 0o757, 0o772])
def test_nothing_is_trusted_after_a_part_that_others_may_write(home: Path, part: str, mode: int) -> None:
    make_trusted(home / "a" / "b")
    file = home / "a" / "b" / "file.so"
    file.write_bytes(b"")
    file.chmod(0o700)
    assert distrust(file) is None
    os.chown(home / part, -1, -1)
    (home / part).chmod(mode)
    others = mode & 0o002 or os.getegid() != os.geteuid()
    assert (distrust(file) == f"{home / part} may be written by others") is bool(others)


def test_a_sticky_directory_is_a_way_and_no_place(home: Path) -> None:
    make_trusted(home / "tmp" / "own")
    (home / "tmp").chmod(0o1777)
    assert distrust(home / "tmp" / "own") is None
    assert distrust(home / "tmp") == f"{home / 'tmp'} may be written by others"
    (home / "tmp").chmod(0o777)
    assert distrust(home / "tmp" / "own") == f"{home / 'tmp'} may be written by others"


def test_a_link_at_the_end_is_refused_and_one_on_the_way_counts_as_its_target(home: Path) -> None:
    make_trusted(home / "real" / "cache")
    (home / "link").symlink_to(home / "real")
    (home / "end").symlink_to(home / "real" / "cache")
    assert distrust(home / "link" / "cache") is None
    assert distrust(home / "end") == f"{home / 'end'} is a link"
    (home / "real").chmod(0o777)
    assert distrust(home / "link" / "cache") == f"{home / 'real'} may be written by others"


@needs_root
@pytest.mark.parametrize("part", ["a", "a/b", "a/b/file.so"])
def test_nothing_of_another_user_is_trusted(home: Path, part: str) -> None:
    make_trusted(home / "a" / "b")
    file = home / "a" / "b" / "file.so"
    file.write_bytes(b"")
    os.chown(home / part, ANOTHER, ANOTHER)
    assert distrust(file) == f"{home / part} is another user's"


def test_what_is_not_there_is_not_trusted(home: Path) -> None:
    assert distrust(home / "nothing") == f"{home / 'nothing'} cannot be looked at: No such file or directory"
    (home / "file").write_text("")
    assert make_trusted(home / "file" / "below") == f"{home / 'file' / 'below'} cannot be made: Not a directory"


@pytest.fixture
def compiled(home: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Directories into which the kernels are compiled from now on; nothing is."""
    into: list[Path] = []
    monkeypatch.setattr(library, "PREBUILT", home / "none")
    monkeypatch.setattr(library._compilation, "run", lambda command: into.append(Path(command[-2])))
    return into


def planted(directory: Path) -> Path:
    path = library.library_path("avx2", directory)
    path.parent.mkdir(mode=0o700, parents=True)
    path.write_bytes(b"planted")
    path.chmod(0o700)
    return path


def test_a_cache_of_this_user_is_used(home: Path, compiled: list[Path]) -> None:
    path = planted(home / "kernels")
    assert library._find_or_build("avx2", home / "kernels") == path
    assert not compiled


@pytest.mark.parametrize("part", ["kernels", "kernels/LEVEL", "kernels/LEVEL/FILE"])
def test_a_planted_library_is_not_loaded(
    home: Path, compiled: list[Path], caplog: pytest.LogCaptureFixture, part: str
) -> None:
    path = planted(home / "kernels")
    place = home / part.replace("LEVEL", path.parent.name).replace("FILE", path.name)
    place.chmod(0o777)
    assert private_directory() in library._find_or_build("avx2", home / "kernels").parents
    assert compiled == [private_directory()]
    assert f"{place} may be written by others" in caplog.text


def test_a_linked_cache_is_not_used(home: Path, compiled: list[Path]) -> None:
    planted(home / "elsewhere")
    (home / "kernels").symlink_to(home / "elsewhere")
    library._find_or_build("avx2", home / "kernels")
    assert compiled == [private_directory()]


def test_caches_of_other_packages_move_where_the_home_is_of_all(home: Path) -> None:
    own = {"HOME": str(home)}
    assert protect_caches(own) == []
    assert own == {"HOME": str(home)}
    assert not list(home.iterdir()), "nothing is made where nothing can be planted"
    home.chmod(0o1777)
    assert protect_caches(own) == [], "made for this user alone, before another one can"
    assert all(distrust(home / place) is None for _, place in CODE_CACHES)
    home.chmod(0o777)
    moved = {"HOME": str(home), "TRITON_CACHE_DIR": "elsewhere"}
    assert len(protect_caches(moved)) == 1
    assert moved["TRITON_CACHE_DIR"] == "elsewhere", "who has named a place has chosen it"
    assert private_directory() in Path(moved["FLASHINFER_WORKSPACE_BASE"]).parents
