"""The chart renders what kustomize's overlays render, where both mean the same: containers, Services, policies."""

import shutil
from typing import Any

import pytest

from tests.unit.deploy import charts
from tests.unit.deploy.test_kubernetes import RENDERED, objects_of, pods_of, settings_of

pytest.importorskip("helm_python.chart", reason="needs helm-python-sdk")
pytestmark = pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl")

COMPONENT = "app.kubernetes.io/component"
SERVICES = ("frontend", "scheduler", "worker")
QUICK = {"startupSeconds": 300}
"""As in the base: the embedded model is there at once."""
PER_RANK = {"requests": {"cpu": "4", "memory": "24Gi"}, "limits": {"memory": "48Gi"}}
TWO_RANKS = {"requests": {"cpu": "8", "memory": "48Gi"}, "limits": {"memory": "96Gi"}}
BOTH_EMBEDDED = {"requests": {"cpu": "500m", "memory": "1Gi"}, "limits": {"memory": "8Gi"}}


def values(model: str = "pagoda-tiny", *, settings: dict[str, str] | None = None, **worker: Any) -> dict[str, Any]:
    """One model, with or without a volume for its checkpoint."""
    weights = {} if model == "pagoda-tiny" else {"weights": {"claim": "pagoda-models"}}
    if model == "pagoda-tiny":
        worker = QUICK | worker
    return {"models": {"m": {"model": model, "settings": settings or {}, "workers": {"main": worker}, **weights}}}


def tls(**more: Any) -> dict[str, Any]:
    return values(startupSeconds=1500) | {"tls": {each: f"pagoda-tls-{each}" for each in SERVICES}} | more


QWEN, QWEN_8B, HALVES = "Qwen/Qwen3-0.6B", "Qwen/Qwen3-8B", {"DTYPE": "bfloat16"}
SAME = {
    "base": values(),
    "overlays/cpu": values(QWEN, settings=HALVES | {"KV_CACHE_MEMORY": "4GiB"}),
    "overlays/gpu": values(QWEN, settings=HALVES, gpus=1),
    "overlays/tensor-parallel": values(tensorParallelSize=2, resources=BOTH_EMBEDDED),
    "overlays/tensor-parallel-gpu": values(QWEN_8B, settings=HALVES, gpus=2, resources=TWO_RANKS),
    "overlays/multi-node": values(nodes=2),
    "overlays/multi-node-gpu": values(QWEN_8B, settings=HALVES, gpus=1, nodes=2, resources=PER_RANK),
    "overlays/multi-group": values(settings={"MAX_SERVING_GROUPS": "2", "ROUTING_POLICY": "prefix"}, replicas=3),
    "overlays/tls": tls(),
    "overlays/hpa": values(autoscaling={"maxReplicas": 8}),
    "overlays/keda": values(autoscaling={"maxReplicas": 8})
    | {"autoscaling": {"by": "keda"}, "monitoring": {"enabled": True}},
    "overlays/observability": values() | {"monitoring": {"enabled": True}},
    "overlays/gateway": values(),
}


def chart(name: str) -> list[dict[str, Any]]:
    objects = charts.render({**SAME[name], "networkPolicies": {"egress": False}})
    return [each for each in objects if not each["metadata"]["name"].endswith("-dashboard")]


def by_service(objects: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Pod specs of the chart."""
    found = charts.pods(objects).values()
    return {each["metadata"]["labels"][COMPONENT]: each["spec"] for each in found}


def plain(spec: dict[str, Any], settings: dict[str, str]) -> dict[str, Any]:
    """A pod's spec with its variables, and without the names that differ: accounts, ConfigMaps, labels that select."""
    (container,) = spec["containers"]
    variables = {name: value for name, value in settings.items() if name != "PAGODA_SCHEDULER"}
    own = {each["name"]: each.get("value", each.get("valueFrom")) for each in container["env"]}
    if own.get("PAGODA_TLS_SERVER_NAME") == "pagoda-scheduler":
        del own["PAGODA_TLS_SERVER_NAME"]  # the overlays' Service is called so; the chart's has its model's name
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    resources = {
        kind: {name: str(amount) for name, amount in each.items()} for kind, each in container["resources"].items()
    }
    return {
        **{key: value for key, value in spec.items() if key not in ("containers", "volumes", "serviceAccountName")},
        "topologySpreadConstraints": [
            {key: value for key, value in each.items() if key != "labelSelector"}
            for each in spec.get("topologySpreadConstraints", ())
        ],
        "volumes": {each["name"]: each for each in spec["volumes"]},
        "container": {
            **{key: value for key, value in container.items() if key != "envFrom"},
            "args": sorted(container["args"]),
            "env": variables | own,
            "ports": ports,
            "resources": resources,
            "volumeMounts": {each["name"]: each for each in container["volumeMounts"]},
        },
    }


def test_every_overlay_is_compared() -> None:
    assert set(SAME) == set(RENDERED)


@pytest.mark.parametrize("name", SAME)
def test_pods_are_the_same(name: str) -> None:
    objects, rendered = objects_of(name), chart(name)
    (settings,) = charts.named(rendered, "ConfigMap").values()
    theirs, ours = pods_of(objects), by_service(rendered)
    assert set(theirs) == set(ours) == set(SERVICES)
    for service in SERVICES:
        wanted = plain(theirs[service]["spec"], settings_of(objects))
        found = plain(ours[service], settings["data"])
        assert found == wanted, service


def replacement(each: dict[str, Any]) -> dict[str, Any]:
    """How an object's pods are replaced, and how many there are: its spec without the pods themselves."""
    own = {"template", "selector", "serviceName", "progressDeadlineSeconds", "leaderWorkerTemplate"}
    spec = {key: value for key, value in each["spec"].items() if key not in own}
    group = each["spec"].get("leaderWorkerTemplate", {})
    return spec | {key: value for key, value in group.items() if key != "workerTemplate"}


@pytest.mark.parametrize("name", SAME)
def test_pods_are_replaced_in_the_same_way(name: str) -> None:
    def by_component(objects: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
        return {
            (each["kind"], each["metadata"]["labels"][COMPONENT]): replacement(each)
            for each in objects
            if charts.pods([each])
        }

    theirs, ours = by_component(objects_of(name)), by_component(chart(name))
    # The chart's workers are a StatefulSet where those of the overlays are a Deployment.
    both = set(theirs) & set(ours)
    assert {("Deployment", "frontend"), ("StatefulSet", "scheduler")} <= both
    assert len(both) == 3 or ("Deployment", "worker") in theirs
    for each in both:
        assert ours[each] == theirs[each], each
    assert {each["spec"].get("podManagementPolicy") for each in chart(name) if each["kind"] == "StatefulSet"} == {
        "Parallel"
    }, "a broken pod is replaced by an update"


@pytest.mark.parametrize("name", SAME)
def test_services_budgets_and_policies_are_the_same(name: str) -> None:
    def services(objects: list[dict[str, Any]], own: str) -> dict[str, dict[str, Any]]:
        found = {full.removeprefix(own): each["spec"] for full, each in charts.named(objects, "Service").items()}
        return {
            short: {key: value for key, value in spec.items() if key != "selector"}
            for short, spec in found.items()
            if short != "-worker"  # of a StatefulSet, where one makes the pods
        }

    def budgets(objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
        found = charts.named(objects, "PodDisruptionBudget").values()
        return [{key: value for key, value in each["spec"].items() if key != "selector"} for each in found]

    def policies(objects: list[dict[str, Any]]) -> dict[str, set[tuple[str, str]]]:
        """Who reaches which port of a service."""
        found: dict[str, set[tuple[str, str]]] = {}
        for each in charts.named(objects, "NetworkPolicy").values():
            assert each["spec"]["policyTypes"] == ["Ingress"]
            let_in = found.setdefault(each["spec"]["podSelector"]["matchLabels"][COMPONENT], set())
            for rule in each["spec"]["ingress"]:
                selectors = [next(iter(peer.values())) for peer in rule.get("from", ())]
                peers = [selector["matchLabels"] for selector in selectors]
                names = [peer.get(COMPONENT, peer.get("kubernetes.io/metadata.name")) for peer in peers] or ["all"]
                ports = [port["port"] for port in rule.get("ports", ())] or ["all"]
                let_in |= {(str(peer), port) for peer in names for port in ports}
        # Open to all already.
        found["frontend"].discard(("monitoring", "http"))
        return found

    objects, rendered = objects_of(name), chart(name)
    assert services(rendered, "chat-m") == services(objects, "pagoda")
    assert budgets(rendered) == budgets(objects)
    assert policies(rendered) == policies(objects)


def test_a_kind_has_one_version_wherever_it_is() -> None:
    versions: dict[str, set[str]] = {}
    rendered = [chart(name) + objects_of(name) for name in SAME] + [
        charts.render(each) for each in charts.MATRIX.values()
    ]
    for each in (each for objects in rendered for each in objects):
        versions.setdefault(each["kind"], set()).add(each["apiVersion"])
    assert {kind: found for kind, found in versions.items() if len(found) != 1} == {}
