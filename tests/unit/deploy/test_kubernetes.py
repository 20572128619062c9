"""The manifests render, and say only what the services understand."""

import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

KUBERNETES = Path(__file__).parents[3] / "deploy" / "kubernetes"
RENDERED = ("base", *sorted(f"overlays/{path.name}" for path in (KUBERNETES / "overlays").iterdir()))
PROBES = ("startup", "readiness", "liveness")
NOT_FLAGS = {"PAGODA_LOG_LEVEL"}

pytestmark = pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl")


def objects_of(name: str) -> list[dict[str, Any]]:
    """Rendered, without the endpoint picker, which is no service of Pagoda's."""
    return [each for each in everything_of(name) if not is_of_picker(each)]


def is_of_picker(each: dict[str, Any]) -> bool:
    """Whether an object is there for the endpoint picker alone."""
    labels = each["metadata"].get("labels", {})
    return bool(labels.get("app.kubernetes.io/component") == "endpoint-picker")


@cache
def everything_of(name: str) -> list[dict[str, Any]]:
    """All that is applied."""
    done = subprocess.run(["kubectl", "kustomize", str(KUBERNETES / name)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.safe_load_all(done.stdout) if document]


@cache
def flags_of(service: str) -> frozenset[str]:
    """Of --help; every service is a command of its own."""
    command = [sys.executable, "-m", f"pagoda_{service}", "--help"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return frozenset(re.findall(r"--[a-z0-9][a-z0-9-]*", text))


def pods_of(objects: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Pod templates by the service that runs in them."""
    pods = {}
    for each in objects:
        name = each["metadata"]["name"].removeprefix("pagoda-")
        if each["kind"] in ("Deployment", "StatefulSet"):
            pods[name] = each["spec"]["template"]
        elif each["kind"] == "LeaderWorkerSet":
            pods[name] = each["spec"]["leaderWorkerTemplate"]["workerTemplate"]
    return pods


def settings_of(objects: list[dict[str, Any]]) -> dict[str, str]:
    """The flags of all services, in the ConfigMap with a hash in its name."""
    found: list[dict[str, str]] = [
        each["data"]
        for each in objects
        if each["kind"] == "ConfigMap" and re.fullmatch(r"pagoda-[a-z0-9]{10}", each["metadata"]["name"])
    ]
    (settings,) = found
    return settings


@pytest.mark.parametrize("name", RENDERED)
def test_arguments_and_settings_are_flags_of_the_services(name: str) -> None:
    objects = objects_of(name)
    pods = pods_of(objects)
    assert set(pods) == {"frontend", "scheduler", "worker"}
    every_flag: set[str] = set()
    for service, template in pods.items():
        flags = flags_of(service)
        every_flag |= flags
        for container in template["spec"]["containers"]:
            for word in container["args"]:
                assert word.partition("=")[0] in flags, f"{service} has no {word}"
            own = {each["name"] for each in container["env"] if each["name"].startswith("PAGODA_")}
            assert {_flag(variable) for variable in own} <= flags
    assert {_flag(variable) for variable in set(settings_of(objects)) - NOT_FLAGS} <= every_flag


@pytest.mark.parametrize("name", RENDERED)
def test_pods_are_restricted_and_end_after_their_drain(name: str) -> None:
    for service, template in pods_of(objects_of(name)).items():
        spec = template["spec"]
        assert spec["securityContext"]["runAsNonRoot"], service
        for container in spec["containers"]:
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"], service
            assert not security["allowPrivilegeEscalation"], service
            assert security["capabilities"] == {"drop": ["ALL"]}, service
            words = [word.partition("=") for word in container["args"]]
            drain = [float(value) for name, _, value in words if name == "--drain-timeout"]
            pause = float(container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", [0])[-1])
            assert spec["terminationGracePeriodSeconds"] > sum(drain) + pause, service
        assert not spec["automountServiceAccountToken"], service


@pytest.mark.parametrize("name", RENDERED)
def test_only_the_scheduler_and_other_ranks_reach_workers(name: str) -> None:
    policies = [each for each in objects_of(name) if each["kind"] == "NetworkPolicy"]
    reach: dict[str, list[Any]] = {}
    for policy in policies:
        component = policy["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/component"]
        reach.setdefault(component, []).extend(policy["spec"]["ingress"])
    assert set(reach) == {"frontend", "scheduler", "worker"}
    scrapers = [each for each in reach["worker"] if "namespaceSelector" in each["from"][0]]
    assert [each["ports"] for each in scrapers] == [[{"port": "metrics"}]] * len(scrapers), (
        "Prometheus, where it is let in"
    )
    rule, *others = [each for each in reach["worker"] if each not in scrapers]
    assert _peers(rule) == ["scheduler"]
    named = {
        port["name"]
        for container in pods_of(objects_of(name))["worker"]["spec"]["containers"]
        for port in container["ports"]
        if port["name"].startswith("grpc")
    }
    assert {port["port"] for port in rule["ports"]} == named, "every rank"
    # Ranks of several pods choose their ports: all are open, to worker pods alone.
    spans_pods = name.startswith("overlays/multi-node")
    assert [(_peers(other), "ports" in other) for other in others] == [(["worker"], False)] * spans_pods


@pytest.mark.parametrize("name", ["overlays/tensor-parallel", "overlays/tensor-parallel-gpu"])
def test_one_container_is_all_ranks_of_a_group(name: str) -> None:
    (container,) = pods_of(objects_of(name))["worker"]["spec"]["containers"]
    flags = dict(word.split("=", 1) for word in container["args"])
    ranks = int(flags["--tensor-parallel-size"])
    assert (ranks, flags["--group"]) == (2, "$(GROUP)")
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    first = int(flags["--port"])
    assert ports == {"grpc": first, "metrics": 9090, "grpc-1": first + 1, "metrics-1": 9091}
    assert {container[f"{probe}Probe"]["grpc"]["port"] for probe in PROBES} == {first}
    assert flags["--advertise-address"] == f"$(POD_IP):{first}"
    assert {"name": "shared-memory", "mountPath": "/dev/shm"} in container["volumeMounts"]
    devices = container["resources"]["limits"].get("nvidia.com/gpu")
    assert devices == (str(ranks) if name.endswith("-gpu") else None), "each rank has one"


def _peers(rule: dict[str, Any]) -> list[str]:
    return [peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] for peer in rule["from"]]


def _flag(variable: str) -> str:
    return "--" + variable.removeprefix("PAGODA_").replace("_", "-").lower()
