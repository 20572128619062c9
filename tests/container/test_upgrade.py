"""From the images of version 0.1.0 to today's under streams, service by service as docs/upgrading.md says, and back."""

import asyncio
import io
import os
import random
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.container.conftest import engine_fault
from tests.container.stack import BUILD_TIMEOUT_S, ROOT, ComposeStack, wheels_dir
from tests.process.chaos_clients import Progress, stream_all
from tests.process.chaos_requests import make_requests
from tests.process.stack import poll_until
from tests.process.transcript import Transcript, differences

VERSION = "0.1.0"
COMMIT = "07dc1b7f"
"""Of that version."""
SERVICES = ("scheduler", "worker", "frontend")
TAG = os.environ.get("PAGODA_TEST_IMAGE_TAG", "latest")
"""Of today's images; those with another tag were built before."""
NUM_STREAMS = 16
REQUESTS = [one for one in make_requests(64, seed=9) if one.kind != "embed"][:NUM_STREAMS]
WORKER_KERNELS = "--level amx --level avx512 --level avx2"
"""In that version's Dockerfile: its only way to compile fewer of them."""


def image(service: str) -> str:
    return f"pagoda-{service}:{VERSION}"


def has_image(service: str) -> bool:
    command = ["docker", "image", "inspect", image(service)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.fixture(scope="module")
def previous_images(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The images of the previous version: pulled or built before, or built now if that is asked for."""
    if fault := engine_fault():
        pytest.skip(fault)
    missing = [service for service in SERVICES if not has_image(service)]
    if not missing:
        return
    if "PAGODA_TEST_BUILD_PREVIOUS" not in os.environ:
        names = ", ".join(map(image, missing))
        pytest.skip(f"there is no {names}; PAGODA_TEST_BUILD_PREVIOUS=1 builds them in some 10 minutes")
    archive = subprocess.run(["git", "archive", COMMIT], cwd=ROOT, capture_output=True, check=False)
    if archive.returncode:
        pytest.skip(f"there are no images of version {VERSION}, and its commit is not in this clone")
    source = tmp_path_factory.mktemp("previous")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(source, filter="data")
    dockerfile = source / "services" / "worker" / "Dockerfile"
    dockerfile.write_text(dockerfile.read_text().replace(WORKER_KERNELS, "--level avx2"))
    wheels = wheels_dir()
    for service in missing:
        command = ["docker", "build", "-q", "-f", f"services/{service}/Dockerfile", "-t", image(service)]
        if service == "worker" and wheels is not None:
            command += ["--build-context", f"wheels={wheels}"]
        subprocess.run([*command, "."], cwd=source, check=True, timeout=BUILD_TIMEOUT_S)


@pytest.fixture
def stack(previous_images: None, tmp_path: Path) -> Iterator[ComposeStack]:
    """Two workers and two frontends of the previous version; each service's image is a setting."""
    stack = ComposeStack(directory=tmp_path)
    try:
        if TAG == "latest":
            stack.build()
        stack.change(BALANCER_IMAGE=todays("balancer"))
        stack.change(**{f"{service.upper()}_IMAGE": image(service) for service in SERVICES})
        stack.up(worker=2, frontend=2)
        yield stack
    finally:
        stack.remove()


def todays(service: str) -> str:
    return f"pagoda-{service}:{TAG}"


def versions(stack: ComposeStack, service: str) -> set[str]:
    """Of the service's containers, as their images' labels say."""
    labels = (stack.inspect(one)["Config"]["Labels"] for one in stack.containers(service))
    return {str(each["org.opencontainers.image.version"]) for each in labels}


def replace_frontends(stack: ComposeStack) -> None:
    """Two new ones beside the two old ones, which then finish their streams."""
    old = stack.containers("frontend")
    scale = ["--scale", "frontend=4", "--scale", "worker=2"]
    stack.run("up", "--detach", "--wait", "--no-deps", "--no-recreate", *scale, "frontend", timeout_s=600)
    for container in old:
        subprocess.run(["docker", "stop", "--time", "60", container], check=True, capture_output=True)
        subprocess.run(["docker", "rm", container], check=True, capture_output=True)


def replace(stack: ComposeStack, service: str) -> None:
    """All containers of a service."""
    num = len(stack.containers(service))
    scale = ["--scale", f"{service}={num}"]
    stack.run("up", "--detach", "--wait", "--no-deps", *scale, service, timeout_s=600)


def roll(stack: ComposeStack, images: Callable[[str], str]) -> None:
    """Scheduler, workers, frontends."""
    for service in SERVICES:
        stack.change(**{f"{service.upper()}_IMAGE": images(service)})
        replace_frontends(stack) if service == "frontend" else replace(stack, service)


async def answers(url: str) -> list[Transcript]:
    return await stream_all(url, REQUESTS, Progress(), draw=random.Random(9))


async def under_streams(stack: ComposeStack, expected: list[Transcript], change: Callable[[], None]) -> int:
    """Ask all the time while `change` runs; every answer must be the expected one. Returns their number."""
    changing = asyncio.create_task(asyncio.to_thread(change))
    num_answers = 0
    while not changing.done():
        got = await answers(stack.url)
        faults = [
            f"{request.kind}: {fault}"
            for request, one, other in zip(REQUESTS, expected, got, strict=True)
            for fault in (other.own_faults() or differences(one, other))
        ]
        assert not faults, "\n".join([*faults, stack.logs])
        num_answers += len(got)
    await changing
    return num_answers


def test_every_service_goes_to_the_next_version_and_back_under_streams(stack: ComposeStack) -> None:
    expected = asyncio.run(answers(stack.url))
    assert [fault for one in expected for fault in one.own_faults()] == []
    assert versions(stack, "scheduler") == versions(stack, "worker") == versions(stack, "frontend") == {VERSION}
    num_answers = asyncio.run(under_streams(stack, expected, lambda: roll(stack, todays)))
    assert num_answers >= NUM_STREAMS
    for service in SERVICES:
        assert VERSION not in versions(stack, service), service
    poll_until(lambda: len(stack.containers("frontend")) == 2, what="the old frontends are gone")
    num_answers = asyncio.run(under_streams(stack, expected, lambda: roll(stack, image)))
    assert num_answers >= NUM_STREAMS
    assert versions(stack, "scheduler") == versions(stack, "worker") == versions(stack, "frontend") == {VERSION}
