"""Finds and loads the C++ kernels, has them compiled once per machine, and says which operations they take over."""

import ctypes
import fcntl
import hashlib
import importlib.util
import itertools
import logging
import os
import platform
import re
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from pagoda_kernels.native.compilation import Compilation
from pagoda_kernels.native.trust import distrust, make_trusted, private_directory
from pagoda_kernels.selection import is_set_aside

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "csrc"
PREBUILT = Path(__file__).parent / "prebuilt"
"""Libraries that came with an image; looked at before the cache."""
NAME = "pagoda_native"
NATIVE_DTYPES = (torch.float32, torch.bfloat16)
"""Data types of the C++ kernels, unless one names others."""
_AVX2 = ("avx2", "fma", "f16c")
_AVX512 = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "avx512_vbmi2", "avx512_bf16")
_AMX = ("amx_tile", "amx_bf16", "amx_int8")
LEVELS = {"amx": _AVX2 + _AVX512 + _AMX, "avx512": _AVX2 + _AVX512, "avx2": _AVX2}
"""Instruction sets of each level as Linux calls them, the widest level first."""
LEVEL_VARIABLE = "PAGODA_CPU_LEVEL"
"""Environment variable: the widest level to use, so that different machines compute the same bits."""

_library: ModuleType | None = None
_compilation = Compilation()


def native(operation: str) -> Any:
    """The C++ function of this name, or None: not loaded, not there, or set aside with `use_references`."""
    return None if _library is None or is_set_aside(operation) else getattr(_library, operation, None)


def load_native(*, cache_directory: Path | None = None) -> bool:
    """Load the C++ kernels, compiling them first where this machine never did (about half a minute).

    Where that is not possible for the widest level, a warning says why, and the next one is tried; after the last one
    every operation runs as plain PyTorch.

    Returns:
        Whether they are loaded.
    """
    global _library
    if _library is not None:
        return True
    levels = cpu_levels()
    if not levels:
        logger.warning("this CPU has no AVX2: operations run as plain PyTorch")
        return False
    for level, instead in itertools.pairwise((*levels, "")):
        try:
            _library = _import(_find_or_build(level, cache_directory or default_cache_directory()))
        except (OSError, RuntimeError, ImportError) as error:
            if _compilation.is_stopped:
                return False
            consequence = f"those for {instead} are next" if instead else "operations run as plain PyTorch"
            logger.warning("no C++ kernels for %s, %s: %s", level, consequence, error)
        else:
            return True
    return False


def cpu_level() -> str | None:
    """The widest level of LEVELS that this process may use."""
    return next(iter(cpu_levels()), None)


@cache
def cpu_levels() -> tuple[str, ...]:
    """Those of LEVELS that this CPU has, the widest one first, from that on which the environment names.

    Raises:
        ValueError: it names something else.
    """
    widest = os.environ.get(LEVEL_VARIABLE) or next(iter(LEVELS))
    if widest not in LEVELS:
        raise ValueError(f"{LEVEL_VARIABLE} is {widest!r}, must be one of {', '.join(LEVELS)}")
    if platform.machine() != "x86_64":
        return ()
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return ()
    match = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
    found = set(match[1].split()) if match else set()
    allowed = itertools.dropwhile(lambda level: level != widest, LEVELS)
    return tuple(x for x in allowed if found.issuperset(LEVELS[x]) and (x != "amx" or _may_use_amx()))


def _may_use_amx() -> bool:
    """Ask Linux to keep this process's tiles when it switches threads: without its leave the first one is a SIGILL."""
    arch_prctl, request, tile_data = 158, 0x1023, 18  # Linux: Documentation/arch/x86/xstate.rst
    refused: int = ctypes.CDLL(None).syscall(arch_prctl, request, tile_data)
    return not refused


def default_cache_directory() -> Path:
    """Where compiled kernels are kept between starts."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pagoda" / "kernels"


def _find_or_build(level: str, cache_directory: Path) -> Path:
    if (path := library_path(level, PREBUILT)).exists():
        return path
    if reason := make_trusted(cache_directory):
        cache_directory = private_directory()
        logger.warning("%s: its kernels are not loaded; they are compiled for this process alone", reason)
    path = library_path(level, cache_directory)
    if path.exists():
        if not (reason := distrust(path)):
            return path  # without the lock: who compiles for other sources or another level is not waited for
        logger.warning("%s: it is not loaded, and compiled again", reason)
        cache_directory = private_directory()
    # One process compiles, the others wait; the lock goes with its holder.
    with open(cache_directory / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        path = library_path(level, cache_directory)
        if path.exists():
            return path
        logger.info("compiling the CPU kernels; this machine does it once, in about half a minute")
        command = [sys.executable, "-m", "pagoda_kernels.native.build", "--level", level, "--into"]
        # In a process of its own: the compiler's driver is large, and would stay in memory.
        _compilation.run([*command, str(cache_directory), "--end-with-stdin"])
        return path


def stop_compiling() -> None:
    """End a compilation that runs, from any thread, and begin none any more: `load_native` gives False then."""
    _compilation.stop()


def library_path(level: str, directory: Path) -> Path:
    """Where a library of today's sources is, or will be; another path for everything that the binary depends on."""
    digest = hashlib.sha256(repr((LEVELS[level], torch.__version__, sys.implementation.cache_tag)).encode())
    for path in sorted(SOURCES.rglob("*")):
        if path.suffix in (".cpp", ".h"):
            digest.update(str(path.relative_to(SOURCES)).encode() + path.read_bytes())
    return directory / f"{level}-{digest.hexdigest()[:16]}" / f"{NAME}.so"


def _import(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(NAME, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
