"""From the images of version 0.1.0 to today's as `helm upgrade` does: all services at once, and back, under streams."""

import asyncio
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from tests.container.cluster import Cluster
from tests.container.releases import NUM_STREAMS, SERVICES, answers, previous, todays, under_streams
from tests.process.stack import get_status, poll_until
from tests.unit.deploy import charts

pytest.importorskip("helm_python.chart", reason="needs helm-python-sdk")


MAX_REPEATS = 20
"""Of a request that a frontend of 0.1.0 refused: it waits for a scheduler for half a minute at most."""


def release(images: Callable[[str], str]) -> list[dict[str, Any]]:
    """The chart's objects for the embedded model with two workers and two frontends, on a machine of any speed."""
    tiny = {
        "model": "pagoda-tiny",
        "workers": {"main": {"replicas": 2}},
        "settings": {"RECOVERY_TIMEOUT": "600"},  # of two cores under a load of 17 the new scheduler took a minute
    }
    return charts.render({"models": {"tiny": tiny}, "images": {service: images(service) for service in SERVICES}})


@pytest.fixture
def cluster(both_images: None) -> Iterator[Cluster]:
    cluster = Cluster(balancer=todays("balancer"))
    try:
        yield cluster
    finally:
        cluster.remove()


def images_of(cluster: Cluster) -> list[str]:
    return sorted(pod.container["image"] for pods in cluster.pods.values() for pod in pods)


def test_all_services_go_to_the_next_version_at_once_and_back_under_streams(cluster: Cluster) -> None:
    cluster.apply(release(previous))
    url = cluster.open()
    poll_until(lambda: get_status(f"{url}/ready") == 200, what="/ready is 200", log=lambda: cluster.logs)
    expected = asyncio.run(answers(url))
    assert [fault for one in expected for fault in one.own_faults()] == []
    for images in (todays, previous):
        cluster.mixtures.clear()
        change = partial(cluster.apply, release(images))
        num_answers = asyncio.run(under_streams(url, expected, change, lambda: cluster.logs, max_repeats=MAX_REPEATS))
        assert num_answers >= NUM_STREAMS
        for service in ("worker", "frontend"):
            assert any({previous(service), todays(service)} <= mixture for mixture in cluster.mixtures), service
        assert images_of(cluster) == sorted(images(service) for service in (*SERVICES, "worker", "frontend"))
