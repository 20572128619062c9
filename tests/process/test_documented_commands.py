"""Every command of README and of the quickstart, as the page has it, against the server that the page has started.

Ports and the model are replaced: free ports, and a tiny checkpoint instead of one from the hub. The environment that
runs the tests stands for `.venv`. `make test` runs one file, and `pip install .` installs a copy, without dependencies.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from pagoda_common.process.children import free_port
from tests.checkpoints import make_checkpoint
from tests.process.stack import get_status, poll_until

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "docs/quickstart.md")
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
HUB_MODEL = "Qwen/Qwen3-0.6B"
ACTIVATE = ". .venv/bin/activate"
MAKE = f"make --old-file=install BIN={Path(sys.executable).parent}"
ELSEWHERE = {"docker compose up": "tests/container/test_stack.py"}
"""Commands that another test runs, where there is a Docker engine."""


def commands(block: str) -> list[str]:
    """The commands of a shell block, without their comments; a backslash continues a line."""
    lines = block.replace("\\\n", " ").splitlines()
    return [command for line in lines if (command := re.sub(r"(^|\s+)# .*$", "", line).strip())]


@dataclass
class Terminal:
    """The terminals of a reader: one has the server, the other one runs what is short."""

    directory: Path
    model: Path
    port: int = field(default_factory=free_port)
    grpc_port: int = field(default_factory=free_port)
    server: subprocess.Popen[bytes] | None = None
    is_active: bool = False
    """The environment is activated."""

    @property
    def environment(self) -> dict[str, str]:
        """The ports, by the variables of the flags."""
        url = f"http://127.0.0.1:{self.port}"
        ports = {"PAGODA_PORT": str(self.port), "PAGODA_GRPC_PORT": str(self.grpc_port), "PAGODA_URL": url}
        return {**os.environ, **ports, "OPENAI_API_KEY": ""}

    def on_free_ports(self, text: str) -> str:
        """`text` with this terminal's ports and model."""
        for port, own in (("8000", self.port), ("50051", self.grpc_port)):
            text = text.replace(f"127.0.0.1:{port}", f"127.0.0.1:{own}")
        return text.replace(HUB_MODEL, str(self.model))

    def run(self, command: str) -> None:
        """Run one command of a page."""
        command = self.on_free_ports(command)
        if command == ACTIVATE:
            self.is_active = True
        elif command in ELSEWHERE:
            assert (ROOT / ELSEWHERE[command]).is_file()
        elif command.startswith(("make serve", "pagoda serve")):
            self.serve(command)
        elif command == "pip install .":
            self.install()
        else:
            words = command.replace("make test", f'{MAKE} test ARGS="-n 0 tests/unit/docs/test_links.py"')
            self.check(["bash", "-c", self.activated(words)])

    def activated(self, command: str) -> str:
        """`command` in the environment that runs the tests, once the page has said so."""
        return f". {sys.prefix}/bin/activate && {command}" if self.is_active else command

    def check(self, argv: list[str], *, cwd: Path = ROOT) -> None:
        """Run a program that ends; it is fine and says something. What reads lines gets one."""
        done = subprocess.run(
            argv,
            cwd=cwd,
            env=self.environment,
            input="Hello!\n",
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, f"{argv[-1]}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        assert done.stdout.strip(), argv[-1]

    def serve(self, command: str) -> None:
        """Start a server in place of the one that runs, and wait until it serves."""
        self.interrupt()
        command = self.activated(command.replace("make serve", f"{MAKE} serve"))
        with (self.directory / "server.log").open("wb") as log:
            self.server = subprocess.Popen(
                ["bash", "-c", command],
                cwd=ROOT,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

        def is_ready() -> bool:
            assert self.server is not None
            assert self.server.poll() is None, f"{command} ended\n{self.log()}"
            return get_status(f"http://127.0.0.1:{self.port}/ready") == 200

        poll_until(is_ready, what=f"{command} serves", log=self.log)

    def log(self) -> str:
        """What the server has said."""
        return (self.directory / "server.log").read_text(errors="replace")

    def interrupt(self) -> None:
        """Ctrl-C: the signal goes to all of the terminal's processes."""
        if self.server is not None and self.server.poll() is None:
            os.killpg(self.server.pid, signal.SIGINT)
            self.server.wait(timeout=300)
        self.server = None

    def install(self) -> None:
        """`pip install .` in a copy: the build writes generated code into its tree."""
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        copy, target = self.directory / "checkout", self.directory / "installed"
        for name in filter(None, listed.split("\0")):
            if (ROOT / name).is_file():
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / name, copy / name)
        flags = ["--no-deps", "--no-index", "--no-build-isolation", "--no-compile", "--target", str(target)]
        self.check([sys.executable, "-m", "pip", "install", *flags, "."], cwd=copy)
        assert (target / "pagoda" / "v1" / "inference_pb2.py").is_file()


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    model = make_checkpoint("Qwen3ForCausalLM", tmp_path / "qwen3", max_position_embeddings=8192)
    terminal = Terminal(directory=tmp_path, model=model)
    yield terminal
    terminal.interrupt()


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.skipif(not Path(sys.prefix, "bin", "activate").is_file(), reason="this is no virtual environment")
@pytest.mark.parametrize("page", PAGES)
def test_every_command_of_a_page_works_as_it_stands(page: str, terminal: Terminal) -> None:
    blocks = BLOCK.findall((ROOT / page).read_text(encoding="utf-8"))
    assert {language for language, _ in blocks} == {"sh", "python"}
    for language, block in blocks:
        if language == "python":
            terminal.check([sys.executable, "-c", terminal.on_free_ports(block)])
            continue
        for command in commands(block):
            terminal.run(command)


def test_a_block_has_commands_without_comments() -> None:
    block = "make serve    # installs\n# only a comment\ncurl -N http://a/#b \\\n  -d '{}'\n"
    assert commands(block) == ["make serve", "curl -N http://a/#b    -d '{}'"]
