"""compose.yaml as a test uses it: build, up, scale, kill a container's process as the kernel would, stop, remove."""

import json
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

os.environ["TESTCONTAINERS_RYUK_DISABLED"] = "true"  # its reaper is an image to pull; remove() does the same

from testcontainers.compose import DockerCompose

from tests.process.stack import get_status, poll_until

ROOT = Path(__file__).parents[2]
BUILD_TIMEOUT_S = 1500
UP_TIMEOUT_S = 600


def wheels_dir() -> Path | None:
    """The folder that pip is told to look for wheels in, when a wheel of torch is there."""
    command = [sys.executable, "-m", "pip", "config", "get", "global.find-links"]
    given = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()
    folders = [Path(word) for word in (*os.environ.get("PIP_FIND_LINKS", "").split(), *given)]
    return next((folder for folder in folders if folder.is_dir() and list(folder.glob("torch-*.whl"))), None)


class ComposeStack:
    """One project of Docker Compose; nothing of it meets a `docker compose up` beside it but the images' names."""

    def __init__(self, *, directory: Path, files: tuple[str, ...] = ("compose.yaml",), **settings: str) -> None:
        """`directory` takes the file of settings; `settings` are variables of compose.yaml."""
        wheels = wheels_dir()
        self.settings = {
            "COMPOSE_PROJECT_NAME": f"pagoda-test-{uuid.uuid4().hex[:8]}",
            "HTTP_PORT": "0",  # free ones
            "GRPC_PORT": "0",
            **({"WHEELS_DIR": str(wheels)} if wheels else {}),
            **settings,
        }
        self._env_file = directory / "settings.env"
        self.change()
        self.compose = DockerCompose(ROOT, compose_file_name=list(files), env_file=str(self._env_file))

    def change(self, **settings: str) -> None:
        """Other variables of compose.yaml, for what is started from now on."""
        self.settings |= settings
        self._env_file.write_text("".join(f"{name}={value}\n" for name, value in self.settings.items()))

    def run(self, *words: str, timeout_s: float = 120.0) -> str:
        """Output of ``docker compose …``; fails with what it said on stderr."""
        command = [*self.compose.docker_compose_command(), *words]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, check=False)
        assert done.returncode == 0, f"docker compose {' '.join(words)}: {done.stderr[-4000:]}"
        return done.stdout

    def build(self) -> None:
        """Build every image."""
        self.run("build", timeout_s=BUILD_TIMEOUT_S)

    def up(self, **replicas: int) -> None:
        """Start what does not run, in the order of health, so many of each service; back when all are healthy."""
        scale = [word for service, num in replicas.items() for word in ("--scale", f"{service}={num}")]
        self.run("up", "--detach", "--wait", "--no-recreate", *scale, timeout_s=UP_TIMEOUT_S)

    def remove(self) -> None:
        """All of it, with its volumes, whatever state it is in."""
        self.run("down", "--volumes", "--timeout", "1")

    @property
    def url(self) -> str:
        """Of HTTP, through the balancer."""
        return f"http://{self.run('port', 'balancer', '8000').strip()}"

    @property
    def grpc_address(self) -> str:
        """host:port of public gRPC, through the balancer."""
        return self.run("port", "balancer", "50051").strip()

    def containers(self, service: str) -> list[str]:
        """Ids, also of those that do not run."""
        return self.run("ps", "--all", "--quiet", service).split()

    def inspect(self, container: str) -> dict[str, Any]:
        """What the engine knows about it."""
        done = subprocess.run(["docker", "inspect", container], capture_output=True, text=True, check=True)
        known: dict[str, Any] = json.loads(done.stdout)[0]
        return known

    def execute(self, container: str, *command: str) -> str:
        """Output of a command inside of a container."""
        done = subprocess.run(["docker", "exec", container, *command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command}: {done.stderr[-2000:]}"
        return done.stdout

    def kill_process(self, container: str) -> None:
        """SIGKILL to its first process, past the engine: `docker kill` counts as a wish, and is not restarted."""
        os.kill(self.inspect(container)["State"]["Pid"], signal.SIGKILL)

    def wait_restarted(self, container: str, *, times: int) -> None:
        """Until the engine has started it again so many times and it is healthy."""

        def is_back() -> bool:
            known = self.inspect(container)
            return known["RestartCount"] >= times and known["State"]["Health"]["Status"] == "healthy"

        poll_until(is_back, what=f"{container} is back", log=lambda: self.logs)

    def wait_ready(self) -> None:
        """Until the frontend behind the balancer serves at once."""
        poll_until(lambda: get_status(f"{self.url}/ready") == 200, what="/ready is 200", log=lambda: self.logs)

    @property
    def logs(self) -> str:
        """The last lines of all services."""
        return self.run("logs", "--no-color", "--tail", "60")
