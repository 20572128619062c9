"""A stack of containers for the whole folder; without a Docker engine its tests are skipped."""

import shutil
import subprocess
from collections.abc import Iterator

import pytest

from tests.container import releases
from tests.container.stack import ComposeStack


def engine_fault() -> str:
    """Why containers cannot be started here; "" when they can."""
    if shutil.which("docker") is None:
        return "docker is not installed"
    for command, what in ((["info"], "no Docker engine answers"), (["compose", "version"], "no docker compose")):
        done = subprocess.run(["docker", *command], capture_output=True, text=True, timeout=60, check=False)
        if done.returncode != 0:
            return f"{what}: {done.stderr.strip()[-200:]}"
    return ""


@pytest.fixture(scope="session")
def previous_images(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The images of the previous version: pulled or built before, or built now if that is asked for."""
    if fault := engine_fault():
        pytest.skip(fault)
    releases.build_previous(tmp_path_factory.mktemp("previous"))


@pytest.fixture(scope="session")
def both_images(previous_images: None, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Those and today's, which are built unless they have a tag of their own."""
    if releases.TAG == "latest":
        ComposeStack(directory=tmp_path_factory.mktemp("todays")).build()


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComposeStack]:
    """compose.yaml, built and up, under a project name and ports of its own."""
    if fault := engine_fault():
        pytest.skip(fault)
    stack = ComposeStack(directory=tmp_path_factory.mktemp("compose"))
    try:
        stack.build()
        stack.up()
        yield stack
    finally:
        stack.remove()
