"""The base manifests and the patches over them, read as files: what probes ask, how pods end, who may reach whom."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from pagoda_common.rpc.service import LIVENESS

KUBERNETES = Path(__file__).parents[3] / "deploy" / "kubernetes"
PORTS = {"frontend": {"http": 8000, "grpc": 50051}, "scheduler": {"grpc": 50052, "metrics": 9090}}
PORTS["worker"] = {"grpc": 50053, "metrics": 9090}
COMPONENT = "app.kubernetes.io/component"


def load(name: str) -> list[dict[str, Any]]:
    return [each for each in yaml.safe_load_all((KUBERNETES / name).read_text()) if each]


def settings_of(folder: str) -> dict[str, str]:
    """What the ConfigMap of a folder is made of; its name has a hash, so that a change rolls the pods."""
    (overlay,) = load(f"{folder}/kustomization.yaml")
    merged = {} if folder == "base" else {"behavior": "merge"}
    assert overlay["configMapGenerator"] == [{"name": "pagoda", **merged, "envs": ["settings.env"]}]
    lines = (KUBERNETES / folder / "settings.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if not line.startswith("#"))


def workload(path: str) -> dict[str, Any]:
    return next(each for each in load(path) if each["kind"] in ("Deployment", "StatefulSet", "LeaderWorkerSet"))


def pod(path: str) -> dict[str, Any]:
    """What the pods of a file are: its template's spec."""
    spec = workload(path)["spec"]
    template = spec["leaderWorkerTemplate"]["workerTemplate"] if "leaderWorkerTemplate" in spec else spec["template"]
    found: dict[str, Any] = template["spec"]
    return found


def containers(path: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = pod(path)["containers"]
    return found


def base(service: str) -> dict[str, Any]:
    (container,) = containers(f"base/{service}.yaml")
    return container


def grpc_probe(port: int, service: str | None, **times: int) -> dict[str, Any]:
    return {"grpc": {"port": port, **({"service": service} if service else {})}, **times}


def test_a_frontend_is_alive_when_it_answers_and_ready_when_a_request_would_be_served() -> None:
    container = base("frontend")
    assert container["startupProbe"] == {
        "httpGet": {"path": "/live", "port": "http"},
        "periodSeconds": 1,
        "failureThreshold": 120,
    }
    assert container["readinessProbe"] == {
        "httpGet": {"path": "/ready", "port": "http"},
        "periodSeconds": 2,
        "timeoutSeconds": 2,
        "failureThreshold": 5,
    }
    assert container["livenessProbe"] == {
        "httpGet": {"path": "/live", "port": "http"},
        "periodSeconds": 10,
        "timeoutSeconds": 5,
        "failureThreshold": 3,
    }


def test_a_scheduler_is_alive_when_it_answers_and_ready_when_a_worker_serves() -> None:
    container = base("scheduler")
    assert container["startupProbe"] == grpc_probe(50052, LIVENESS, periodSeconds=1, failureThreshold=120)
    assert container["readinessProbe"] == grpc_probe(50052, None, periodSeconds=2, timeoutSeconds=2, failureThreshold=2)
    assert container["livenessProbe"] == grpc_probe(
        50052, LIVENESS, periodSeconds=5, timeoutSeconds=5, failureThreshold=3
    )


WORKERS = ["base/worker.yaml", "overlays/tensor-parallel/worker.yaml", "overlays/multi-node/worker.yaml"]


@pytest.mark.parametrize("path", WORKERS)
def test_a_worker_has_minutes_to_load_and_is_killed_only_after_a_minute_of_silence(path: str) -> None:
    (container,) = containers(path)
    port = 50053
    assert container["ports"][0]["containerPort"] == port
    assert container["startupProbe"] == grpc_probe(port, LIVENESS, periodSeconds=1, failureThreshold=300)
    assert container["readinessProbe"] == grpc_probe(port, None, periodSeconds=2, timeoutSeconds=2, failureThreshold=2)
    assert container["livenessProbe"] == grpc_probe(
        port, LIVENESS, periodSeconds=10, timeoutSeconds=10, failureThreshold=6
    )


@pytest.mark.parametrize("path", ["cpu", "gpu", "tensor-parallel-gpu"])
def test_weights_from_the_hub_get_half_an_hour(path: str) -> None:
    for container in containers(f"overlays/{path}/worker.yaml"):
        assert container["startupProbe"] == {"failureThreshold": 1800}


@pytest.mark.parametrize(("service", "port"), [("scheduler", 50052), ("worker", 50053)])
def test_with_tls_a_program_asks_what_the_kubelet_asked(service: str, port: int) -> None:
    (container,) = containers(f"overlays/tls/{service}.yaml")
    name = f"--tls-server-name=pagoda-{service}"
    alive = ["pagoda-health", f"127.0.0.1:{port}", f"--service={LIVENESS}", name]
    for probe, command, period in (
        ("startup", alive, 5),
        ("readiness", ["pagoda-health", f"127.0.0.1:{port}", name], 5),
        ("liveness", alive, 30),
    ):
        assert container[f"{probe}Probe"] == {
            "grpc": None,
            "exec": {"command": command},
            "periodSeconds": period,
            "timeoutSeconds": 10,
        }


@pytest.mark.parametrize("service", ["frontend", "scheduler", "worker"])
def test_with_tls_each_service_has_its_own_secret_and_none_falls_back_to_plaintext(service: str) -> None:
    path = f"overlays/tls/{service}.yaml"
    (container,) = containers(path)
    assert container["volumeMounts"] == [{"name": "tls", "mountPath": "/etc/pagoda/tls", "readOnly": True}]
    assert pod(path)["volumes"] == [
        {"name": "tls", "secret": {"secretName": f"pagoda-tls-{service}", "defaultMode": 0o440}}
    ]
    assert workload(path)["metadata"]["annotations"] == {"pagoda/external": f"secret/pagoda-tls-{service}"}
    assert settings_of("overlays/tls") == {
        "PAGODA_INSECURE": "false",
        "PAGODA_TLS_CERT": "/etc/pagoda/tls/tls.crt",
        "PAGODA_TLS_KEY": "/etc/pagoda/tls/tls.key",
        "PAGODA_TLS_CA": "/etc/pagoda/tls/ca.crt",
    }
    called = {"name": "PAGODA_TLS_SERVER_NAME", "value": "pagoda-worker"}
    assert container.get("env", []) == ([called] if service == "scheduler" else [])


def test_arguments_name_the_ports_that_containers_list() -> None:
    assert base("frontend")["args"] == ["--host=0.0.0.0", "--port=8000", "--grpc-port=50051", "--drain-timeout=60"]
    assert base("scheduler")["args"] == ["--host=0.0.0.0", "--port=50052", "--metrics-port=9090", "--drain-timeout=2"]
    worker = ["--host=0.0.0.0", "--port=50053", "--advertise-address=$(POD_IP):50053", "--metrics-port=9090"]
    assert base("worker")["args"] == worker
    assert containers("overlays/multi-node/worker.yaml")[0]["args"] == worker
    for service, ports in PORTS.items():
        assert {port["name"]: port["containerPort"] for port in base(service)["ports"]} == ports


def test_pods_end_as_the_page_says() -> None:
    assert base("frontend")["lifecycle"] == {"preStop": {"exec": {"command": ["sleep", "5"]}}}
    graces = {service: pod(f"base/{service}.yaml")["terminationGracePeriodSeconds"] for service in PORTS}
    assert graces == {"frontend": 75, "scheduler": 30, "worker": 30}
    assert [pod(path)["terminationGracePeriodSeconds"] for path in WORKERS] == [30, 45, 45]
    page = " ".join((KUBERNETES.parents[1] / "docs" / "kubernetes.md").read_text().split())
    assert "preStop sleeps 5 s until proxies have noticed, then open streams get 60 s" in page
    assert "the grace period is 75 s" in page
    assert "The drain time is 2 s" in page


def test_updates_lose_no_frontend_and_need_no_second_accelerator() -> None:
    frontend, worker = workload("base/frontend.yaml")["spec"], workload("base/worker.yaml")["spec"]
    assert frontend["replicas"] == 2
    assert frontend["strategy"] == {"rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}
    assert worker["replicas"] == 1
    assert worker["strategy"] == {"rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}}
    scheduler = workload("base/scheduler.yaml")
    assert scheduler["kind"] == "StatefulSet", "the old pod has ended when the new one starts"
    assert (scheduler["spec"]["replicas"], scheduler["spec"]["serviceName"]) == (1, "pagoda-scheduler")
    assert scheduler["spec"]["podManagementPolicy"] == "Parallel", "a broken pod is replaced by an update"
    groups = workload("overlays/multi-node/worker.yaml")["spec"]
    assert (groups["replicas"], groups["startupPolicy"]) == (1, "LeaderCreated")
    assert groups["rolloutStrategy"] == {
        "type": "RollingUpdate",
        "rollingUpdateConfiguration": {"maxUnavailable": 1, "maxSurge": 0},
    }
    assert groups["leaderWorkerTemplate"]["size"] == 2
    assert groups["leaderWorkerTemplate"]["restartPolicy"] == "None", "the other ranks keep their weights"
    ranks = workload("overlays/tensor-parallel/worker.yaml")["spec"]
    assert (ranks["podManagementPolicy"], ranks["replicas"]) == ("Parallel", 1)


@pytest.mark.parametrize("path", ["base/frontend.yaml", "base/scheduler.yaml", *WORKERS])
def test_every_container_has_settings_and_a_home_that_can_be_written_to(path: str) -> None:
    spec = pod(path)
    assert spec["serviceAccountName"] == "pagoda"
    assert spec["enableServiceLinks"] is False, "PAGODA_PORT=tcp://… would be set"
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"] == {
        "runAsNonRoot": True,
        "runAsUser": 10001,
        "runAsGroup": 10001,
        "fsGroup": 10001,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    token = {"secretKeyRef": {"name": "pagoda-hub", "key": "token", "optional": True}}
    for container in spec["containers"]:
        assert container["envFrom"] == [{"configMapRef": {"name": "pagoda"}}]
        assert container["imagePullPolicy"] == "IfNotPresent"
        env = {each["name"]: each.get("value", each.get("valueFrom")) for each in container["env"]}
        assert env["HOME"] == "/tmp"
        assert env.get("HF_TOKEN") == (None if "scheduler" in path else token)
        is_worker = path in WORKERS
        assert ("POD_IP" in env) is is_worker
        mounts = {"tmp": "/tmp", **({"shared-memory": "/dev/shm"} if is_worker else {})}
        assert {each["name"]: each["mountPath"] for each in container["volumeMounts"]} == mounts
        assert container["image"] == ("pagoda-worker" if is_worker else f"pagoda-{container['name']}")
    if path in WORKERS:
        assert spec["volumes"][1] == {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}}
    else:
        assert spec["volumes"] == [{"name": "tmp", "emptyDir": {"sizeLimit": "1Gi"}}]


@pytest.mark.parametrize("path", ["base/frontend.yaml", "base/worker.yaml", "overlays/multi-node/worker.yaml"])
def test_pods_spread_over_nodes_where_they_can(path: str) -> None:
    (constraint,) = pod(path)["topologySpreadConstraints"]
    component = "frontend" if "frontend" in path else "worker"
    labels = {"app.kubernetes.io/name": "pagoda", COMPONENT: component}
    assert constraint == {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": labels},
    }


def test_services_lead_to_the_ports_of_their_pods() -> None:
    services = {
        each["metadata"]["name"]: each["spec"]
        for name in ("frontend", "scheduler")
        for each in load(f"base/{name}.yaml")
        if each["kind"] == "Service"
    }
    assert set(services) == {"pagoda", "pagoda-frontends", "pagoda-scheduler"}
    for name, spec in services.items():
        component = "scheduler" if name == "pagoda-scheduler" else "frontend"
        assert spec["selector"] == {COMPONENT: component}
        for port in spec["ports"]:
            assert (port["targetPort"], port["port"]) == (port["name"], PORTS[component][port["name"]])
            assert port.get("appProtocol") == (None if port["name"] == "metrics" else port["name"])
    assert {name: [port["name"] for port in spec["ports"]] for name, spec in services.items()} == {
        "pagoda": ["http", "grpc"],
        "pagoda-frontends": ["grpc"],
        "pagoda-scheduler": ["grpc", "metrics"],
    }
    headless = {name for name, spec in services.items() if spec.get("clusterIP") == "None"}
    assert headless == {"pagoda-frontends"}, "the scheduler's address outlives its pod"
    early = {name for name, spec in services.items() if spec.get("publishNotReadyAddresses")}
    assert early == {"pagoda-scheduler"}, "workers register before it is ready"
    assert settings_of("base") == {
        "PAGODA_LOG_LEVEL": "info",
        "PAGODA_MODEL": "pagoda-tiny",
        "PAGODA_SCHEDULER": "pagoda-scheduler:50052",
        "PAGODA_INSECURE": "true",
    }


def test_policies_let_in_whom_the_page_names_and_nobody_else() -> None:
    policies = {each["metadata"]["name"]: each["spec"] for each in load("base/network-policies.yaml")}
    assert {name: spec["policyTypes"] for name, spec in policies.items()} == {
        f"pagoda-{service}": ["Ingress"] for service in PORTS
    }

    def rule(*peers: str, ports: list[str]) -> dict[str, Any]:
        labels = [{"app.kubernetes.io/name": "pagoda", COMPONENT: peer} for peer in peers]
        found: dict[str, Any] = {"ports": [{"port": port} for port in ports]}
        return found | ({"from": [{"podSelector": {"matchLabels": each}} for each in labels]} if peers else {})

    assert policies["pagoda-frontend"]["ingress"] == [rule(ports=["http", "grpc"])]
    assert policies["pagoda-scheduler"]["ingress"] == [rule("frontend", "worker", ports=["grpc"])]
    assert policies["pagoda-worker"]["ingress"] == [rule("scheduler", ports=["grpc"])]


RESOURCES = {
    "base/frontend.yaml": ({"cpu": "100m", "memory": "192Mi"}, {"memory": "1Gi"}),
    "base/scheduler.yaml": ({"cpu": "100m", "memory": "128Mi"}, {"memory": "2Gi"}),
    **dict.fromkeys(WORKERS, ({"cpu": "250m", "memory": "512Mi"}, {"memory": "4Gi"})),
    "overlays/tensor-parallel/worker.yaml": ({"cpu": "500m", "memory": "1Gi"}, {"memory": "8Gi"}),
    "components/real-load/frontend.yaml": ({"cpu": "500m", "memory": "512Mi"}, {"memory": "2Gi"}),
    "components/real-load/scheduler.yaml": ({"cpu": "1", "memory": "512Mi"}, {"memory": "2Gi"}),
    "overlays/cpu/worker.yaml": ({"cpu": "4", "memory": "12Gi"}, {"cpu": "4", "memory": "12Gi"}),
    "overlays/gpu/worker.yaml": (
        {"cpu": "4", "memory": "16Gi", "nvidia.com/gpu": "1"},
        {"memory": "32Gi", "nvidia.com/gpu": "1"},
    ),
    "overlays/tensor-parallel-gpu/worker.yaml": (
        {"cpu": "8", "memory": "48Gi", "nvidia.com/gpu": "2"},
        {"memory": "96Gi", "nvidia.com/gpu": "2"},
    ),
}
"""By file: requests and limits. A CPU limit throttles; overlays/cpu has one so that cores are the pod's own."""


@pytest.mark.parametrize("path", RESOURCES)
def test_pods_ask_for_what_they_were_measured_with(path: str) -> None:
    requests, limits = RESOURCES[path]
    for container in containers(path):
        assert container["resources"] == {"requests": requests, "limits": limits}


@pytest.mark.parametrize("path", ["gpu", "tensor-parallel-gpu"])
def test_workers_with_accelerators_go_to_their_nodes(path: str) -> None:
    spec = pod(f"overlays/{path}/worker.yaml")
    assert spec["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    assert spec["nodeSelector"] == {"nvidia.com/gpu.present": "true"}
    (shared,) = [each for each in spec["volumes"] if each["name"] == "shared-memory"]
    assert shared["emptyDir"] == {"medium": "Memory", "sizeLimit": "8Gi"}
    for container in spec["containers"]:
        env = {each["name"]: each["value"] for each in container["env"]}
        assert env["NVIDIA_DRIVER_CAPABILITIES"] == "compute,utility"
        assert env.get("HF_HOME", "/models/hub") == "/models/hub"
    assert settings_of(f"overlays/{path}").items() >= {"PAGODA_DTYPE": "bfloat16", "PAGODA_DEVICE": "cuda"}.items()
    (overlay,) = load(f"overlays/{path}/kustomization.yaml")
    assert overlay["images"] == [{"name": "pagoda-worker", "newTag": "cuda"}]
    assert overlay["components"] == ["../../components/model-volume", "../../components/real-load"]


def test_the_accelerators_of_a_pod_group_are_asked_for_like_the_others() -> None:
    prefix = "/spec/leaderWorkerTemplate/workerTemplate/spec/"
    operations = yaml.safe_load((KUBERNETES / "overlays/multi-node-gpu/worker.yaml").read_text())
    values = {each["path"].removeprefix(prefix) + f" {index}": each["value"] for index, each in enumerate(operations)}
    assert {each["op"] for each in operations} == {"replace", "add"}
    assert list(values.values()) == [
        {
            "requests": {"cpu": "4", "memory": "24Gi", "nvidia.com/gpu": "1"},
            "limits": {"memory": "48Gi", "nvidia.com/gpu": "1"},
        },
        1800,
        {"name": "NVIDIA_DRIVER_CAPABILITIES", "value": "compute,utility"},
        {"name": "HF_HOME", "value": "/models/hub"},
        {"name": "models", "mountPath": "/models"},
        {"name": "models", "persistentVolumeClaim": {"claimName": "pagoda-models"}},
        "8Gi",
        [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        {"nvidia.com/gpu.present": "true"},
    ]
    assert [name.rpartition(" ")[0] for name in values] == [
        "containers/0/resources",
        "containers/0/startupProbe/failureThreshold",
        "containers/0/env/-",
        "containers/0/env/-",
        "containers/0/volumeMounts/-",
        "volumes/-",
        "volumes/1/emptyDir/sizeLimit",
        "tolerations",
        "nodeSelector",
    ]


def test_the_models_volume_is_shared_by_workers_and_frontends() -> None:
    (claim,) = load("components/model-volume/claim.yaml")
    assert claim["metadata"]["name"] == "pagoda-models"
    assert claim["spec"] == {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "100Gi"}}}
    (component,) = load("components/model-volume/kustomization.yaml")
    (patch,) = component["patches"]
    assert patch["target"] == {"kind": "Deployment", "name": "pagoda-(worker|frontend)"}
    assert [each["value"] for each in yaml.safe_load(patch["patch"])] == [
        {"name": "models", "persistentVolumeClaim": {"claimName": "pagoda-models"}},
        {"name": "models", "mountPath": "/models"},
        {"name": "HF_HOME", "value": "/models/hub"},
    ]


def test_a_standby_group_is_one_more_than_serve() -> None:
    (overlay,) = load("overlays/multi-group/kustomization.yaml")
    assert settings_of("overlays/multi-group") == {"PAGODA_MAX_SERVING_GROUPS": "2", "PAGODA_ROUTING_POLICY": "prefix"}
    assert overlay["replicas"] == [{"name": "pagoda-worker", "count": 3}]


def test_autoscaling_is_quick_upwards_and_slow_downwards() -> None:
    (scaler,) = load("overlays/hpa/autoscaler.yaml")
    spec = scaler["spec"]
    assert (spec["minReplicas"], spec["maxReplicas"]) == (1, 8)
    targets = {each["external"]["metric"]["name"]: each["external"]["target"] for each in spec["metrics"]}
    assert targets == {
        "vllm:num_requests_waiting": {"type": "AverageValue", "averageValue": "8"},
        "vllm:num_requests_running": {"type": "AverageValue", "averageValue": "64"},
    }
    assert {name: each["stabilizationWindowSeconds"] for name, each in spec["behavior"].items()} == {
        "scaleUp": 30,
        "scaleDown": 600,
    }
    (keda,) = load("overlays/keda/scaled-object.yaml")
    addresses = {each["metadata"]["serverAddress"] for each in keda["spec"]["triggers"]}
    assert addresses == {"http://prometheus-operated.monitoring:9090"}
    assert {each["type"] for each in keda["spec"]["triggers"]} == {"prometheus"}


def test_metrics_are_scraped_by_the_monitoring_namespace_alone() -> None:
    scheduler, frontend, worker = load("overlays/observability/monitors.yaml")
    (endpoint,) = worker["spec"]["podMetricsEndpoints"]
    assert (endpoint["port"], endpoint["interval"]) == ("metrics", "15s")
    assert scheduler["spec"]["endpoints"][0]["port"] == "metrics"
    assert (frontend["spec"]["endpoints"][0]["port"], frontend["spec"]["endpoints"][0]["path"]) == ("http", "/metrics")
    assert {each["spec"]["endpoints"][0]["interval"] for each in (scheduler, frontend)} == {"15s"}
    policies = load("overlays/observability/network-policy.yaml")
    monitoring = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
    for policy, component in zip(policies, ("scheduler", "worker"), strict=True):
        assert policy["spec"]["ingress"] == [{"from": [monitoring], "ports": [{"port": "metrics"}]}]
        assert policy["spec"]["podSelector"]["matchLabels"][COMPONENT] == component
        assert policy["spec"]["policyTypes"] == ["Ingress"]


def test_a_gateway_routes_the_api_without_a_time_limit() -> None:
    pool, route = load("overlays/gateway/inference-pool.yaml")
    assert pool["spec"]["endpointPickerRef"] == {
        "name": "pagoda-endpoint-picker",
        "port": {"number": 9002},
        "failureMode": "FailOpen",
    }
    (rule,) = route["spec"]["rules"]
    assert rule["matches"] == [{"path": {"type": "PathPrefix", "value": "/v1"}}]
    assert rule["timeouts"] == {"request": "0s"}, "streams end by themselves"
    assert route["spec"]["parentRefs"] == [{"name": "inference-gateway"}]


def test_a_picker_s_profiles_name_plugins_that_are_declared() -> None:
    (config,) = load("overlays/gateway/picker-plugins.yaml")
    declared = [plugin.get("name", plugin["type"]) for plugin in config["plugins"]]
    named = [plugin["pluginRef"] for profile in config["schedulingProfiles"] for plugin in profile["plugins"]]
    assert named
    assert set(named) <= set(declared)
    assert len(set(declared)) == len(declared)


def test_patches_are_all_in_their_overlays() -> None:
    for folder in sorted((KUBERNETES / "overlays").iterdir()):
        (overlay,) = load(f"overlays/{folder.name}/kustomization.yaml")
        named = [*overlay["resources"], *(each.get("path", "") for each in overlay.get("patches", []))]
        named += overlay.get("configurations", [])
        named += [file for each in overlay.get("configMapGenerator", []) for file in each.get("files", [])]
        files = {path.name for path in folder.glob("*.yaml")} - {"kustomization.yaml"}
        assert files <= set(named), folder.name
    (everything,) = load("base/kustomization.yaml")
    files = {path.name for path in (KUBERNETES / "base").glob("*.yaml")} - {"kustomization.yaml"}
    assert set(everything["resources"]) == files
    assert everything["labels"] == [
        {
            "pairs": {"app.kubernetes.io/name": "pagoda", "app.kubernetes.io/part-of": "pagoda"},
            "includeSelectors": True,
        }
    ]
