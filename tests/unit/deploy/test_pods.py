"""What an API server, a kubelet or a controller would object to in the pods of the manifests, whatever makes the pods.

Tools that check manifests know Deployments and StatefulSets; the pods of a LeaderWorkerSet they pass over. Schemas are
not known here."""

import re
import shutil
from collections import Counter
from typing import Any

import pytest

from tests.unit.deploy.test_images import environment
from tests.unit.deploy.test_kubernetes import PROBES, RENDERED, flags_of, objects_of, pods_of, settings_of

POD_LABELS = {
    "StatefulSet": {"apps.kubernetes.io/pod-index", "statefulset.kubernetes.io/pod-name"},
    "LeaderWorkerSet": {
        f"leaderworkerset.sigs.k8s.io/{name}" for name in ("name", "group-index", "worker-index", "group-key")
    },
}
"""What the controllers of a kind add to the labels of a template."""
LEADER_WORKER_SET_VARIABLES = {"LWS_LEADER_ADDRESS", "LWS_GROUP_SIZE", "LWS_WORKER_INDEX"}
"""Set in every container, the last one since version 0.6."""
HANDLERS = {"grpc", "httpGet", "exec", "tcpSocket"}
VOLUMES = {"emptyDir", "persistentVolumeClaim", "secret"}
"""Those of the Pod Security Standard `restricted` that are in use."""
PORT_FLAGS = {"--port", "--grpc-port", "--metrics-port"}
DEFAULT_PORTS = {"frontend": {"--port": 8000, "--grpc-port": 50051}, "scheduler": {"--port": 50052}, "worker": {}}
"""Where no one says otherwise."""
SUFFIXES = {"": 1.0, "m": 1e-3, "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30}

pytestmark = pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl")


@pytest.mark.parametrize("name", RENDERED)
def test_probes_ask_ports_that_their_container_lists(name: str) -> None:
    for _, container in containers_of(name):
        ports = {port[key] for port in container["ports"] for key in ("name", "containerPort")}
        for probe in (container[f"{each}Probe"] for each in PROBES):
            (handler,) = HANDLERS & set(probe)
            assert handler != "grpc" or isinstance(probe["grpc"]["port"], int), "the API knows no names here"
            if handler == "exec":
                assert any(f":{port}" in word for word in probe["exec"]["command"] for port in ports)
            else:
                assert probe[handler]["port"] in ports


@pytest.mark.parametrize("name", RENDERED)
def test_ports_and_variables_are_named_once(name: str) -> None:
    for template in pods_of(objects_of(name)).values():
        containers = template["spec"]["containers"]
        ports = [port for container in containers for port in container["ports"]]
        # The containers of a pod share its network.
        assert once(port["containerPort"] for port in ports)
        assert once(port["name"] for port in ports)
        assert all(re.fullmatch(r"(?=.{1,15}$)[a-z0-9]+(-[a-z0-9]+)*", port["name"]) for port in ports)
        for container in containers:
            assert once(variable["name"] for variable in container["env"])
            assert once(mount["mountPath"] for mount in container["volumeMounts"])
            known = {variable["name"] for variable in container["env"]}
            assert set(re.findall(r"\$\((\w+)\)", " ".join(container["args"]))) <= known


@pytest.mark.parametrize("name", RENDERED)
def test_no_two_containers_of_a_pod_listen_on_one_port(name: str) -> None:
    """As they are started: the image sets flags, over it the ConfigMap, the container and its arguments."""
    settings = settings_of(objects_of(name))
    for service, template in pods_of(objects_of(name)).items():
        listened = Counter[int]()
        for container in template["spec"]["containers"]:
            words = dict(word.partition("=")[::2] for word in container["args"])
            ranks = range(int(words.get("--tensor-parallel-size", 1)))
            ports = {port + rank for port in ports_listened_on(service, container, settings) for rank in ranks}
            assert ports <= {port["containerPort"] for port in container["ports"]}, "each port is named"
            listened.update(ports)
        assert once(listened.elements()), f"{service}: {listened}"


def test_a_port_that_only_the_image_sets_is_listened_on() -> None:
    container = {"args": ["--port=50054"], "env": [{"name": "PAGODA_METRICS_PORT", "value": "9091"}]}
    assert ports_listened_on("worker", container, {}) == {50054, 9091}
    assert ports_listened_on("worker", {"args": [], "env": []}, {}) == {50053, 9090}
    assert ports_listened_on("frontend", {"args": ["--port=80"], "env": []}, {"PAGODA_GRPC_PORT": "81"}) == {80, 81}


@pytest.mark.parametrize("name", RENDERED)
def test_all_that_pods_refer_to_exists(name: str) -> None:
    objects = objects_of(name)
    names = {(each["kind"], each["metadata"]["name"]) for each in objects}
    for each in objects:
        # What someone else makes.
        for word in each["metadata"].get("annotations", {}).get("pagoda/external", "").split():
            kind, _, external = word.partition("/")
            names.add(({"secret": "Secret", "configmap": "ConfigMap"}[kind], external))
    for template in pods_of(objects).values():
        spec = template["spec"]
        assert ("ServiceAccount", spec["serviceAccountName"]) in names
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        assert len(volumes) == len(spec["volumes"])
        for container in spec["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} <= set(volumes)
        missing = {(kind, wanted) for kind, wanted, optional in references(spec) if not optional} - names
        assert not missing


@pytest.mark.parametrize("name", RENDERED)
def test_labels_that_pods_read_are_there(name: str) -> None:
    for each in objects_of(name):
        template = template_of(each)
        if template is None:
            continue
        labels = {*template["metadata"]["labels"], *POD_LABELS.get(each["kind"], ())}
        for container in template["spec"]["containers"]:
            for variable in container["env"]:
                path = variable.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath", "status.podIP")
                label = re.fullmatch(r"metadata\.labels\['(.+)'\]", path)
                assert path == "status.podIP" or (label and label[1] in labels), path


@pytest.mark.parametrize("name", ["overlays/multi-node", "overlays/multi-node-gpu"])
def test_a_rank_of_a_leader_worker_set_is_told_all_that_it_asks_for(name: str) -> None:
    (workers,) = [each for each in objects_of(name) if each["kind"] == "LeaderWorkerSet"]
    template = workers["spec"]["leaderWorkerTemplate"]
    (container,) = template["workerTemplate"]["spec"]["containers"]
    own = {variable["name"] for variable in container["env"]}
    # The set puts its own before those of the template, in the place of any of the same name.
    assert not own & LEADER_WORKER_SET_VARIABLES
    assert {"LWS_GROUP_INDEX", "LWS_GROUP_SIZE", "LWS_WORKER_INDEX"} <= own | LEADER_WORKER_SET_VARIABLES
    # Pods of a StatefulSet, underneath.
    assert template["workerTemplate"]["spec"].get("restartPolicy", "Always") == "Always"
    assert "leaderTemplate" not in template, "one template: rank 0 is a rank like the others"
    rollout = workers["spec"]["rolloutStrategy"]["rollingUpdateConfiguration"]
    assert rollout["maxUnavailable"] or rollout["maxSurge"]


@pytest.mark.parametrize("name", RENDERED)
def test_selectors_find_pods_of_one_service_by_labels_of_the_template(name: str) -> None:
    objects = objects_of(name)
    pods = pods_of(objects)
    for each in objects:
        if each["kind"] in ("Service", "PodDisruptionBudget", "NetworkPolicy", "Deployment", "StatefulSet"):
            labels = labels_selected(each)
            assert labels["app.kubernetes.io/name"] == "pagoda", "others may have a component of that name"
            assert len(selected(pods, labels)) == 1
        if each["kind"] == "NetworkPolicy":
            peers = [peer for rule in each["spec"]["ingress"] for peer in rule.get("from", ()) if "podSelector" in peer]
            assert all(len(selected(pods, peer["podSelector"]["matchLabels"])) == 1 for peer in peers)
    for template in pods.values():
        for constraint in template["spec"].get("topologySpreadConstraints", ()):
            assert constraint["labelSelector"]["matchLabels"].items() <= template["metadata"]["labels"].items()


@pytest.mark.parametrize("name", RENDERED)
def test_services_and_policies_name_ports_of_the_pods_that_they_select(name: str) -> None:
    objects = objects_of(name)
    pods = pods_of(objects)
    for each in objects:
        if each["kind"] == "Service":
            named = {port["targetPort"] for port in each["spec"]["ports"]}
        elif each["kind"] == "NetworkPolicy":
            named = {port["port"] for rule in each["spec"]["ingress"] for port in rule.get("ports", ())}
        else:
            continue
        (service,) = selected(pods, labels_selected(each))
        assert named <= {
            port["name"] for container in pods[service]["spec"]["containers"] for port in container["ports"]
        }


@pytest.mark.parametrize("name", RENDERED)
def test_budgets_never_hold_a_node(name: str) -> None:
    pods = pods_of(objects_of(name))
    budgets = [each for each in objects_of(name) if each["kind"] == "PodDisruptionBudget"]
    assert [selected(pods, labels_selected(each)) for each in budgets] == [["frontend"], ["worker"]]
    for each in budgets:
        # With one pod, the default is to wait until it is ready, though it be never.
        assert each["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
        assert each["spec"]["maxUnavailable"] == 1
        assert "minAvailable" not in each["spec"]


@pytest.mark.parametrize("name", RENDERED)
def test_pods_keep_to_the_restricted_standard(name: str) -> None:
    for template in pods_of(objects_of(name)).values():
        spec = template["spec"]
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["securityContext"]["runAsUser"] > 0
        assert not {"hostNetwork", "hostPID", "hostIPC", "initContainers"} & set(spec)
        assert all(set(volume) - {"name"} <= VOLUMES for volume in spec["volumes"])
        for container in spec["containers"]:
            assert not {"privileged", "runAsUser", "runAsNonRoot", "seccompProfile"} & set(container["securityContext"])
            assert not any("hostPort" in port for port in container["ports"])


@pytest.mark.parametrize("name", RENDERED)
def test_requests_are_within_limits(name: str) -> None:
    for _, container in containers_of(name):
        requests, limits = container["resources"]["requests"], container["resources"]["limits"]
        assert {"cpu", "memory"} <= set(requests)
        assert "memory" in limits
        assert all(amount(requests[each]) <= amount(limits[each]) for each in set(requests) & set(limits))
        # Devices: whole, not to be had beyond the limit.
        assert all(requests.get(each) == limits.get(each) for each in {*requests, *limits} if "/" in each)


NODE = {"cpu": 2.0, "memory": 4 * 2.0**30}
SYSTEM = {"cpu": 1.0, "memory": 1.5 * 2.0**30}
"""What a node's kubelet, DNS, network and proxy ask for, generously."""


@pytest.mark.parametrize("name", ["base", "overlays/tensor-parallel", "overlays/tls", "overlays/observability"])
def test_the_embedded_model_fits_a_node_of_two_cores_also_during_an_update(name: str) -> None:
    asked = dict.fromkeys(NODE, 0.0)
    for each in objects_of(name):
        template = template_of(each)
        if template is None:
            continue
        surge = each["spec"].get("strategy", {}).get("rollingUpdate", {}).get("maxSurge", 0)
        for container in template["spec"]["containers"]:
            for resource in NODE:
                quantity = amount(container["resources"]["requests"][resource])
                asked[resource] += quantity * (each["spec"]["replicas"] + surge)
    assert all(asked[resource] + SYSTEM[resource] <= NODE[resource] for resource in NODE), asked


def template_of(each: dict[str, Any]) -> dict[str, Any] | None:
    """The pod template of an object, if it makes pods."""
    return next(iter(pods_of([each]).values()), None)


def containers_of(name: str) -> list[tuple[str, dict[str, Any]]]:
    """Of all pods, with the service that runs in them."""
    pods = pods_of(objects_of(name))
    return [(service, container) for service, each in pods.items() for container in each["spec"]["containers"]]


def ports_listened_on(service: str, container: dict[str, Any], settings: dict[str, str]) -> set[int]:
    """Of a container that is started as image, settings, variables and arguments say; 0, any port, is left out."""
    own = {each["name"]: each["value"] for each in container["env"] if "value" in each}
    variables = environment(service) | settings | own
    words = dict(word.partition("=")[::2] for word in container["args"])
    ports = {}
    for flag in flags_of(service):
        if flag in PORT_FLAGS:
            variable = "PAGODA_" + flag[2:].replace("-", "_").upper()
            ports[flag] = int(words.get(flag) or variables.get(variable) or DEFAULT_PORTS[service].get(flag, 0))
    return set(ports.values()) - {0}


def labels_selected(each: dict[str, Any]) -> dict[str, str]:
    """The labels that an object selects pods by."""
    spec = each["spec"]
    found = spec.get("podSelector") or spec["selector"]
    labels: dict[str, str] = found if each["kind"] == "Service" else found["matchLabels"]
    return labels


def selected(pods: dict[str, dict[str, Any]], labels: dict[str, str]) -> list[str]:
    """The services whose pods have these labels."""
    return [service for service, each in pods.items() if labels.items() <= each["metadata"]["labels"].items()]


def references(spec: dict[str, Any]) -> list[tuple[str, str, bool]]:
    """Kind, name, whether it may be missing: all that a pod's volumes and variables are filled from."""
    found = []
    for volume in spec["volumes"]:
        for key, kind, field in (
            ("configMap", "ConfigMap", "name"),
            ("secret", "Secret", "secretName"),
            ("persistentVolumeClaim", "PersistentVolumeClaim", "claimName"),
        ):
            if key in volume:
                found.append((kind, volume[key][field], volume[key].get("optional", False)))
    for container in spec["containers"]:
        sources = [*container.get("envFrom", ()), *(each.get("valueFrom", {}) for each in container["env"])]
        for source in sources:
            for key, value in source.items():
                if key.startswith(("configMap", "secret")):
                    kind = "ConfigMap" if key.startswith("configMap") else "Secret"
                    found.append((kind, value["name"], value.get("optional", False)))
    return found


def once(values: Any) -> bool:
    """Whether nothing is there twice."""
    return max(Counter(values).values(), default=1) == 1


def amount(quantity: str) -> float:
    """In cores, bytes, or devices."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(m|Ki|Mi|Gi)?", quantity)
    assert match, f"{quantity} is not a quantity"
    return float(match[1]) * SUFFIXES[match[2] or ""]
