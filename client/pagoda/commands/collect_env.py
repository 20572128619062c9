"""``pagoda collect-env``: what a bug report needs to say about the machine."""

import argparse
import importlib.metadata
import os
import platform
import shutil
import subprocess

from pagoda_common.version import VERSION

PACKAGES = (
    *("torch", "triton", "transformers", "tokenizers", "safetensors", "numpy"),
    *("grpcio", "protobuf", "fastapi", "uvicorn", "uvloop", "llguidance", "aiohttp"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """None."""


def run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Print it; imports nothing heavy."""
    for name, value in [*_machine(), ("pagoda", VERSION), *((package, _version(package)) for package in PACKAGES)]:
        print(f"{name:<14} {value}")
    return 0


def _machine() -> list[tuple[str, str]]:
    facts = [
        ("python", f"{platform.python_version()} ({platform.python_implementation()})"),
        ("system", platform.platform()),
        ("cpus", str(os.cpu_count())),
    ]
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        facts.append(("memory", f"{memory_bytes / 1024**3:.1f} GiB"))
    return [*facts, ("gpus", _gpus())]


def _gpus() -> str:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "no nvidia-smi"
    query = [tool, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"nvidia-smi failed: {error}"
    return "; ".join(done.stdout.split("\n")).strip("; ") or done.stderr.strip() or "none"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
