"""``python -m pagoda_kernels.native.build``: compile the C++ kernels now, so that no start has to."""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.utils import cpp_extension

from pagoda_kernels.native.compilation import end_with_stdin
from pagoda_kernels.native.library import LEVELS, NAME, SOURCES, cpu_level, default_cache_directory, library_path

FLAGS = ("-std=c++20", "-O3", "-fopenmp", "-fno-math-errno", "-ffp-contract=fast")


def build(level: str, directory: Path) -> Path:
    """Compile for a level of LEVELS into `directory`, all or nothing.

    Returns:
        The library's path.

    Raises:
        RuntimeError: there is no C++ compiler, or it fails; the message ends with what it said.
    """
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        raise RuntimeError("there is no C++ compiler (Debian: apt install g++)")
    target = library_path(level, directory)
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    # ninja may be installed beside this interpreter only.
    os.environ["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    with tempfile.TemporaryDirectory(dir=directory) as scratch, _importing_nothing():
        cpp_extension.load(
            name=NAME,
            sources=[str(path) for path in sorted(SOURCES.rglob("*.cpp"))],
            extra_include_paths=[str(SOURCES)],
            extra_cflags=[*FLAGS, *(_flag(name) for name in LEVELS[level])],
            build_directory=scratch,
        )
        target.parent.mkdir(mode=0o700, exist_ok=True)
        os.replace(Path(scratch) / f"{NAME}.so", target)
    return target


def _flag(instructions: str) -> str:
    """The compiler's, for instructions as Linux calls them."""
    return "-m" + instructions.replace("_", "-" if instructions.startswith("amx") else "")


@contextmanager
def _importing_nothing() -> Iterator[None]:
    """Within: `cpp_extension.load` leaves out its last step, the import. The library may be for a CPU with more
    instructions than this one, and what compiles it does not run it."""
    importing = cpp_extension._import_module_from_library
    cpp_extension._import_module_from_library = lambda *_: None
    try:
        yield
    finally:
        cpp_extension._import_module_from_library = importing


def main() -> None:
    """Command line; its errors are one line."""
    parser = argparse.ArgumentParser(prog="pagoda_kernels.native.build", description=__doc__)
    parser.add_argument("--into", type=Path, metavar="DIR", help="directory of libraries (default: the user's cache)")
    parser.add_argument("--level", choices=LEVELS, action="append", help="instruction sets (default: this machine's)")
    parser.add_argument("--end-with-stdin", action="store_true", help="end at once, with all compilers, at its end")
    args = parser.parse_args()
    if args.end_with_stdin:
        end_with_stdin()
    own = cpu_level()
    levels = args.level or ([] if own is None else [own])
    if not levels:
        print("this CPU has no AVX2: nothing to compile", file=sys.stderr)
    into = args.into or default_cache_directory()
    if len(levels) > 1:  # one process each: within one, torch gives the second library another name
        command = [sys.executable, "-m", "pagoda_kernels.native.build", "--into", str(into), "--level"]
        codes = [subprocess.run([*command, level], check=False).returncode for level in levels]
        sys.exit(max(abs(code) for code in codes))
    for level in levels:
        started = time.monotonic()
        try:
            path = build(level, into)
        except (OSError, RuntimeError) as error:
            sys.exit(f"cannot compile the CPU kernels: {error}")
        print(f"CPU kernels for {level}: {path}, {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
