"""Custom resources of the manifests fit the objects that they speak of. Their schemas are not known here."""

import re
import shutil
from typing import Any

import pytest

from pagoda.v1 import types_pb2
from pagoda_common.metrics.engine_metrics import EngineCollector
from tests.unit.deploy.test_kubernetes import KUBERNETES, RENDERED, everything_of, is_of_picker, objects_of, pods_of
from tests.unit.deploy.test_pods import amount

SCALED = {"overlays/hpa": "HorizontalPodAutoscaler", "overlays/keda": "ScaledObject"}

pytestmark = pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl")


@pytest.mark.parametrize("name", sorted(SCALED))
def test_an_autoscaler_has_the_number_of_workers_for_itself(name: str) -> None:
    target = only(name, SCALED[name])["spec"]["scaleTargetRef"]
    (workers,) = [
        each for each in objects_of(name) if each["kind"] == "Deployment" and each["metadata"]["name"] == target["name"]
    ]
    assert target == {"apiVersion": "apps/v1", "kind": "Deployment", "name": "pagoda-worker"}
    # What the manifest says of it would be set back by every `kubectl apply`.
    without = [
        each["metadata"]["name"] for each in objects_of(name) if is_scalable(each) and "replicas" not in each["spec"]
    ]
    assert without == [workers["metadata"]["name"]], "the others have theirs"


def test_autoscalers_are_of_one_mind() -> None:
    plain = only("overlays/hpa", "HorizontalPodAutoscaler")["spec"]
    keda = only("overlays/keda", "ScaledObject")["spec"]
    assert plain["behavior"] == keda["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    assert (plain["minReplicas"], plain["maxReplicas"]) == (keda["minReplicaCount"], keda["maxReplicaCount"])
    # They count for targets that may go to 0, and only look as if they did here.
    assert keda["minReplicaCount"] > 0
    assert not {"cooldownPeriod", "pollingInterval"} & set(keda)
    assert {trigger["metadata"]["ignoreNullValues"] for trigger in keda["triggers"]} == {"false"}
    assert targets_of_hpa() == targets_of_keda()


def test_autoscalers_ask_for_metrics_of_the_scheduler() -> None:
    known = {each.name for each in EngineCollector(load=types_pb2.EngineLoad, model_name="").collect()}
    assert {metric for metric, _ in targets_of_keda()} == {"vllm:num_requests_waiting", "vllm:num_requests_running"}
    assert {metric for metric, _ in targets_of_keda()} <= known
    # KEDA brings along what names the job: frontends have the same metrics, for the same engine.
    jobs = {monitor["metadata"]["name"]: job_of(monitor) for monitor in monitors_of("overlays/keda")}
    assert {job for _, job in targets_of_keda()} == {jobs["pagoda-scheduler"]}
    assert jobs["pagoda-scheduler"] != jobs["pagoda-frontend"]


@pytest.mark.parametrize("name", ["overlays/observability", "overlays/keda"])
def test_monitors_find_one_service_and_are_let_in(name: str) -> None:
    objects = objects_of(name)
    for monitor in monitors_of(name):
        (endpoint,) = monitor["spec"]["endpoints"]
        labels = monitor["spec"]["selector"]["matchLabels"]
        services = [each for each in objects if each["kind"] == "Service" and has(each, labels)]
        # Services of the same pods without that port are passed over.
        (service,) = [each for each in services if endpoint["port"] in {port["name"] for port in each["spec"]["ports"]}]
        (target,) = [port["targetPort"] for port in service["spec"]["ports"] if port["name"] == endpoint["port"]]
        rules = [
            rule
            for each in objects
            if each["kind"] == "NetworkPolicy"
            and service["spec"]["selector"].items() >= each["spec"]["podSelector"]["matchLabels"].items()
            for rule in each["spec"]["ingress"]
            if target in {port["port"] for port in rule["ports"]}
        ]
        assert any("from" not in rule or "namespaceSelector" in rule["from"][0] for rule in rules)


def test_the_route_leads_to_the_pool_and_the_pool_to_frontends() -> None:
    route, pool = only("overlays/gateway", "HTTPRoute"), only("overlays/gateway", "InferencePool")
    (rule,) = route["spec"]["rules"]
    group = pool["apiVersion"].partition("/")[0]
    assert rule["backendRefs"] == [{"group": group, "kind": "InferencePool", "name": pool["metadata"]["name"]}]
    frontend = pods_of(objects_of("overlays/gateway"))["frontend"]
    assert pool["spec"]["selector"]["matchLabels"].items() <= frontend["metadata"]["labels"].items()
    ports = {port["name"]: port["containerPort"] for port in frontend["spec"]["containers"][0]["ports"]}
    assert pool["spec"]["targetPorts"] == [{"number": ports["http"]}]
    # The definition asks for a port where a Service is meant, which is what an unnamed kind means.
    picker = pool["spec"]["endpointPickerRef"]
    assert picker.get("kind", "Service") != "Service" or picker["port"]["number"]


def test_the_gateway_and_its_picker_are_all_there() -> None:
    objects = everything_of("overlays/gateway")
    gateway, route = only("overlays/gateway", "Gateway"), only("overlays/gateway", "HTTPRoute")
    assert route["spec"]["parentRefs"] == [{"name": gateway["metadata"]["name"]}]
    by_kind = {each["kind"]: each for each in objects if is_of_picker(each)}
    assert set(by_kind) == {"ConfigMap", "Deployment", "Role", "RoleBinding", "Service", "ServiceAccount"}
    picker, pool = by_kind["Deployment"], only("overlays/gateway", "InferencePool")
    spec = picker["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    reference = pool["spec"]["endpointPickerRef"]
    (port,) = by_kind["Service"]["spec"]["ports"]
    assert (reference["name"], reference["port"]["number"]) == (by_kind["Service"]["metadata"]["name"], port["port"])
    assert ports[port["targetPort"]] == 9002
    words = dict(word.split("=", 1) for word in container["args"])
    assert words["--pool-name"] == pool["metadata"]["name"]
    variables = {each["name"]: each["valueFrom"]["fieldRef"]["fieldPath"] for each in container["env"]}
    assert variables[words["--pool-namespace"].removeprefix("$(").removesuffix(")")] == "metadata.namespace"
    assert (int(words["--grpc-port"]), int(words["--grpc-health-port"])) == (ports["grpc"], ports["grpc-health"])
    assert {container[probe]["grpc"]["port"] for probe in ("readinessProbe", "livenessProbe")} == {ports["grpc-health"]}
    (volume,) = spec["volumes"]
    assert volume["configMap"]["name"] == by_kind["ConfigMap"]["metadata"]["name"]
    assert words["--config-file"].rpartition("/")[2] in by_kind["ConfigMap"]["data"]
    assert by_kind["RoleBinding"]["roleRef"]["name"] == by_kind["Role"]["metadata"]["name"]
    (subject,) = by_kind["RoleBinding"]["subjects"]
    assert subject["name"] == spec["serviceAccountName"] == by_kind["ServiceAccount"]["metadata"]["name"]
    read = {resource for rule in by_kind["Role"]["rules"] for resource in rule["resources"]}
    assert read >= {"pods", "inferencepools"}
    assert {verb for rule in by_kind["Role"]["rules"] for verb in rule["verbs"]} == {"get", "list", "watch"}


def test_the_picker_is_restricted_and_has_its_files() -> None:
    (picker,) = [each for each in everything_of("overlays/gateway") if is_of_picker(each) and is_scalable(each)]
    spec = picker["spec"]["template"]["spec"]
    assert picker["spec"]["replicas"] == 1
    labels = picker["spec"]["template"]["metadata"]["labels"]
    assert picker["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert spec["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    frontend = pods_of(objects_of("overlays/gateway"))["frontend"]
    assert spec["terminationGracePeriodSeconds"] == frontend["spec"]["terminationGracePeriodSeconds"], (
        "streams end first"
    )
    assert not picker["spec"]["selector"]["matchLabels"].items() <= frontend["metadata"]["labels"].items()
    (container,) = spec["containers"]
    assert container["securityContext"] == frontend["spec"]["containers"][0]["securityContext"]
    requests, limits = container["resources"]["requests"], container["resources"]["limits"]
    assert amount(requests["memory"]) < amount(limits["memory"])
    assert "cpu" in requests
    words = dict(word.split("=", 1) for word in container["args"])
    assert container["volumeMounts"] == [
        {"name": spec["volumes"][0]["name"], "mountPath": words["--config-file"].rpartition("/")[0]}
    ]
    for probe in ("readinessProbe", "livenessProbe"):
        assert container[probe]["grpc"]["service"] == "inference-extension", "the name that it answers to"
        assert container[probe]["periodSeconds"] <= 10


def test_the_picker_may_read_what_it_watches_in_the_groups_of_its_pool() -> None:
    by_kind = {each["kind"]: each for each in everything_of("overlays/gateway") if is_of_picker(each)}
    read = {group: set(rule["resources"]) for rule in by_kind["Role"]["rules"] for group in rule["apiGroups"]}
    assert "pods" in read[""]
    assert "inferencepools" in read[only("overlays/gateway", "InferencePool")["apiVersion"].partition("/")[0]]
    assert by_kind["RoleBinding"]["roleRef"]["kind"] == "Role"
    assert {each["kind"] for each in by_kind["RoleBinding"]["subjects"]} == {"ServiceAccount"}
    labels = by_kind["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert by_kind["Service"]["spec"]["selector"].items() <= labels.items()


def test_prometheus_is_let_in_to_the_workers_that_it_is_to_scrape() -> None:
    monitor = only("overlays/observability", "PodMonitor")
    (worker,) = [pod for name, pod in pods_of(objects_of("overlays/observability")).items() if name == "worker"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= worker["metadata"]["labels"].items()
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["port"] in {port["name"] for port in worker["spec"]["containers"][0]["ports"]}
    policies = [each for each in objects_of("overlays/observability") if each["kind"] == "NetworkPolicy"]
    let_in = {
        each["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/component"]
        for each in policies
        for rule in each["spec"]["ingress"]
        if any("namespaceSelector" in peer for peer in rule.get("from", ())) and rule["ports"] == [{"port": "metrics"}]
    }
    assert let_in == {"scheduler", "worker"}


@pytest.mark.parametrize("name", RENDERED)
def test_the_page_says_of_each_kind_what_it_was_checked_against(name: str) -> None:
    page = (KUBERNETES.parents[1] / "docs" / "kubernetes.md").read_text()
    kinds = {(each["kind"], each["apiVersion"]) for each in objects_of(name) if is_custom(each)}
    assert all(re.search(rf"\b{kind}\s+\(`{re.escape(version)}`\)", page) for kind, version in kinds)


def is_custom(each: dict[str, Any]) -> bool:
    """Whether its kind is none of those of Kubernetes that are in use here."""
    group, slash, _ = each["apiVersion"].partition("/")
    return bool(slash) and "." in group and group not in ("networking.k8s.io", "rbac.authorization.k8s.io")


def is_scalable(each: dict[str, Any]) -> bool:
    return each["kind"] in ("Deployment", "StatefulSet", "LeaderWorkerSet")


def has(each: dict[str, Any], labels: dict[str, str]) -> bool:
    return all(each["metadata"]["labels"].get(key) == value for key, value in labels.items())


def only(name: str, kind: str) -> dict[str, Any]:
    """The one object of a kind."""
    (found,) = [each for each in objects_of(name) if each["kind"] == kind]
    return found


def targets_of_hpa() -> dict[tuple[str, str], str]:
    """How much of a metric, of a job, a worker is to have."""
    found = {}
    for each in only("overlays/hpa", "HorizontalPodAutoscaler")["spec"]["metrics"]:
        metric, target = each["external"]["metric"], each["external"]["target"]
        assert target["type"] == "AverageValue"
        found[metric["name"], metric["selector"]["matchLabels"]["job"]] = target["averageValue"]
    return found


def targets_of_keda() -> dict[tuple[str, str], str]:
    """The same; KEDA's threshold is an average value unless metricType says otherwise."""
    found = {}
    for each in only("overlays/keda", "ScaledObject")["spec"]["triggers"]:
        assert "metricType" not in each
        asked = re.fullmatch(r'sum\(([\w:]+)\{job="([\w-]+)"\}\)', each["metadata"]["query"])
        assert asked
        found[asked[1], asked[2]] = each["metadata"]["threshold"]
    return found


def monitors_of(name: str) -> list[dict[str, Any]]:
    return [each for each in objects_of(name) if each["kind"] == "ServiceMonitor"]


def job_of(monitor: dict[str, Any]) -> str:
    (endpoint,) = monitor["spec"]["endpoints"]
    (rule,) = endpoint["relabelings"]
    assert rule == {"targetLabel": "job", "replacement": rule["replacement"]}
    return str(rule["replacement"])
