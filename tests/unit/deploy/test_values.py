"""The chart's values: bounds, defaults, and the notes after an install."""

import json
import re
from typing import Any

import pytest
import yaml

from tests.unit.deploy.charts import CHART, MATRIX, SETS, named, pods, render, with_weights
from tests.unit.deploy.test_pods import amount

helm = pytest.importorskip("helm_python.chart", reason="needs helm-python-sdk")

DEFAULTS: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA_TEXT = (CHART / "values.schema.json").read_text()
SCHEMA: dict[str, Any] = json.loads(SCHEMA_TEXT)


def object_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema, or the one that it refers to."""
    reference = schema.get("$ref", "")
    found: dict[str, Any] = SCHEMA["definitions"][reference.rpartition("/")[2]] if reference else schema
    return found


def unlisted(values: dict[str, Any], schema: dict[str, Any], at: str = "") -> list[str]:
    """Values that the schema knows and the file does not have, or the other way round."""
    known = object_schema(schema).get("properties", {})
    if not known or not values:
        return []
    found = [f"{at}{name}" for name in set(known) ^ set(values)]
    for name in set(known) & set(values):
        if isinstance(values[name], dict):
            found += unlisted(values[name], known[name], f"{at}{name}.")
    return found


def test_the_file_has_every_value_that_the_schema_knows() -> None:
    # Resources have two parts, of which a container may have one.
    assert unlisted(DEFAULTS, SCHEMA) == ["global"], "of the charts around this one"


@pytest.mark.parametrize("definition", ["model", "worker", "weights"])
def test_the_file_s_example_names_every_field_of_a_model(definition: str) -> None:
    text = (CHART / "values.yaml").read_text().partition("\nmodels: {}")[0]
    fields = set(SCHEMA["definitions"][definition]["properties"])
    assert fields <= set(re.findall(r"^#\s+(\w+):", text, re.MULTILINE)), "commented out, each on its line"


def test_nothing_in_the_schema_takes_what_it_does_not_know() -> None:
    def open_objects(schema: Any, at: str) -> list[str]:
        if isinstance(schema, list):
            return [found for each in schema for found in open_objects(each, at)]
        if not isinstance(schema, dict):
            return []
        is_open = "properties" in schema and "type" in schema and schema.get("additionalProperties") is not False
        return [at] * is_open + [
            found
            for name, each in schema.items()
            if name not in ("if", "then")
            for found in open_objects(each, f"{at}/{name}")
        ]

    assert open_objects(SCHEMA, "") == [], "a value that is misspelt would be passed over"
    kinds = re.findall(r'"type": (?:"(\w+)"|\["(\w+)", "null"\]),\s+"additionalProperties": false', SCHEMA_TEXT)
    assert {one or other for one, other in kinds} == {"object"}
    assert len(kinds) == SCHEMA_TEXT.count('"additionalProperties": false'), "each says that it is an object"


def test_what_containers_ask_for_by_default_is_within_their_limits() -> None:
    for kind, services in DEFAULTS["resources"].items():
        assert {"frontend", "scheduler", "worker"} <= set(services)
        for name, each in services.items():
            requests, limits = each["requests"], each["limits"]
            assert {"cpu", "memory"} <= set(requests), (kind, name)
            assert all(amount(requests[unit]) <= amount(limits[unit]) for unit in set(requests) & set(limits))
    embedded, others = DEFAULTS["resources"]["embedded"], DEFAULTS["resources"]["others"]
    for name, each in embedded.items():
        for unit in ("cpu", "memory"):
            assert amount(each["requests"][unit]) < amount(others[name]["requests"][unit]), "it is a toy"


def test_a_model_s_own_resources_take_the_place_of_the_usual() -> None:
    own = {"requests": {"cpu": "7", "memory": "9Gi"}, "limits": {"memory": "11Gi"}}
    values = with_weights()
    values["models"]["qwen"] |= {
        "frontends": {"resources": own},
        "scheduler": {"resources": own},
        "workers": {"main": {"resources": own}},
    }
    found = {name: each["spec"]["containers"][0]["resources"] for name, each in pods(render(values)).items()}
    assert list(found.values()) == [own] * 3
    usual = DEFAULTS["resources"]["others"]
    for name, each in pods(render(with_weights())).items():
        assert each["spec"]["containers"][0]["resources"] == usual[name.rpartition("-")[2]]


def test_all_objects_are_the_release_s_and_name_the_chart() -> None:
    about = yaml.safe_load((CHART / "Chart.yaml").read_text())
    for values in MATRIX.values():
        for each in render(values):
            labels = each["metadata"]["labels"]
            assert labels["app.kubernetes.io/instance"] == "chat"
            assert labels["app.kubernetes.io/name"] == labels["app.kubernetes.io/part-of"] == "pagoda"
            assert labels["app.kubernetes.io/managed-by"] == "Helm"
            assert labels["helm.sh/chart"] == f"{about['name']}-{about['version']}"


def test_pods_pull_their_images_as_the_values_say() -> None:
    objects = render({**SETS, "imagePullPolicy": "Always"})
    for name, template in pods(objects).items():
        spec = template["spec"]
        assert spec["imagePullSecrets"] == [{"name": "registry"}], name
        containers = [*spec["containers"], *spec.get("initContainers", ())]
        assert {each["imagePullPolicy"] for each in containers} == {"Always"}
    images = {"frontend": "f:1", "scheduler": "s:1", "worker": "w:1", "gpuWorker": "g:1", "download": "d:1"}
    found = {
        name: [each["image"] for each in (*template["spec"].get("initContainers", ()), *template["spec"]["containers"])]
        for name, template in pods(render({**SETS, "images": images})).items()
    }
    (job,) = [name for name in found if "-download-" in name]
    assert found.pop(job) == ["d:1"]
    assert found == {
        "chat-large-frontend": ["d:1", "f:1"],
        "chat-large-scheduler": ["s:1"],
        "chat-large-worker": ["d:1", "g:1"],
        "chat-large-worker-far": ["d:1", "g:1"],
        "chat-large-worker-cpu": ["d:1", "w:1"],
    }
    own = with_weights(size="1Gi", source="a/b")
    own["models"]["qwen"]["workers"] = {"main": {"image": "own:1"}}
    spec = pods(render(own))["chat-qwen-worker"]["spec"]
    assert [each["image"] for each in (*spec["initContainers"], *spec["containers"])] == ["own:1", "own:1"]


def test_a_worker_goes_where_its_values_say() -> None:
    values = with_weights()
    affinity = {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}}
    worker = {"gpus": 1, "affinity": affinity, "runtimeClassName": "nvidia", "nodeSelector": {"zone": "a"}}
    values["models"]["qwen"]["workers"] = {"main": worker}
    spec = pods(render({**values, "gpuResource": "amd.com/gpu"}))["chat-qwen-worker"]["spec"]
    assert (spec["affinity"], spec["runtimeClassName"], spec["nodeSelector"]) == (affinity, "nvidia", {"zone": "a"})
    assert spec["tolerations"] == [{"key": "amd.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    assert spec["containers"][0]["resources"]["limits"]["amd.com/gpu"] == 1
    del worker["nodeSelector"]
    spec = pods(render({**values, "gpuResource": "amd.com/gpu"}))["chat-qwen-worker"]["spec"]
    assert "nodeSelector" not in spec, "the label is NVIDIA's"


@pytest.mark.parametrize(("seconds", "periods"), [(1, 1), (5, 1), (6, 2), (1801, 361)])
def test_with_tls_a_start_takes_no_less_than_was_asked_for(seconds: int, periods: int) -> None:
    values = with_weights() | {"tls": dict.fromkeys(("frontend", "scheduler", "worker"), "t")}
    values["models"]["qwen"]["workers"] = {"main": {"startupSeconds": seconds}}
    probe = pods(render(values))["chat-qwen-worker"]["spec"]["containers"][0]["startupProbe"]
    assert (probe["periodSeconds"], probe["failureThreshold"]) == (5, periods)
    values.pop("tls")
    probe = pods(render(values))["chat-qwen-worker"]["spec"]["containers"][0]["startupProbe"]
    assert (probe["periodSeconds"], probe["failureThreshold"]) == (1, seconds)


def test_frontends_are_given_longer_than_a_worker_s_start() -> None:
    for values in MATRIX.values():
        objects = render(values)
        deadlines = {each["spec"]["progressDeadlineSeconds"] for each in named(objects, "Deployment").values()}
        for template in pods(objects).values():
            probe = template["spec"]["containers"][0].get("startupProbe", {"periodSeconds": 0, "failureThreshold": 0})
            assert probe["periodSeconds"] * probe["failureThreshold"] < min(deadlines)


def test_what_is_told_after_an_install_leads_to_each_model() -> None:
    values = MATRIX["two-models"]
    texts = helm.Chart.load(CHART).render(values, name="chat", namespace="ai")
    (told,) = [text for name, text in texts.items() if name.endswith("NOTES.txt")]
    services = named(render(values), "Service")
    for name, model in values["models"].items():
        ports = {port["name"]: port["port"] for port in services[f"chat-{name}"]["spec"]["ports"]}
        line = f"{name} ({model['model']}) is served by the Service chat-{name}: HTTP on {ports['http']}, gRPC on"
        assert f"{line} {ports['grpc']}." in told
        assert f"kubectl -n ai port-forward service/chat-{name} {ports['http']} {ports['grpc']}" in told
    labels = {key: value for each in pods(render(values)).values() for key, value in each["metadata"]["labels"].items()}
    (selector,) = re.findall(r"kubectl -n ai get pods -l (\S+)=(\S+)", told)
    assert labels[selector[0]] == selector[1]


def test_an_entry_has_what_its_controller_is_told() -> None:
    notes = {"cert-manager.io/cluster-issuer": "acme"}
    values = {**MATRIX["two-models"], "entry": {**MATRIX["two-models"]["entry"], "annotations": notes}}
    (ingress,) = named(render(values), "Ingress").values()
    assert ingress["metadata"]["annotations"] == notes
    assert (ingress["spec"]["ingressClassName"], ingress["spec"]["rules"][0]["host"]) == ("nginx", "llm.example")
    assert {each["pathType"] for each in ingress["spec"]["rules"][0]["http"]["paths"]} == {"Prefix"}
    assert {each["backend"]["service"]["port"]["name"] for each in ingress["spec"]["rules"][0]["http"]["paths"]} == {
        "http"
    }
    plain = {"kind": "gateway", "className": "istio", "annotations": notes}
    (gateway,) = named(render({"entry": plain}), "Gateway").values()
    assert (gateway["metadata"]["annotations"], gateway["spec"]["gatewayClassName"]) == (notes, "istio")
    assert gateway["spec"]["listeners"] == [{"name": "http", "port": 80, "protocol": "HTTP"}]
    (listener,) = next(iter(named(render(SETS), "Gateway").values()))["spec"]["listeners"]
    assert (listener["port"], listener["tls"]["mode"]) == (443, "Terminate")
    shared = {"kind": "gateway", "gateway": {"name": "edge", "namespace": "infra"}, "default": "tiny"}
    (route,) = named(render({"entry": shared}), "HTTPRoute").values()
    assert route["spec"]["parentRefs"] == [{"name": "edge", "namespace": "infra"}]
    assert "hostnames" not in route["spec"]
    assert route["spec"]["rules"][0]["matches"][-1] == {"path": {"type": "PathPrefix", "value": "/"}}
    assert named(render(SETS), "HTTPRoute")["chat-large"]["spec"]["hostnames"] == ["llm.example"]


def test_a_volume_is_made_as_the_values_say() -> None:
    (claim,) = named(render(MATRIX["fetched"]), "PersistentVolumeClaim").values()
    assert (claim["metadata"]["name"], claim["spec"]["accessModes"]) == ("chat-qwen-models", ["ReadWriteOnce"])
    assert claim["spec"]["resources"] == {"requests": {"storage": "20Gi"}}
    assert "storageClassName" not in claim["spec"]
    values = with_weights(size="1Gi", storageClass="fast")
    (claim,) = named(render(values), "PersistentVolumeClaim").values()
    assert (claim["spec"]["storageClassName"], claim["spec"]["accessModes"]) == ("fast", ["ReadWriteMany"])
    spec = pods(render(with_weights(hostPath="/data", source="a/b")))["chat-qwen-worker"]["spec"]
    (volume,) = [each for each in spec["volumes"] if each["name"] == "models"]
    assert volume["hostPath"] == {"path": "/data", "type": "Directory"}, "one that is missing is not made"
    spec = pods(render(with_weights(image="registry/qwen:1")))["chat-qwen-worker"]["spec"]
    (volume,) = [each for each in spec["volumes"] if each["name"] == "checkpoint"]
    assert volume["image"] == {"reference": "registry/qwen:1", "pullPolicy": DEFAULTS["imagePullPolicy"]}
    mounts = {each["name"]: each for each in spec["containers"][0]["volumeMounts"]}
    assert mounts["checkpoint"] == {"name": "checkpoint", "mountPath": "/mnt/models", "readOnly": True}


def test_a_download_has_the_store_s_secret_and_a_job_ends() -> None:
    (job,) = named(render(SETS), "Job").values()
    assert job["spec"]["backoffLimit"] >= 5, "a store may be away for minutes"
    spec = job["spec"]["template"]["spec"]
    assert spec["restartPolicy"] == "OnFailure"
    (container,) = spec["containers"]
    assert container["command"] == ["pagoda-download"]
    assert container["envFrom"] == [{"secretRef": {"name": "store"}}]
    env = {each["name"]: each.get("value") for each in container["env"]}
    assert (env["HOME"], env["HF_HOME"]) == ("/tmp", "/tmp/hub"), "the root file system cannot be written to"
    mounts = {each["mountPath"] for each in container["volumeMounts"]}
    assert mounts == {"/tmp", "/models"}
    token = {each["name"]: each for each in container["env"]}["HF_TOKEN"]["valueFrom"]["secretKeyRef"]
    assert token == {"name": DEFAULTS["secrets"]["hub"], "key": "token", "optional": True}
    waits = pods(render(SETS))["chat-large-frontend"]["spec"]["initContainers"][0]
    assert waits["envFrom"] == container["envFrom"]


@pytest.mark.parametrize(("asked", "percent"), [({"maxReplicas": 3, "cpu": 70}, 70), ({"maxReplicas": 3}, 80)])
def test_frontends_are_added_by_their_use_of_cores(asked: dict[str, int], percent: int) -> None:
    values = with_weights()
    values["models"]["qwen"]["frontends"] = {"autoscaling": asked}
    hpa = named(render(values), "HorizontalPodAutoscaler")["chat-qwen-frontend"]["spec"]
    target = {"type": "Utilization", "averageUtilization": percent}
    assert hpa["metrics"] == [{"type": "Resource", "resource": {"name": "cpu", "target": target}}]
    assert (hpa["minReplicas"], hpa["maxReplicas"]) == (2, 3)
    keda = named(render({**values, "autoscaling": {"by": "keda"}}), "ScaledObject")["chat-qwen-frontend"]["spec"]
    assert keda["triggers"] == [{"type": "cpu", "metricType": "Utilization", "metadata": {"value": str(percent)}}]
    assert (keda["minReplicaCount"], keda["maxReplicaCount"]) == (2, 3)


@pytest.mark.parametrize("name", sorted(MATRIX))
def test_frontends_are_reached_by_the_clients_that_the_values_name_alone(name: str) -> None:
    peers = [{"ipBlock": {"cidr": "10.0.0.0/8"}}]
    objects = render({**MATRIX[name], "networkPolicies": {"clients": peers}, "monitoring": {"enabled": False}})
    frontends = [
        each["spec"]["ingress"]
        for each in named(objects, "NetworkPolicy").values()
        if each["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "frontend"
    ]
    assert frontends
    assert all([rule.get("from") for rule in rules] == [peers] for rules in frontends)
