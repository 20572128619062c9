"""How the C++ kernels are found, compiled and set aside."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pagoda_kernels.layers.rms_norm import rms_norm, rms_norm_reference
from pagoda_kernels.native import library
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
