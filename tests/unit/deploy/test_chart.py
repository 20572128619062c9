"""The Helm chart, rendered by Helm's own engine: flags, ports, and rights of its pods."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from pagoda.v1 import types_pb2
from pagoda_common.config.flags.flags import add_frontend_flags, frontend_config_from_args
from pagoda_common.config.flags.settings import ServiceParser, parse_service_args
from pagoda_common.config.frontend_config import FrontendConfig
from pagoda_common.metrics.engine_metrics import EngineCollector
from tests.unit.deploy.charts import CHART, MATRIX, SETS, SHARED, TLS, TWO_MODELS, UNRESTRICTED, named, pods, render
from tests.unit.deploy.charts import with_weights as weighted
from tests.unit.deploy.test_kubernetes import NOT_FLAGS, flags_of
from tests.unit.deploy.test_pods import VOLUMES, once, ports_listened_on

helm = pytest.importorskip("helm_python.chart", reason="needs helm-python-sdk")

ROOT = Path(__file__).parents[3]
COMPONENT = "app.kubernetes.io/component"
SERVICES = ("frontend", "scheduler", "worker")
ALL = sorted(MATRIX | UNRESTRICTED)


def values_of(name: str) -> dict[str, Any]:
    return (MATRIX | UNRESTRICTED)[name]


def flag_of(variable: str) -> str:
    return "--" + variable.removeprefix("PAGODA_").replace("_", "-").lower()


def services(objects: list[dict[str, Any]]) -> dict[str, tuple[str, dict[str, Any]]]:
    """Service and pod spec of what runs a service, by name."""
    found = {name: (each["metadata"]["labels"][COMPONENT], each["spec"]) for name, each in pods(objects).items()}
    return {name: each for name, each in found.items() if each[0] in SERVICES}


def policies(objects: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: each["spec"] for name, each in named(objects, "NetworkPolicy").items()}


@pytest.mark.parametrize("name", ["defaults", "two-models-tls", "sets"])
def test_the_linter_has_no_complaint(name: str) -> None:
    report = helm.lint(CHART, values_of(name), strict=True)
    assert report["errors"] == []
    assert all(each["severity"] < 2 for each in report["messages"]), report


@pytest.mark.parametrize("name", ALL)
def test_services_start_with_flags_that_they_have_on_ports_that_they_name(name: str) -> None:
    objects = render(values_of(name))
    settings = named(objects, "ConfigMap")
    every_flag = {flag for service in SERVICES for flag in flags_of(service)}
    for full, (service, spec) in services(objects).items():
        (container,) = spec["containers"]
        (source,) = container["envFrom"]
        data = settings[source["configMapRef"]["name"]]["data"]
        assert {flag_of(each) for each in set(data) - NOT_FLAGS} <= every_flag
        words = dict(word.partition("=")[::2] for word in container["args"])
        assert set(words) <= flags_of(service)
        own = {each["name"] for each in container["env"] if each["name"].startswith("PAGODA_")}
        assert {"--" + each[7:].replace("_", "-").lower() for each in own - {"PAGODA_SERVICE_TOKEN"}} <= flags_of(
            service
        )
        known = {each["name"] for each in container["env"]}
        assert set(re.findall(r"\$\((\w+)\)", " ".join(container["args"]))) <= known
        ranks = int(words.get("--tensor-parallel-size", 1))
        listened = {port + rank for port in ports_listened_on(service, container, data) for rank in range(ranks)}
        assert listened == {port["containerPort"] for port in container["ports"]}, full
        names = [port["name"] for port in container["ports"]]
        assert once(names)
        assert all(re.fullmatch(r"(?=.{1,15}$)[a-z]+(-[0-9]+)?", each) for each in names)


@pytest.mark.parametrize("name", ALL)
def test_pods_are_restricted_and_all_that_they_mount_is_there(name: str) -> None:
    objects = render(values_of(name))
    claims = named(objects, "PersistentVolumeClaim")
    for each in objects:
        (template, *_) = [*pods([each]).values(), None]
        if template is None:
            continue
        spec = template["spec"]
        security = spec["securityContext"]
        assert (security["runAsNonRoot"], security["runAsUser"]) == (True, 10001)
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["automountServiceAccountToken"] is spec["enableServiceLinks"] is False
        assert spec["serviceAccountName"] in named(objects, "ServiceAccount")
        kinds = {kind for volume in spec["volumes"] for kind in set(volume) - {"name"}}
        extra = {"host-path": {"hostPath"}, "image": {"image"}, "image-shared": {"image"}}.get(name, set())
        assert kinds <= VOLUMES | extra
        made = [template["metadata"]["name"] for template in each["spec"].get("volumeClaimTemplates", ())]
        volumes = {volume["name"] for volume in spec["volumes"]} | set(made)
        assert len(volumes) == len(spec["volumes"]) + len(made)
        external = each["metadata"].get("annotations", {}).get("pagoda/external", "").split()
        for volume in spec["volumes"]:
            if "secret" in volume:
                assert f"secret/{volume['secret']['secretName']}" in external
            if "persistentVolumeClaim" in volume:
                claim = volume["persistentVolumeClaim"]["claimName"]
                assert claim in claims or f"persistentvolumeclaim/{claim}" in external
        for container in [*spec["containers"], *spec.get("initContainers", ())]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
            assert once(mount["mountPath"] for mount in container["volumeMounts"])
            assert once(variable["name"] for variable in container["env"])
            assert {"cpu", "memory"} <= set(container["resources"]["requests"])


@pytest.mark.parametrize("name", ALL)
def test_selectors_find_the_pods_of_one_service_of_one_model(name: str) -> None:
    objects = render(values_of(name))
    templates = pods(objects)
    for each in objects:
        spec = each.get("spec", {})
        found = spec.get("podSelector") or (spec.get("selector") if each["kind"] != "PodMonitor" else None)
        if not found:
            continue
        wanted = found if each["kind"] == "Service" else found["matchLabels"]
        hits = [full for full, have in templates.items() if wanted.items() <= have["metadata"]["labels"].items()]
        labels = [templates[hit]["metadata"]["labels"] for hit in hits]
        kinds = {(each["pagoda/model"], each[COMPONENT]) for each in labels}
        assert len(kinds) == 1, each["metadata"]["name"]
        if each["kind"] != "NetworkPolicy":
            assert len(hits) == 1, "a set of workers has a budget and a Service of its own"
        for rule in [*spec.get("ingress", ()), *spec.get("egress", ())] if each["kind"] == "NetworkPolicy" else []:
            for peer in [*rule.get("from", ()), *rule.get("to", ())]:
                peers = peer.get("podSelector", {}).get("matchLabels", {})
                assert any(peers.items() <= have["metadata"]["labels"].items() for have in templates.values())


@pytest.mark.parametrize("name", sorted(set(ALL) - {"no-egress", "open"}))
def test_policies_let_services_reach_each_other_and_nothing_else(name: str) -> None:
    objects = render(values_of(name))
    found = policies(objects)
    for full, (service, spec) in services(objects).items():
        of_this = pods(objects)[full]["metadata"]["labels"]
        model = of_this["pagoda/model"]
        own = found[f"chat-{model}-{service}"]
        assert own["policyTypes"] == ["Ingress", "Egress"]
        ports = {port["name"]: port["containerPort"] for port in spec["containers"][0]["ports"]}
        callers = [rule for rule in own["ingress"] if "podSelector" in rule.get("from", [{}])[0]]
        for rule in callers:
            for peer in rule["from"]:
                labels = peer["podSelector"]["matchLabels"]
                caller = found[f"chat-{labels['pagoda/model']}-{labels[COMPONENT]}"]
                out = [each for each in caller["egress"] if "to" in each]
                reached = {
                    port["port"]
                    for each in out
                    if any(to["podSelector"]["matchLabels"].items() <= of_this.items() for to in each["to"])
                    for port in each.get("ports", ())
                }
                named_ports = {port["port"] for port in rule.get("ports", ())}
                assert {ports[each] for each in named_ports & set(ports)} <= reached, "in here, and out there"
        assert {"ports": [{"port": 53, "protocol": "UDP"}, {"port": 53, "protocol": "TCP"}]} in own["egress"]
        reaches_hub = {"ports": [{"port": 443}]} in own["egress"]
        offline = ("defaults", "multi-node-tls", "filled", "image", "image-shared", "two-models-shared")
        needs_hub = name not in offline and service != "scheduler"
        assert reaches_hub is (needs_hub and model not in ("small", "claimed")), full


def test_clients_and_further_peers_are_as_the_values_say() -> None:
    found = policies(render(SETS))
    asked = SETS["networkPolicies"]
    assert found["chat-large-frontend"]["ingress"][0]["from"] == asked["clients"]
    assert all(asked["extraEgress"][0] in each["egress"] for each in found.values())
    assert found["chat-large-download"]["ingress"] == []
    other_ranks = {"podSelector": {"matchLabels": {**_labels("worker"), "pagoda/model": "large"}}}
    assert {"from": [other_ranks]} in found["chat-large-worker"]["ingress"]
    assert {"to": [other_ranks]} in found["chat-large-worker"]["egress"]
    assert policies(render(MATRIX["open"])) == {}
    assert policies(render(MATRIX["no-egress"]))["chat-tiny-worker"]["policyTypes"] == ["Ingress"]


def _labels(component: str) -> dict[str, str]:
    return {"app.kubernetes.io/name": "pagoda", "app.kubernetes.io/instance": "chat", COMPONENT: component}


def test_each_model_has_its_settings_devices_and_ranks() -> None:
    objects = render(TWO_MODELS)
    settings = {name: each["data"] for name, each in named(objects, "ConfigMap").items() if "dashboard" not in name}
    assert set(settings) == {"chat-small", "chat-large"}
    assert settings["chat-small"]["PAGODA_MAX_MODEL_LEN"] == "8k"
    assert settings["chat-small"]["PAGODA_SCHEDULER"] == "chat-small-scheduler:50052"
    assert settings["chat-large"]["PAGODA_DEVICE"] == "cuda"
    assert "PAGODA_DEVICE" not in settings["chat-small"]
    small, large = (services(objects)[f"chat-{name}-worker"][1]["containers"][0] for name in ("small", "large"))
    assert small["args"][-2:] == ["--tensor-parallel-size=2", "--group=$(GROUP)"]
    assert large["resources"]["limits"]["nvidia.com/gpu"] == large["resources"]["requests"]["nvidia.com/gpu"] == 1
    assert (small["image"], large["image"]) == ("pagoda-worker", "pagoda-worker:cuda")
    assert {"name": "models", "mountPath": "/models"} in large["volumeMounts"]
    assert named(objects, "StatefulSet")["chat-large-worker"]["spec"]["replicas"] == 2


def frontend_config(objects: list[dict[str, Any]], name: str) -> FrontendConfig:
    """What the frontends of that name read of their settings."""
    data = named(objects, "ConfigMap")[name]["data"]
    parser = ServiceParser()
    add_frontend_flags(parser)
    return frontend_config_from_args(parse_service_args(parser, [], data))


def test_shared_frontends_have_an_entry_for_each_of_their_models() -> None:
    objects = render(SHARED)
    config = frontend_config(objects, "chat-shared")
    models = {each.scheduler: each for each in config.of_models}
    assert {at: (each.served_model_name, each.model) for at, each in models.items()} == {
        "chat-small-scheduler:50052": (("small", "tiny"), "pagoda-tiny"),
        "chat-chat-scheduler:50052": (("Qwen/Qwen3-8B",), models["chat-chat-scheduler:50052"].model),
        "chat-hub-scheduler:50052": (("Qwen/Qwen3-0.6B",), "Qwen/Qwen3-0.6B"),
        "chat-claimed-scheduler:50052": (("embed",), "/shared/claimed/bge"),
        "chat-kept-scheduler:50052": (("kept",), models["chat-kept-scheduler:50052"].model),
    }
    chat = models["chat-chat-scheduler:50052"]
    assert (chat.tool_call_parser, chat.enable_auto_tool_choice, chat.max_logprobs) == ("hermes", True, 5)
    assert all(each.enable_prompt_tokens_details for each in models.values())
    deployments = named(objects, "Deployment")
    assert [name for name in deployments if name.endswith("-frontend")] == ["chat-own-frontend", "chat-shared-frontend"]
    spec = deployments["chat-shared-frontend"]["spec"]["template"]["spec"]
    downloads = {each["name"]: each["args"] for each in spec["initContainers"]}
    assert set(downloads) == {"download-chat", "download-kept"}
    for name, (_, target, flag) in downloads.items():
        assert target == models[f"chat-{name.removeprefix('download-')}-scheduler:50052"].model
        assert flag == "--without-weights", "they wait for no one's weights"
    assert "chat-shared" in named(objects, "Service")
    assert "PAGODA_MODELS" not in named(objects, "ConfigMap")["chat-chat"]["data"], "of its scheduler and workers"


def test_shared_frontends_are_an_address_beside_those_of_other_models() -> None:
    (ingress,) = named(render(SHARED), "Ingress").values()
    paths = {path["path"]: path["backend"]["service"]["name"] for path in ingress["spec"]["rules"][0]["http"]["paths"]}
    assert paths == {"/own": "chat-own", "/shared": "chat-shared", "/": "chat-shared"}
    routes = named(render(MATRIX["shared-tls"]), "HTTPRoute")
    assert set(routes) == {"chat-own", "chat-shared"}
    (rule,) = routes["chat-shared"]["spec"]["rules"]
    headers = {each["headers"][0]["value"] for each in rule["matches"] if "headers" in each}
    assert headers == {"small", "tiny", "Qwen/Qwen3-8B", "Qwen/Qwen3-0.6B", "embed", "kept"}


def test_sets_of_worker_groups_differ_in_pods_devices_and_numbers() -> None:
    objects = render(SETS)
    (far,) = named(objects, "LeaderWorkerSet").values()
    assert (far["metadata"]["name"], far["spec"]["leaderWorkerTemplate"]["size"]) == ("chat-large-worker-far", 2)
    workers = {name: spec for name, (service, spec) in services(objects).items() if service == "worker"}
    containers = {name: spec["containers"][0] for name, spec in workers.items()}
    assert set(containers) == {"chat-large-worker", "chat-large-worker-far", "chat-large-worker-cpu"}
    groups = {name: [word for word in each["args"] if word.startswith("--group")] for name, each in containers.items()}
    # Of one rank: the scheduler gives it a free number. The others' do not meet, whatever the number of groups.
    assert groups == {
        "chat-large-worker": ["--group=3000$(GROUP)"],
        "chat-large-worker-far": ["--group=2000$(LWS_GROUP_INDEX)"],
        "chat-large-worker-cpu": [],
    }
    assert "--tensor-parallel-size=8" in containers["chat-large-worker-far"]["args"]
    tolerations = {name: spec.get("tolerations", [{}])[0].get("key") for name, spec in workers.items()}
    assert list(tolerations.values()).count("nvidia.com/gpu") == 2
    assert tolerations["chat-large-worker-cpu"] == "spare"
    assert "PAGODA_DEVICE" not in named(objects, "ConfigMap")["chat-large"]["data"], "one set has none"
    assert named(objects, "StatefulSet")["chat-large-worker-cpu"]["spec"]["replicas"] == 0
    (memory,) = [each for each in workers["chat-large-worker"]["volumes"] if each["name"] == "shared-memory"]
    assert memory["emptyDir"] == {"medium": "Memory", "sizeLimit": "32Gi"}


def test_a_change_of_settings_rolls_the_pods_of_that_model_alone() -> None:
    def annotations(length: str) -> dict[str, str]:
        models = {**TWO_MODELS["models"], "small": {"model": "pagoda-tiny", "settings": {"MAX_MODEL_LEN": length}}}
        found = pods(render({**TWO_MODELS, "models": models}))
        return {name: each["metadata"]["annotations"]["pagoda/settings"] for name, each in found.items()}

    before, after = annotations("8k"), annotations("4k")
    assert {name for name in before if before[name] != after[name]} == {f"chat-small-{each}" for each in SERVICES}


@pytest.mark.parametrize("name", ["two-models-tls", "shared-tls", "sets", "multi-node-tls"])
def test_with_tls_nothing_is_plaintext_but_ranks_on_several_nodes(name: str) -> None:
    objects = render(MATRIX[name])
    for full, (service, spec) in services(objects).items():
        (container,) = spec["containers"]
        data = named(objects, "ConfigMap")[container["envFrom"][0]["configMapRef"]["name"]]["data"]
        assert (data["PAGODA_INSECURE"], data["PAGODA_TLS_CA"]) == ("false", "/etc/pagoda/tls/ca.crt")
        env = {each["name"]: each.get("value") for each in container["env"]}
        assert env["PAGODA_TLS_SERVER_NAME"] == ("pagoda-worker" if service == "scheduler" else "pagoda-scheduler")
        spans_nodes = full in named(objects, "LeaderWorkerSet")
        assert env.get("PAGODA_INSECURE") == ("true" if spans_nodes else None)
        (tls,) = [volume["secret"] for volume in spec["volumes"] if volume["name"] == "tls"]
        assert tls == {"secretName": TLS[service], "defaultMode": 0o440}
        if service == "frontend":
            continue
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            command = container[probe]["exec"]["command"]
            port = {"scheduler": 50052, "worker": 50053}[service]
            assert command[:2] == ["pagoda-health", f"127.0.0.1:{port}"]
            assert f"--tls-server-name=pagoda-{service}" in command
            assert ("--service=liveness" in command) is (probe != "readinessProbe")


def test_keys_and_tokens_come_from_secrets() -> None:
    objects = render(TWO_MODELS)
    for service, spec in services(objects).values():
        (container,) = spec["containers"]
        env = {each["name"]: each for each in container["env"]}
        token = env["PAGODA_SERVICE_TOKEN"]["valueFrom"]["secretKeyRef"]
        assert token == {"name": "service", "key": "token"}
        files = [env[name]["value"] for name in ("PAGODA_API_KEY_FILE", "PAGODA_OPERATOR_KEY_FILE") if name in env]
        assert files == (["/etc/pagoda/keys/keys", "/etc/pagoda/operator-keys/keys"] if service == "frontend" else [])


@pytest.mark.parametrize(
    ("weights", "location", "downloads"),
    [
        ({}, "Qwen/Qwen3-0.6B", []),
        ({"claim": "models", "path": "qwen3/"}, "/models/qwen3/", []),
        ({"image": "registry.example/qwen3:1"}, "/mnt/models", []),
        ({"image": "registry.example/qwen3:1", "path": "a"}, "/mnt/models/a", []),
        ({"size": "1Gi", "source": "a/b"}, "/models/qwen-", ["frontend --wait", "worker"]),
        ({"claim": "c", "source": "a/b"}, "/models/qwen-", ["frontend --wait", "worker"]),
        (
            {"size": "1Gi", "source": "s3://a/b", "download": "job", "revision": "v1"},
            "/models/qwen-",
            ["download --revision=v1", "frontend --revision=v1 --wait", "worker --revision=v1 --wait"],
        ),
        ({"perPod": "1Gi", "source": "a/b"}, "/models/qwen-", ["frontend --without-weights", "worker"]),
        ({"hostPath": "/data", "source": "a/b"}, "/models/qwen-", ["frontend --without-weights", "worker"]),
    ],
)
def test_weights_are_where_the_services_look_for_them(
    weights: dict[str, str], location: str, downloads: list[str]
) -> None:
    objects = render(weighted(**weights))
    data = named(objects, "ConfigMap")["chat-qwen"]["data"]
    assert data["PAGODA_MODEL"].startswith(location)
    assert data.get("PAGODA_SERVED_MODEL_NAME") == (None if location.startswith("Qwen") else "Qwen/Qwen3-0.6B")
    found = []
    for template in pods(objects).values():
        spec, component = template["spec"], template["metadata"]["labels"][COMPONENT]
        for container in [*spec["containers"], *spec.get("initContainers", ())]:
            if container["name"] == "download":
                source, target, *flags = container["args"]
                assert (source, target) == (weights["source"], data["PAGODA_MODEL"])
                found.append(" ".join([component, *flags]))
    assert sorted(found) == downloads


def test_a_worker_s_own_claim_is_a_template_and_a_shared_one_outlives_the_release() -> None:
    objects = render(MATRIX["per-pod"])
    (claim,) = named(objects, "StatefulSet")["chat-qwen-worker"]["spec"]["volumeClaimTemplates"]
    assert claim["spec"] == {
        "accessModes": ["ReadWriteOnce"],
        "storageClassName": "local",
        "resources": {"requests": {"storage": "20Gi"}},
    }
    (shared,) = named(render(SETS), "PersistentVolumeClaim").values()
    assert shared["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert shared["spec"]["accessModes"] == ["ReadWriteMany"]


def test_a_job_that_would_differ_has_another_name() -> None:
    def name(**more: Any) -> str:
        (found,) = named(render({**SETS, **more}), "Job")
        return found

    assert len({name(), name(images={"download": "other"}), name(imagePullSecrets=[])}) == 3


@pytest.mark.parametrize("by", ["hpa", "keda"])
def test_autoscalers_have_the_numbers_of_pods_for_themselves(by: str) -> None:
    objects = render({**SETS, "autoscaling": {"by": by}})
    kind = {"hpa": "HorizontalPodAutoscaler", "keda": "ScaledObject"}[by]
    scalers = named(objects, kind)
    assert set(scalers) == {"chat-large-frontend", "chat-large-worker", "chat-large-worker-far"}
    for name, scaler in scalers.items():
        spec = scaler["spec"]
        target = spec["scaleTargetRef"]
        (scaled,) = [each for each in objects if (each["kind"], each["metadata"]["name"]) == (target["kind"], name)]
        assert target == {"apiVersion": scaled["apiVersion"], "kind": scaled["kind"], "name": name}
        assert "replicas" not in scaled["spec"], "every upgrade would set it back"
        least, most = ("minReplicas", "maxReplicas") if by == "hpa" else ("minReplicaCount", "maxReplicaCount")
        assert 1 <= spec[least] < spec[most]
    known = {each.name for each in EngineCollector(load=types_pb2.EngineLoad, model_name="").collect()}
    worker = scalers["chat-large-worker"]["spec"]
    if by == "hpa":
        metrics = [each["external"] for each in worker["metrics"]]
        targets = {each["metric"]["name"]: each["target"]["averageValue"] for each in metrics}
        labels = metrics[0]["metric"]["selector"]["matchLabels"]
    else:
        queries = [each["metadata"] for each in worker["triggers"]]
        found = [re.fullmatch(r"sum\(([\w:]+)\{([^}]*)\}\)", each["query"]) for each in queries]
        targets = {match[1]: each["threshold"] for match, each in zip(found, queries, strict=True) if match}
        assert found[0]
        labels = dict(re.findall(r'(\w+)="([^"]*)"', found[0][2]))
        assert labels.pop("namespace") == "ai"
        assert {each["ignoreNullValues"] for each in queries} == {"false"}
    assert targets == {"vllm:num_requests_waiting": "8", "vllm:num_requests_running": "32"}
    assert set(targets) <= known
    assert labels == {"job": "pagoda-scheduler", "pagoda_model": "large", "app_kubernetes_io_instance": "chat"}
    monitor = named(objects, "PodMonitor")["chat-large-scheduler"]["spec"]
    assert {"job", *(re.sub(r"\W", "_", each) for each in monitor["podTargetLabels"])} == set(labels)


def test_prometheus_is_let_in_to_all_ports_that_it_scrapes() -> None:
    for values in (TWO_MODELS, SETS):
        objects = render(values)
        found, monitors = policies(objects), named(objects, "PodMonitor")
        assert set(monitors) == {f"chat-{model}-{each}" for model in values["models"] for each in SERVICES}
        for name, monitor in monitors.items():
            assert monitor["metadata"]["labels"].items() >= values["monitoring"].get("labels", {}).items()
            wanted = {endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]}
            (rule,) = [
                each for each in found[name]["ingress"] if "kubernetes.io/metadata.name': 'monitoring" in str(each)
            ]
            assert wanted == {port["port"] for port in rule["ports"]}, name
            ports = {port["name"] for _, spec in services(objects).values() for port in spec["containers"][0]["ports"]}
            assert wanted <= ports


def test_one_address_leads_to_all_models_by_path() -> None:
    objects = render(TWO_MODELS)
    (ingress,) = named(objects, "Ingress").values()
    assert ingress["spec"]["tls"] == [{"secretName": "web", "hosts": ["llm.example"]}]
    (rule,) = ingress["spec"]["rules"]
    paths = {each["path"]: each["backend"]["service"]["name"] for each in rule["http"]["paths"]}
    assert paths == {"/small": "chat-small", "/large": "chat-large", "/": "chat-small"}
    for name in TWO_MODELS["models"]:
        assert named(objects, "ConfigMap")[f"chat-{name}"]["data"]["PAGODA_ROOT_PATH"] == f"/{name}"
        assert named(objects, "Service")[f"chat-{name}"]["spec"]["ports"][0]["name"] == "http"


def test_a_gateway_routes_by_path_or_by_the_model_s_name() -> None:
    objects = render(SETS)
    (gateway,) = named(objects, "Gateway").values()
    (listener,) = gateway["spec"]["listeners"]
    assert (listener["protocol"], listener["hostname"]) == ("HTTPS", "llm.example")
    assert listener["tls"]["certificateRefs"] == [{"kind": "Secret", "name": "web"}]
    route = named(objects, "HTTPRoute")["chat-large"]["spec"]
    assert route["parentRefs"] == [{"name": gateway["metadata"]["name"]}]
    (rule,) = route["rules"]
    path, header = rule["matches"]
    assert path == {"path": {"type": "PathPrefix", "value": "/large"}}
    assert header["headers"] == [{"name": "X-Gateway-Model-Name", "value": "Qwen/Qwen3-8B"}]
    assert rule["backendRefs"] == [{"name": "chat-large", "port": 8000}]
    assert rule["timeouts"] == {"request": "0s"}, "streams end by themselves"
    shared = render(MATRIX["two-models-tls"])
    assert not named(shared, "Gateway"), "it is there already"
    assert {each["spec"]["parentRefs"][0]["name"] for each in named(shared, "HTTPRoute").values()} == {"shared"}


def test_a_priority_class_is_that_of_all_pods() -> None:
    objects = render(SETS)
    assert list(named(objects, "PriorityClass")) == ["serving"]
    assert {each["spec"]["priorityClassName"] for each in pods(objects).values()} == {"serving"}


def test_names_fit_where_kubernetes_puts_them() -> None:
    files = helm.Chart.load(CHART).render(
        {"models": {"m" * 16: {"model": "x", "workers": {"w" * 10: {}}}}}, name="r" * 53, namespace="ai"
    )
    objects = [
        each for name, text in files.items() if name.endswith(".yaml") for each in yaml.safe_load_all(text) if each
    ]
    assert all(len(name) <= 52 for name in pods(objects)), "a StatefulSet adds 11 characters to it in a label"
    assert all(len(each["metadata"]["name"]) <= 63 for each in objects)
