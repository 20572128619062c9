"""The command lines of manifests and chart, run as plain processes: ranks make one worker group, services find each
other by mutual TLS, and probes get their answers."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from pagoda.v1 import scheduler_pb2, scheduler_pb2_grpc
from pagoda_common.process.children import can_listen, free_port
from tests.harness.certificates import make_certificates
from tests.process.stack import Process, ask, get_status, poll_until
from tests.unit.deploy import charts
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


def two_ports() -> int:
    """The first of two free ports in a row: ranks of one container count on."""
    while not can_listen("127.0.0.1", (port := free_port()) + 1):
        continue
    return port


def pod_ports() -> dict[str, int]:
    """Of the containers of a pod, which share its network; others are added when they are first named."""
    return {"50053": two_ports(), "9090": two_ports()}


def start(
    service: str,
    container: dict[str, Any],
    ports: dict[str, int],
    files: Mapping[str, str] | None = None,
    **variables: str,
) -> Process:
    """A container's command line in its image's environment, $(VARIABLES) filled in as Kubernetes does.

    Args:
        ports: stand in for the fixed ports; one dict for all containers of a pod.
        files: what stands in for paths and addresses of a cluster.
    """
    own = {each["name"]: each["value"] for each in container["env"] if "value" in each}
    own.pop("HOME", None)  # it names what a read-only container can write; here it would hide the compiled kernels
    image = {name: value for name, value in image_environment(service).items() if name.startswith("PAGODA_")}
    known = {name: fill(value, ports, files) for name, value in (image | own).items()} | variables

    def expand(word: str) -> str:
        return fill(re.sub(r"\$\((\w+)\)", lambda found: known[found[1]], word), ports, files)

    with environment(**known):
        return Process("-m", f"pagoda_{service}", *map(expand, container["args"]))


def fill(word: str, ports: dict[str, int], files: Mapping[str, str] | None) -> str:
    """With ports and files of this machine."""
    for there, here in (files or {}).items():
        word = word.replace(there, here)
    return re.sub(r"\b(500\d\d|909\d|8000)\b", lambda found: str(ports.setdefault(found[1], free_port())), word)


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
                own_ports = pod_ports()
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


def test_the_chart_s_pods_with_mutual_tls_and_ranks_start_and_serve(tmp_path: Path) -> None:
    pytest.importorskip("helm_python.chart", reason="needs helm-python-sdk")
    services = ("scheduler", "worker", "frontend")
    certificates = make_certificates(tmp_path, *(f"pagoda-{service}" for service in services))
    objects = charts.render(
        {
            "models": {"m": {"model": "pagoda-tiny", "workers": {"main": {"tensorParallelSize": 2}}}},
            "tls": charts.TLS,
            "entry": {"kind": "ingress"},
        }
    )
    (settings,) = charts.named(objects, "ConfigMap").values()
    pods = {each["metadata"]["labels"]["app.kubernetes.io/component"]: each for each in charts.pods(objects).values()}
    scheduler_port = free_port()
    ports = {service: {**pod_ports(), "50052": scheduler_port} for service in services}
    processes: dict[str, Process] = {}
    try:
        for service in services:
            folder = tmp_path / service
            folder.mkdir()
            for name, file in (("tls.crt", f"pagoda-{service}.crt"), ("tls.key", f"pagoda-{service}.key")):
                shutil.copy(certificates.path(file), folder / name)
            shutil.copy(certificates.path("ca.crt"), folder / "ca.crt")
            files = {"/etc/pagoda/tls": str(folder), "chat-m-scheduler": "127.0.0.1"}
            (container,) = pods[service]["spec"]["containers"]
            data = {name: fill(value, ports[service], files) for name, value in settings["data"].items()}
            with environment(**data):
                variables = {"POD_IP": "127.0.0.1", "GROUP": "0"}
                processes[service] = start(service, container, ports[service], files, **variables)

        def log() -> str:
            return "\n".join(process.log for process in processes.values())

        url = f"http://127.0.0.1:{ports['frontend']['8000']}"
        poll_until(lambda: get_status(f"{url}/ready") == 200, what="the frontend is ready", log=log)
        answer = ask(f"{url}/m")
        assert answer == ask(url), "under the prefix that the Ingress routes by, and without it"
        ranks = psutil.Process(processes["worker"].popen.pid).children()
        (second,) = [rank for rank in ranks if "--rank=1" in rank.cmdline()]
        second.kill()
        second.wait()
        assert ask(url) == answer, "the container starts the rank again"
        left = psutil.Process(processes["worker"].popen.pid).children()
        assert [rank for rank in ranks if rank in left] == [rank for rank in ranks if rank != second]
        for service in ("scheduler", "worker"):
            (container,) = pods[service]["spec"]["containers"]
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                program, *words = container[probe]["exec"]["command"]
                assert program == "pagoda-health"
                tls = ("PAGODA_TLS_CERT", "PAGODA_TLS_KEY", "PAGODA_TLS_CA")
                files = {"/etc/pagoda/tls": str(tmp_path / service)}
                variables = {name: fill(settings["data"][name], {}, files) for name in tls}
                command = [sys.executable, "-m", "pagoda_common.rpc.health_probe"]
                with environment(**variables):
                    done = subprocess.run(
                        [*command, *(fill(word, ports[service], None) for word in words)],
                        capture_output=True,
                        text=True,
                        check=False,
                    )
                assert (done.returncode, done.stdout.strip()) == (0, "SERVING"), done.stderr
    finally:
        for process in processes.values():
            process.end()
