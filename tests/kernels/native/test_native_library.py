"""How the C++ kernels are found, compiled and set aside."""

import fcntl
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pagoda_kernels.layers.rms_norm import rms_norm, rms_norm_reference
from pagoda_kernels.native import build, library
from pagoda_kernels.native.compilation import Compilation
from pagoda_kernels.native.library import load_native, native
from pagoda_kernels.selection import use_references


@pytest.fixture(autouse=True)
def all_taken_back() -> object:
    yield
    use_references(())


def test_an_operation_is_native_until_it_is_set_aside() -> None:
    assert load_native(), "this machine has a compiler: `make install` has built the kernels"
    assert native("rms_norm") is not None
    use_references(["rms_norm"])
    assert native("rms_norm") is None
    use_references(["all"])
    assert native("rms_norm") is None
    use_references([])
    assert native("rms_norm") is not None
    assert native("no_such_operation") is None


def test_without_a_compiler_one_warning_says_so_and_torch_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(library, "_library", None)
    monkeypatch.setattr(library, "PREBUILT", tmp_path)
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert not load_native(cache_directory=tmp_path / "cache")
    assert "there is no C++ compiler (Debian: apt install g++)" in caplog.text
    assert native("rms_norm") is None
    x, weight = torch.randn(3, 5), torch.randn(5)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), rms_norm_reference(x, weight, 1e-5))


def test_a_broken_library_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    level = library.cpu_level()
    assert level is not None
    path = library.library_path(level, tmp_path)
    path.parent.mkdir()
    path.write_bytes(b"not a library")
    monkeypatch.setattr(library, "_library", None)
    monkeypatch.setattr(library, "cpu_levels", lambda: (level,))
    monkeypatch.setattr(library, "PREBUILT", tmp_path)
    assert not load_native(cache_directory=tmp_path)
    assert "operations run as plain PyTorch" in caplog.text


def test_the_build_command_names_what_is_missing(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "pagoda_kernels.native.build", "--into", str(tmp_path)],
        env={"CXX": "no-such-compiler", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode != 0
    assert result.stderr.strip() == "cannot compile the CPU kernels: there is no C++ compiler (Debian: apt install g++)"


def test_threads_are_those_of_torch() -> None:
    assert load_native()
    torch.mm(torch.randn(300, 300), torch.randn(300, 300))  # starts torch's
    rms_norm(torch.randn(3000, 300), torch.randn(300), 1e-5)
    lines = Path("/proc/self/maps").read_text().splitlines()
    # scikit-learn brings one of its own, if another test has imported it here.
    mapped = {line.split()[-1] for line in lines if "libgomp" in line and "scikit_learn" not in line}
    assert len(mapped) <= 1, "two OpenMP runtimes would fight for the cores"


def test_the_environment_names_the_widest_level(monkeypatch: pytest.MonkeyPatch) -> None:
    own = library.cpu_levels.__wrapped__()
    monkeypatch.setenv("PAGODA_CPU_LEVEL", "avx2")
    assert library.cpu_levels.__wrapped__() == ("avx2",) == own[-1:]
    monkeypatch.setenv("PAGODA_CPU_LEVEL", "sse")
    with pytest.raises(ValueError, match="PAGODA_CPU_LEVEL is 'sse', must be one of amx, avx512, avx2"):
        library.cpu_levels.__wrapped__()


def test_the_next_level_is_taken_where_the_widest_cannot_be_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def find(level: str, _: Path) -> Path:
        if level == "amx":
            raise RuntimeError("unrecognized option '-mamx-bf16'")
        return tmp_path / level

    monkeypatch.setattr(library, "_library", None)
    monkeypatch.setattr(library, "cpu_levels", lambda: ("amx", "avx512", "avx2"))
    monkeypatch.setattr(library, "_find_or_build", find)
    monkeypatch.setattr(library, "_import", lambda path: path)
    assert load_native(cache_directory=tmp_path)
    assert str(library._library) == str(tmp_path / "avx512")
    assert "no C++ kernels for amx, those for avx512 are next: unrecognized option" in caplog.text


def test_kernels_that_are_loaded_are_not_looked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_native()
    monkeypatch.setattr(library, "cpu_levels", lambda: pytest.fail("they are loaded"))
    assert load_native()


def test_a_cpu_without_avx2_computes_with_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(library, "_library", None)
    monkeypatch.setattr(library, "cpu_levels", tuple)
    monkeypatch.setattr(library, "_find_or_build", lambda *_: pytest.fail("there is nothing to build"))
    assert not load_native()
    assert library.cpu_level() is None
    assert caplog.messages == ["this CPU has no AVX2: operations run as plain PyTorch"]


def test_a_worker_that_ends_tries_no_other_level(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tried: list[str] = []

    def find(level: str, _: Path) -> Path:
        tried.append(level)
        library.stop_compiling()
        raise RuntimeError("stopped")

    monkeypatch.setattr(library, "_library", None)
    monkeypatch.setattr(library, "_compilation", Compilation())
    monkeypatch.setattr(library, "cpu_levels", lambda: ("amx", "avx2"))
    monkeypatch.setattr(library, "_find_or_build", find)
    assert not load_native(cache_directory=tmp_path)
    assert (tried, caplog.messages) == (["amx"], [])


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Commands that would compile; an image's libraries are in the directory `image`."""
    commands: list[list[str]] = []
    monkeypatch.setattr(library, "PREBUILT", tmp_path / "image")
    monkeypatch.setattr(library._compilation, "run", commands.append)
    monkeypatch.setattr(library, "make_trusted", lambda path: path.mkdir(parents=True, exist_ok=True))
    monkeypatch.setattr(library, "distrust", lambda path: None)
    return commands


def test_what_came_with_an_image_is_taken_first(tmp_path: Path, commands: list[list[str]]) -> None:
    for place in ("image", "cache"):
        path = library.library_path("avx2", tmp_path / place)
        path.parent.mkdir(parents=True)
        path.touch()
    assert library._find_or_build("avx2", tmp_path / "cache") == library.library_path("avx2", tmp_path / "image")
    assert library._find_or_build("avx512", tmp_path / "cache") == library.library_path("avx512", tmp_path / "cache")
    assert commands == [
        [
            *(sys.executable, "-m", "pagoda_kernels.native.build", "--level", "avx512"),
            *("--into", str(tmp_path / "cache"), "--end-with-stdin"),
        ]
    ]


def test_what_another_process_has_compiled_meanwhile_is_taken(
    tmp_path: Path, commands: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = library.library_path("avx2", tmp_path / "cache")
    locked: list[int] = []

    def lock(file: object, operation: int) -> None:
        locked.append(operation)
        path.parent.mkdir()
        path.touch()

    monkeypatch.setattr(library.fcntl, "flock", lock)
    assert library._find_or_build("avx2", tmp_path / "cache") == path
    assert (locked, commands) == ([fcntl.LOCK_EX], [])
    assert library._find_or_build("avx2", tmp_path / "cache") == path
    assert len(locked) == 1, "who finds it waits for no one"


def test_a_build_leaves_the_library_alone_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def compile_all(**options: Any) -> None:
        asked.append(options)
        assert build.cpp_extension._import_module_from_library("a", "b", True) is None, "nothing is imported"
        (Path(options["build_directory"]) / "one.o").touch()
        if len(asked) == 1:
            raise RuntimeError("one.cpp: no such header")
        (Path(options["build_directory"]) / "pagoda_native.so").write_bytes(b"library")

    importing = build.cpp_extension._import_module_from_library
    monkeypatch.setattr(build.cpp_extension, "load", compile_all)
    monkeypatch.setattr(build.shutil, "which", lambda name: name)
    monkeypatch.setenv("PATH", "/usr/bin")
    into = tmp_path / "new" / "cache"
    with pytest.raises(RuntimeError, match="no such header"):
        build.build("avx2", into)
    assert list(into.iterdir()) == []
    assert into.stat().st_mode & 0o777 == 0o700
    path = build.build("avx2", into)
    assert path == library.library_path("avx2", into)
    assert path.read_bytes() == b"library"
    assert [*into.rglob("*")] == [path.parent, path]
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert build.cpp_extension._import_module_from_library is importing
    options = asked[1]
    assert Path(options["build_directory"]).parent == into
    assert options["extra_include_paths"] == [str(library.SOURCES)]
    assert {Path(source).suffix for source in options["sources"]} == {".cpp"}
    assert str(library.SOURCES / "decoder" / "rms_norm.cpp") in options["sources"]
    assert options["extra_cflags"][-3:] == ["-mavx2", "-mfma", "-mf16c"]
    assert "-O3" in options["extra_cflags"]
    assert os.environ["PATH"].split(os.pathsep) == [str(Path(sys.executable).parent)] * 2 + ["/usr/bin"]


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[tuple[str, Path]]]:
    """The build command on a machine whose level is avx512: what it builds in its own process."""
    monkeypatch.setattr(build, "cpu_level", lambda: "avx512")
    monkeypatch.setattr(build, "default_cache_directory", lambda: tmp_path)

    def call(*flags: str) -> list[tuple[str, Path]]:
        built: list[tuple[str, Path]] = []
        monkeypatch.setattr(build, "build", lambda level, into: built.append((level, into)))
        monkeypatch.setattr("sys.argv", ["build", *flags])
        build.main()
        return built

    return call


def test_the_build_command_compiles_for_this_machine_or_for_a_level(
    command: Callable[..., list[tuple[str, Path]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    watched: list[int] = []
    monkeypatch.setattr(build, "end_with_stdin", lambda: watched.append(1))
    assert command() == [("avx512", tmp_path)]
    assert command("--level=amx", "--into=/there") == [("amx", Path("/there"))]
    assert watched == []
    command("--end-with-stdin")
    assert watched == [1]
    monkeypatch.setattr(build, "cpu_level", lambda: None)
    capsys.readouterr()
    assert command() == []
    assert capsys.readouterr().err == "this CPU has no AVX2: nothing to compile\n"
    assert command("--level=avx2") == [("avx2", tmp_path)]


@pytest.mark.parametrize(("codes", "code"), [((0, 0), 0), ((1, 0), 1), ((0, -9), 9)])
def test_several_levels_are_compiled_in_a_process_each(
    codes: tuple[int, int],
    code: int,
    command: Callable[..., list[tuple[str, Path]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run: list[list[str]] = []
    returned = iter(codes)

    def start(given: list[str], *, check: bool) -> SimpleNamespace:
        assert not check
        run.append(given)
        return SimpleNamespace(returncode=next(returned))

    monkeypatch.setattr(build, "subprocess", SimpleNamespace(run=start))
    with pytest.raises(SystemExit) as ended:
        command("--level=avx2", "--level=amx", "--into=/there")
    assert ended.value.code == code
    module = [sys.executable, "-m", "pagoda_kernels.native.build", "--into", "/there", "--level"]
    assert run == [[*module, "avx2"], [*module, "amx"]]
