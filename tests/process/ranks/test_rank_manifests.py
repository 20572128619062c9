"""The command lines of the manifests with several ranks, run as plain processes: they make one worker group."""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import pytest

from pagoda.v1 import scheduler_pb2, scheduler_pb2_grpc
from pagoda_common.process.children import free_port
from tests.process.stack import Process, poll_until
from tests.unit.deploy.test_images import environment as image_environment
from tests.unit.deploy.test_kubernetes import objects_of, pods_of, settings_of

pytestmark = pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl")

NUM_PODS = {"overlays/tensor-parallel": 1, "overlays/multi-node": 2}
"""Of one group."""


@contextmanager
def environment(**variables: str) -> Iterator[None]:
    """Variables for the processes that are started meanwhile."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def start(service: str, container: dict[str, Any], ports: dict[str, int], **variables: str) -> Process:
    """A container's command line in its image's environment, $(VARIABLES) filled in as Kubernetes does.

    Args:
        ports: stand in for the fixed ports; one dict for all containers of a pod, which share its network.
    """
    known = {each["name"]: each["value"] for each in container["env"] if "value" in each} | variables

    def fill(word: str) -> str:
        word = re.sub(r"\$\((\w+)\)", lambda found: known[found[1]], word)
        return re.sub(r"\b(500\d\d|909\d)\b", lambda found: str(ports.setdefault(found[1], free_port())), word)

    image = {name: fill(value) for name, value in image_environment(service).items() if name.startswith("PAGODA_")}
    with environment(**image | known):
        return Process("-m", f"pagoda_{service}", *map(fill, container["args"]))


@pytest.mark.parametrize("name", sorted(NUM_PODS))
def test_ranks_find_each_other_and_serve(name: str) -> None:
    pods = pods_of(objects_of(name))
    settings = settings_of(objects_of(name))
    processes: list[Process] = []
    ports = {"50052": free_port()}
    address = f"127.0.0.1:{ports['50052']}"
    try:
        with environment(**settings | {"PAGODA_SCHEDULER": address}):
            processes.append(start("scheduler", pods["scheduler"]["spec"]["containers"][0], ports))
            for pod in range(NUM_PODS[name]):
                own_ports: dict[str, int] = {}
                for container in pods["worker"]["spec"]["containers"]:
                    variables = {"POD_IP": f"127.0.0.{pod + 1}", "GROUP": "0", "LWS_GROUP_INDEX": "0"}
                    if NUM_PODS[name] > 1:
                        variables |= {"LWS_WORKER_INDEX": str(pod), "LWS_GROUP_SIZE": str(NUM_PODS[name])}
                    processes.append(start("worker", container, own_ports, **variables))
        with grpc.insecure_channel(address) as channel:
            stub = scheduler_pb2_grpc.SchedulerStub(channel)

            def serving() -> list[int]:
                state = stub.GetState(scheduler_pb2.GetStateRequest(), timeout=240, wait_for_ready=True)
                return [worker.identity.rank for worker in state.workers if worker.state == "serving"]

            poll_until(
                lambda: serving() == [0, 1],
                what="two ranks serve",
                log=lambda: "\n".join(process.log for process in processes),
            )
    finally:
        for process in processes:
            process.end()
