"""From the images of version 0.1.0 to today's under streams, service by service as docs/upgrading.md says, and back."""

import asyncio
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.container.releases import (
    NUM_STREAMS,
    SERVICES,
    VERSION,
    answers,
    previous,
    todays,
    under_streams,
)
from tests.container.stack import ComposeStack
from tests.process.stack import poll_until


@pytest.fixture
def stack(both_images: None, tmp_path: Path) -> Iterator[ComposeStack]:
    """Two workers and two frontends of the previous version; each service's image is a setting."""
    stack = ComposeStack(directory=tmp_path)
    try:
        stack.change(BALANCER_IMAGE=todays("balancer"))
        stack.change(**{f"{service.upper()}_IMAGE": previous(service) for service in SERVICES})
        stack.up(worker=2, frontend=2)
        yield stack
    finally:
        stack.remove()


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


def test_every_service_goes_to_the_next_version_and_back_under_streams(stack: ComposeStack) -> None:
    expected = asyncio.run(answers(stack.url))
    assert [fault for one in expected for fault in one.own_faults()] == []
    assert versions(stack, "scheduler") == versions(stack, "worker") == versions(stack, "frontend") == {VERSION}
    num_answers = asyncio.run(under_streams(stack.url, expected, lambda: roll(stack, todays), lambda: stack.logs))
    assert num_answers >= NUM_STREAMS
    for service in SERVICES:
        assert VERSION not in versions(stack, service), service
    poll_until(lambda: len(stack.containers("frontend")) == 2, what="the old frontends are gone")
    num_answers = asyncio.run(under_streams(stack.url, expected, lambda: roll(stack, previous), lambda: stack.logs))
    assert num_answers >= NUM_STREAMS
    assert versions(stack, "scheduler") == versions(stack, "worker") == versions(stack, "frontend") == {VERSION}
