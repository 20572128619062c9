"""The engines that can be compared: how each is started, as a library and as a server, and which files it reads."""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.cpu.checkpoints import make_checkpoint
from benchmarks.cpu.engines.llama_cpp_engine import server_command
from benchmarks.cpu.session import ROOT, EngineFailure
from benchmarks.cpu.shapes import BF16, Shape, WeightBytes
from benchmarks.cpu.workloads import MAX_MODEL_LEN

PAGODA = "pagoda"
KV_CACHE_GIB = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """What is the same for every engine of a run."""

    peers_dir: Path
    """Virtual environments, as benchmarks/cpu/peers.py makes them, and models."""
    threads: int

    def checkpoint(self, shape: Shape) -> Path:
        """The checkpoint of a shape, made when it is not there."""
        return make_checkpoint(shape, self.peers_dir / "models" / shape.name / "checkpoint")


@dataclass(frozen=True, kw_only=True, slots=True)
class Engine:
    """One column of the comparison. Paths are of `Setup.peers_dir`."""

    name: str
    module: str
    """Of the driver, in benchmarks.cpu.engines."""
    environment: str = ""
    """Folder that peers.py made; empty for the environment of this process."""
    needs: str = "venv/bin/python"
    """What must be in that folder."""
    runs_here: bool = False
    """The driver runs in the environment of this process."""
    options: Mapping[str, Any] = field(default_factory=dict)
    server_flags: tuple[str, ...] = ()
    serve: Callable[["Engine", Setup, Path, int], list[str]] | None = None
    """The command line of its OpenAI server, for a model and a port."""
    ready_path: str = "/health"
    """Where the server answers 200 once it can generate."""
    model: Callable[[Setup, Shape], Path] = Setup.checkpoint
    """The files it reads."""
    weight_bytes: WeightBytes = BF16
    preload: str = ""
    """A library of its folder that is loaded first (a glob), with tcmalloc where that is installed."""
    can_stop: bool = True
    """Its processes are stopped (SIGSTOP) while another engine is measured: they may wait in a busy loop."""

    def python(self, setup: Setup) -> str:
        """The interpreter of its virtual environment."""
        here = self.runs_here or not self.environment
        return sys.executable if here else str(setup.peers_dir / self.environment / "venv/bin/python")

    def missing(self, setup: Setup) -> str | None:
        """Why it cannot run, or None."""
        path = setup.peers_dir / self.environment / self.needs
        return f"{path} is not there" if self.environment and not path.exists() else None

    def command(self, setup: Setup, shape: Shape) -> list[str]:
        """The command line of its driver."""
        options = dict(self.options)
        if self.module == "llama_cpp_engine":
            options["server"] = str(setup.peers_dir / self.environment / self.needs)
        return [
            *(self.python(setup), "-m", f"benchmarks.cpu.engines.{self.module}"),
            *("--model", str(self.model(setup, shape)), "--max-model-len", str(MAX_MODEL_LEN)),
            *("--threads", str(setup.threads), "--options", json.dumps(options)),
        ]

    def env(self, setup: Setup) -> dict[str, str]:
        """Its environment variables: a peer does not see our packages."""
        env = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        if self.runs_here or not self.environment:
            return env | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        env |= {"PYTHONPATH": str(ROOT)} | (VLLM_ENV if self.environment == "vllm" else {})
        if self.preload:
            own = (setup.peers_dir / self.environment).glob(self.preload)
            found = [*own, *Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4")]
            env["LD_PRELOAD"] = ":".join(map(str, found))
        return env


VLLM_ENV = {
    "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
    "VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_GIB),
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
"""All cores compute, and nothing is said to anybody outside."""


def openvino_model(setup: Setup, shape: Shape) -> Path:
    """The model as optimum-intel converts it, in the checkpoint's precision."""
    folder = setup.peers_dir / "models" / shape.name / "openvino"
    if not (folder / "openvino_model.bin").exists():
        tool = setup.peers_dir / "openvino/venv/bin/optimum-cli"
        _convert(
            [
                *(str(tool), "export", "openvino", "--task", "text-generation-with-past"),
                *("--model", str(setup.checkpoint(shape)), str(folder)),
            ]
        )
    return folder


def gguf_model(setup: Setup, shape: Shape) -> Path:
    """The model as llama.cpp's own converter writes it, in bf16."""
    path = setup.peers_dir / "models" / shape.name / "model.gguf"
    if not path.exists():
        folder = setup.peers_dir / "llama.cpp"
        sources = next(folder.glob("sdist/*/vendor/llama.cpp"))
        script = Path(__file__).with_name("convert_gguf.py")
        part = path.with_suffix(".part")
        python = str(folder / "venv/bin/python")
        _convert([python, str(script), str(sources), str(setup.checkpoint(shape)), str(part)])
        part.rename(path)
    return path


def _convert(command: list[str]) -> None:
    env = {**os.environ, "PYTHONPATH": "", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        lines = done.stdout.strip().splitlines()
        raise EngineFailure(f"{shlex.join(command)} failed: {lines[-1] if lines else 'it said nothing'}")


def _serve_pagoda(engine: Engine, setup: Setup, model: Path, port: int) -> list[str]:
    return [
        *(sys.executable, "-m", "pagoda", "serve", str(model), "--host", "127.0.0.1", "--port", str(port)),
        *("--grpc-port", "0", "--dtype", "bfloat16", "--max-model-len", str(MAX_MODEL_LEN), *engine.server_flags),
    ]


def _serve_vllm(engine: Engine, setup: Setup, model: Path, port: int) -> list[str]:
    return [
        *(engine.python(setup), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
        *("--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16"),
        *("--max-model-len", str(MAX_MODEL_LEN), *engine.server_flags),
    ]


def _serve_llama_cpp(engine: Engine, setup: Setup, model: Path, port: int) -> list[str]:
    server = str(setup.peers_dir / engine.environment / engine.needs)
    return server_command(server, str(model), threads=setup.threads, num_parallel=16, max_len=256, port=port)


def _pagoda(name: str, weight_bytes: WeightBytes, **options: Any) -> Engine:
    flags = []
    for option, value in options.items():
        text = ",".join(value) if isinstance(value, list) else value if isinstance(value, str) else json.dumps(value)
        flags += [f"--{option.replace('_', '-')}", text]
    return Engine(
        name=name,
        module="pagoda_engine",
        options=options,
        server_flags=tuple(flags),
        serve=_serve_pagoda,
        ready_path="/ready",
        weight_bytes=weight_bytes,
        can_stop=False,  # its services watch each other, and wait without work
    )


VARIANTS = {
    engine.name: engine
    for engine in (
        _pagoda("pagoda-int8", WeightBytes(linear=1.0, head=1.0), quantization="int8"),
        _pagoda("pagoda-int4", WeightBytes(linear=0.5 + 4 / 128, head=1.0), quantization="int4"),
        _pagoda("pagoda-packed", BF16, reference_kernels=["compressed_linear"]),
        _pagoda("pagoda-ngram", BF16, speculative_config={"method": "ngram", "num_speculative_tokens": 4}),
    )
}
"""Pagoda with fewer bytes, with weights that are not compressed, or with speculation (`--pagoda-variants`)."""

PEERS = {
    engine.name: engine
    for engine in (
        Engine(name="vllm", module="vllm_engine", environment="vllm", serve=_serve_vllm),
        Engine(
            name="vllm-preload",
            module="vllm_engine",
            environment="vllm",
            preload="venv/lib/libiomp5.so",
            serve=_serve_vllm,
        ),
        Engine(
            name="vllm-eager",
            module="vllm_engine",
            environment="vllm",
            options={"enforce_eager": True},
            server_flags=("--enforce-eager",),
            serve=_serve_vllm,
        ),
        Engine(
            name="llama.cpp",
            module="llama_cpp_engine",
            environment="llama.cpp",
            needs="build/bin/llama-server",
            runs_here=True,
            serve=_serve_llama_cpp,
            model=gguf_model,
        ),
        Engine(
            name="openvino",
            module="openvino_engine",
            environment="openvino",
            options={"kv_cache_gib": KV_CACHE_GIB},
            model=openvino_model,
        ),
        Engine(name="transformers", module="transformers_engine", environment="transformers"),
    )
}

OURS = _pagoda(PAGODA, BF16)
