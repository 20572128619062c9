"""The images of version 0.1.0 and of today, and streams that must not notice a change from one to the other."""

import asyncio
import io
import os
import random
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.container.stack import BUILD_TIMEOUT_S, ROOT, wheels_dir
from tests.process.chaos.clients import Progress, stream_all
from tests.process.chaos.requests import make_requests
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


def previous(service: str) -> str:
    return f"pagoda-{service}:{VERSION}"


def todays(service: str) -> str:
    return f"pagoda-{service}:{TAG}"


def has_image(image: str) -> bool:
    command = ["docker", "image", "inspect", image]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def build_previous(source: Path) -> None:
    """Build images of the previous version that are not there, in the empty folder `source`, if that is asked for."""
    missing = [service for service in SERVICES if not has_image(previous(service))]
    if not missing:
        return
    if "PAGODA_TEST_BUILD_PREVIOUS" not in os.environ:
        names = ", ".join(map(previous, missing))
        pytest.skip(f"there is no {names}; PAGODA_TEST_BUILD_PREVIOUS=1 builds them in about 10 minutes")
    archive = subprocess.run(["git", "archive", COMMIT], cwd=ROOT, capture_output=True, check=False)
    if archive.returncode:
        pytest.skip(f"there are no images of version {VERSION}, and its commit is not in this clone")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(source, filter="data")
    dockerfile = source / "services" / "worker" / "Dockerfile"
    dockerfile.write_text(dockerfile.read_text().replace(WORKER_KERNELS, "--level avx2"))
    wheels = wheels_dir()
    for service in missing:
        command = ["docker", "build", "-q", "-f", f"services/{service}/Dockerfile", "-t", previous(service)]
        if service == "worker" and wheels is not None:
            command += ["--build-context", f"wheels={wheels}"]
        subprocess.run([*command, "."], cwd=source, check=True, timeout=BUILD_TIMEOUT_S)


async def answers(url: str, *, max_repeats: int = 0) -> list[Transcript]:
    """Of all requests; one that was refused is repeated, as docs/upgrading.md asks clients to do."""
    got = await stream_all(url, REQUESTS, Progress(), draw=random.Random(9))
    for _ in range(max_repeats):
        refused = [place for place, one in enumerate(got) if was_refused(one)]
        if not refused:
            break
        again = await stream_all(url, [REQUESTS[place] for place in refused], Progress(), draw=random.Random(9))
        for place, one in zip(refused, again, strict=True):
            got[place] = one
    return got


def was_refused(got: Transcript) -> bool:
    """The frontend gave up to wait for a scheduler before the first token; in version 0.1.0 after 30 s, always."""
    is_empty = not any(choice.token_ids for choice in got.choices.values())
    return is_empty and any("not ready after" in fault for fault in got.faults)


async def under_streams(
    url: str,
    expected: list[Transcript],
    change: Callable[[], None],
    logs: Callable[[], str],
    *,
    max_repeats: int = 0,
) -> int:
    """Ask all the time while `change` runs; every answer must be the expected one. Returns their number."""
    changing = asyncio.create_task(asyncio.to_thread(change))
    num_answers = 0
    while not changing.done():
        got = await answers(url, max_repeats=max_repeats)
        faults = [
            f"{request.kind}: {fault}"
            for request, one, other in zip(REQUESTS, expected, got, strict=True)
            for fault in (other.own_faults() or differences(one, other))
        ]
        assert not faults, "\n".join([*faults, logs()])
        num_answers += len(got)
    await changing
    return num_answers
