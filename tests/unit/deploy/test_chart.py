"""The Helm chart, rendered by Helm's own engine: flags, ports, rights of its pods, and what values may be."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.deploy.test_kubernetes import flags_of
from tests.unit.deploy.test_pods import once, ports_listened_on

helm = pytest.importorskip("helm_python.chart", reason="needs helm-python-sdk")
errors = pytest.importorskip("helm_python.errors")

CHART = Path(__file__).parents[3] / "deploy" / "helm" / "pagoda"
COMPONENT = "app.kubernetes.io/component"
SEVERAL: dict[str, Any] = {
    "models": {
        "small": {
            "model": "pagoda-tiny",
            "settings": {"MAX_MODEL_LEN": "8k"},
            "maxFrontends": 4,
            "tensorParallelSize": 2,
        },
        "large": {"model": "Qwen/Qwen3-8B", "gpus": 1, "modelClaim": "models"},
    },
    "secrets": {"apiKeys": "keys", "hub": "hub", "serviceToken": "service"},
    "monitoring": {"enabled": True},
}
MATRIX: dict[str, dict[str, Any]] = {
    "defaults": {},
    "several": SEVERAL,
    "open": {"networkPolicies": False, "monitoring": {"enabled": True}},
}


def render(values: dict[str, Any]) -> list[dict[str, Any]]:
    files = helm.Chart.load(CHART).render(values, name="chat", namespace="ai")
    texts = [text for name, text in sorted(files.items()) if name.endswith(".yaml")]
    return [each for text in texts for each in yaml.safe_load_all(text) if each]


def pods(objects: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    kinds = ("Deployment", "StatefulSet")
    return {each["metadata"]["name"]: each["spec"]["template"] for each in objects if each["kind"] in kinds}


def named(objects: list[dict[str, Any]], kind: str) -> dict[str, dict[str, Any]]:
    return {each["metadata"]["name"]: each for each in objects if each["kind"] == kind}


@pytest.mark.parametrize("name", MATRIX)
def test_the_linter_has_no_complaint(name: str) -> None:
    report = helm.lint(CHART, MATRIX[name], strict=True)
    assert report["errors"] == []
    assert all(each["severity"] < 2 for each in report["messages"]), report


@pytest.mark.parametrize("name", MATRIX)
def test_pods_are_restricted_and_listen_on_ports_of_their_own(name: str) -> None:
    objects = render(MATRIX[name])
    settings = named(objects, "ConfigMap")
    for full, template in pods(objects).items():
        service = template["metadata"]["labels"][COMPONENT]
        spec = template["spec"]
        assert spec["securityContext"]["runAsNonRoot"]
        assert not spec["automountServiceAccountToken"]
        volumes = {each["name"] for each in spec["volumes"]}
        ports: list[int] = []
        for container in spec["containers"]:
            assert container["securityContext"]["readOnlyRootFilesystem"]
            assert {each["name"] for each in container["volumeMounts"]} <= volumes
            (source,) = container["envFrom"]
            data = settings[source["configMapRef"]["name"]]["data"]
            listened = ports_listened_on(service, container, data)
            assert listened <= {port["containerPort"] for port in container["ports"]}
            ports += listened
            assert {word.partition("=")[0] for word in container["args"]} <= flags_of(service)
        assert once(ports), full
        assert once(port["name"] for each in spec["containers"] for port in each["ports"])


@pytest.mark.parametrize("name", MATRIX)
def test_selectors_find_the_pods_of_one_service_of_one_model(name: str) -> None:
    objects = render(MATRIX[name])
    labels = [template["metadata"]["labels"] for template in pods(objects).values()]
    for each in objects:
        spec = each.get("spec", {})
        found = spec.get("podSelector") or spec.get("selector")
        if found:
            wanted = found if each["kind"] == "Service" else found["matchLabels"]
            assert len([have for have in labels if wanted.items() <= have.items()]) == 1, each["metadata"]["name"]


def test_each_model_has_its_settings_devices_and_ranks() -> None:
    objects = render(SEVERAL)
    settings = {name: each["data"] for name, each in named(objects, "ConfigMap").items()}
    assert settings["chat-small"]["PAGODA_MAX_MODEL_LEN"] == "8k"
    assert settings["chat-small"]["PAGODA_SCHEDULER"] == "chat-small-scheduler:50052"
    assert settings["chat-large"]["PAGODA_DEVICE"] == "cuda"
    small, large = (pods(objects)[f"chat-{name}-worker"]["spec"]["containers"] for name in ("small", "large"))
    flags = [dict(word.split("=", 1) for word in container["args"]) for container in small]
    assert [(each["--rank"], each["--world-size"]) for each in flags] == [("0", "2"), ("1", "2")]
    (worker,) = large
    assert worker["resources"]["limits"]["nvidia.com/gpu"] == worker["resources"]["requests"]["nvidia.com/gpu"] == 1
    assert worker["image"] == "pagoda-worker:cuda"
    assert {"name": "models", "mountPath": "/models"} in worker["volumeMounts"]
    scaler = named(objects, "HorizontalPodAutoscaler")
    assert list(scaler) == ["chat-small-frontend"]
    frontend = named(objects, "Deployment")["chat-small-frontend"]
    assert "replicas" not in frontend["spec"], "the autoscaler's alone"


def test_a_change_of_settings_rolls_the_pods_of_that_model_alone() -> None:
    def annotations(length: str) -> dict[str, str]:
        models = {**SEVERAL["models"], "small": {**SEVERAL["models"]["small"], "settings": {"MAX_MODEL_LEN": length}}}
        found = pods(render({**SEVERAL, "models": models}))
        return {name: each["metadata"]["annotations"]["pagoda/settings"] for name, each in found.items()}

    before, after = annotations("8k"), annotations("4k")
    assert {name for name in before if before[name] != after[name]} == {
        f"chat-small-{service}" for service in ("frontend", "scheduler", "worker")
    }


def test_prometheus_is_let_in_to_all_ports_that_it_scrapes() -> None:
    objects = render(SEVERAL)
    policies = named(objects, "NetworkPolicy")
    monitors = named(objects, "PodMonitor")
    assert set(monitors) == {
        f"chat-{m}-{s}" for m in SEVERAL["models"] for s in ("frontend", "scheduler", "worker")
    } | {f"chat-tiny-{s}" for s in ("frontend", "scheduler", "worker")}
    for name, monitor in monitors.items():
        wanted = {endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]}
        rules = policies[name]["spec"]["ingress"]
        open_to_it = [each for each in rules if "from" not in each or "namespaceSelector" in each["from"][0]]
        assert wanted <= {port["port"] for rule in open_to_it for port in rule["ports"]}, name


@pytest.mark.parametrize(
    "values",
    [
        {"models": {"Tiny": {"model": "pagoda-tiny"}}},
        {"models": {"a": {}}},
        {"models": {"a": {"model": "x", "worker": 2}}},
        {"models": {"a": {"model": "x", "tensorParallelSize": 0}}},
        {"models": {"a": {"model": "x", "settings": {"max-model-len": "8k"}}}},
        {"imagePullPolicy": "Sometimes"},
    ],
)
def test_values_that_are_wrong_are_refused(values: dict[str, Any]) -> None:
    chart = helm.Chart.load(CHART)
    chart.validate_schema(SEVERAL)
    with pytest.raises(errors.HelmValuesError):
        chart.validate_schema(values)
