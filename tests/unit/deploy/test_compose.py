"""What the compose files say: order of health, networks, ports, limits. Starts nothing."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from pagoda_common.config.engine_config import EMBEDDED_MODEL
from pagoda_common.config.flags.flags import add_frontend_flags, frontend_config_from_args
from pagoda_common.config.flags.settings import ServiceParser, parse_service_args
from pagoda_common.config.frontend_config import FrontendConfig

ROOT = Path(__file__).parents[3]
SERVICES = ("balancer", "frontend", "scheduler", "worker")
PATIENCE_S = 45
DASHBOARD = ROOT / "deploy/helm/pagoda/files/dashboard.json"


class Loader(yaml.SafeLoader):
    """Knows the tags of Compose."""


Loader.add_constructor(
    "!override",
    lambda loader, node: (
        loader.construct_mapping(node, deep=True)
        if isinstance(node, yaml.MappingNode)
        else loader.construct_sequence(node)
    ),
)


def load(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.load((ROOT / name).read_text(), Loader)
    return found


STACK = load("compose.yaml")["services"]


@pytest.mark.parametrize("name", SERVICES)
def test_a_container_is_restricted_and_has_more_than_its_drain_to_end(name: str) -> None:
    service = STACK[name]
    assert service["restart"] == "unless-stopped"
    assert service["init"] is True
    assert service["read_only"] is True
    assert service["tmpfs"] == ["/tmp"]
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["stop_grace_period"] == f"{PATIENCE_S}s"
    assert FrontendConfig().drain_timeout_s < PATIENCE_S
    assert service["env_file"] == [{"path": "pagoda.env", "required": False}]
    assert not {"privileged", "user", "cap_add", "network_mode", "pid", "healthcheck", "stop_signal"} & set(service)


def test_no_container_takes_all_of_the_machine() -> None:
    limits = {name: service["mem_limit"] for name, service in STACK.items()}
    sizes = {"balancer": "256m", "frontend": "2g", "scheduler": "2g", "worker": "8g"}
    assert limits == {name: f"${{{name.upper()}_MEMORY:-{size}}}" for name, size in sizes.items()}
    page = (ROOT / "docs" / "containers.md").read_text()
    for name, size in sizes.items():
        assert f"`{name.upper()}_MEMORY` {size}" in page
    observers = load("compose.observability.yaml")["services"]
    bounded = [*STACK.values(), *(observers[name] for name in ("prometheus", "grafana", "otel-collector"))]
    for service in bounded:
        assert service["pids_limit"] == 1024
        assert service["logging"] == {"driver": "json-file", "options": {"max-size": "10m", "max-file": "5"}}
    assert load("compose.gpu.yaml")["services"]["worker"]["mem_limit"] == "${WORKER_MEMORY:-32g}"


def test_containers_start_in_the_order_of_health_and_stop_the_other_way_round() -> None:
    conditions = {
        name: {other: each["condition"] for other, each in service.get("depends_on", {}).items()}
        for name, service in STACK.items()
    }
    assert conditions == {
        "balancer": {"frontend": "service_healthy"},
        "frontend": {"scheduler": "service_healthy", "worker": "service_healthy"},
        "scheduler": {},
        "worker": {"scheduler": "service_started"},  # it is healthy when a worker has registered
    }


def test_only_the_balancer_is_reached_from_outside_and_the_engine_is_on_a_network_of_its_own() -> None:
    assert {name: service.get("ports", []) for name, service in STACK.items()} == {
        "balancer": [
            "${LISTEN_HOST:-127.0.0.1}:${HTTP_PORT:-8000}:8000",
            "${LISTEN_HOST:-127.0.0.1}:${GRPC_PORT:-50051}:50051",
        ],
        "frontend": [],
        "scheduler": [],
        "worker": [],
    }
    assert {name: service["networks"] for name, service in STACK.items()} == {
        "balancer": ["edge"],
        "frontend": ["edge", "engine"],
        "scheduler": ["engine"],
        "worker": ["engine"],
    }
    assert set(load("compose.yaml")["networks"]) == {"edge", "engine"}


@pytest.mark.parametrize("name", ["frontend", "scheduler", "worker"])
def test_services_know_model_and_scheduler(name: str) -> None:
    env = STACK[name]["environment"]
    assert env["PAGODA_MODEL"] == f"${{MODEL:-{EMBEDDED_MODEL}}}"
    assert env["PAGODA_SCHEDULER"] == "scheduler:50052"
    assert env["PAGODA_INSECURE"] == "true"
    assert env["PAGODA_LOG_LEVEL"] == "${PAGODA_LOG_LEVEL:-info}"
    assert env["HF_TOKEN"] is None, "as in the environment"
    others = set(env) - {"PAGODA_MODEL", "PAGODA_SCHEDULER", "PAGODA_INSECURE", "PAGODA_LOG_LEVEL", "HF_TOKEN"}
    assert others == ({"PAGODA_API_KEY_FILE"} if name == "frontend" else set())


def test_keys_are_a_secret_of_the_frontend_alone() -> None:
    assert STACK["frontend"]["environment"]["PAGODA_API_KEY_FILE"] == "${API_KEY_FILE:+/run/secrets/api_keys}"
    assert [name for name, service in STACK.items() if "secrets" in service] == ["frontend"]
    assert STACK["frontend"]["secrets"] == ["api_keys"]
    assert load("compose.yaml")["secrets"] == {"api_keys": {"file": "${API_KEY_FILE:-/dev/null}"}}


def test_models_are_mounted_where_images_look_for_them() -> None:
    mounted = {name: service.get("volumes", []) for name, service in STACK.items()}
    models = ["${MODEL_DIR:-models}:/models"]
    assert mounted == {"balancer": [], "frontend": models, "scheduler": [], "worker": models}
    assert set(load("compose.yaml")["volumes"]) == {"models"}


@pytest.mark.parametrize("name", SERVICES)
def test_each_service_is_built_from_its_own_dockerfile(name: str) -> None:
    service = STACK[name]
    assert service["image"] == f"${{{name.upper()}_IMAGE:-pagoda-{name}}}"
    build = service["build"]
    dockerfile = ROOT / build["context"] / build.get("dockerfile", "Dockerfile")
    assert f'image.title="pagoda-{name}"' in dockerfile.read_text()
    declared = set(re.findall(r"^ARG (\w+)", dockerfile.read_text(), re.MULTILINE))
    assert set(build["args"]) <= declared
    assert build["args"]["BASE_IMAGE"] == "${BASE_IMAGE:-python:3.11-slim-bookworm}"
    if name == "worker":
        assert build["additional_contexts"] == {"wheels": "${WHEELS_DIR:-deploy/wheels}"}
        assert "FROM scratch AS wheels" in dockerfile.read_text()


def test_the_page_lists_every_variable_with_its_default() -> None:
    page = (ROOT / "docs" / "containers.md").read_text()
    given = re.findall(r"\$\{(\w+):-([^}]*)\}", (ROOT / "compose.yaml").read_text())
    for name, default in given:
        rows = [line for line in page.splitlines() if line.startswith("|") and f"`{name}`" in line]
        assert rows or name == "REVISION", name
        is_told = name not in ("REVISION", "API_KEY_FILE", "MODEL_DIR") and not name.endswith("_IMAGE")
        assert not is_told or default in rows[0], name


def test_a_gpu_is_the_worker_s_with_the_cuda_image() -> None:
    assert list(load("compose.gpu.yaml")["services"]) == ["worker"]
    worker = load("compose.gpu.yaml")["services"]["worker"]
    assert worker["image"] == "${WORKER_IMAGE:-pagoda-worker:cuda}"
    assert worker["build"] == {"args": {"VARIANT": "cuda"}}
    assert worker["deploy"]["resources"]["reservations"]["devices"] == [
        {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}
    ]
    assert worker["tmpfs"] == ["/tmp:exec"], "what Triton compiles is loaded from there"
    assert worker["environment"] == {"TRITON_CACHE_DIR": "/tmp/triton"}
    assert (worker["shm_size"], worker["ulimits"]) == ("8gb", {"memlock": -1})


def test_with_tls_no_service_speaks_plaintext_and_each_has_its_own_key() -> None:
    overlay = load("compose.tls.yaml")
    files = {"PAGODA_TLS_CA": "ca.crt", "PAGODA_TLS_CERT": "tls.crt", "PAGODA_TLS_KEY": "tls.key"}
    assert set(overlay["services"]) == set(SERVICES)
    for name, service in overlay["services"].items():
        targets = {each["target"]: each["source"] for each in service["secrets"]}
        assert targets == {"ca.crt": "ca", "tls.crt": f"{name}_cert", "tls.key": f"{name}_key"}
        env = service["environment"]
        if name == "balancer":
            assert env == {"TLS": "1"}
            continue
        assert env["PAGODA_INSECURE"] == "false"
        assert {key: env[key] for key in files} == {key: f"/run/secrets/{file}" for key, file in files.items()}
    own = {name: set(each["environment"]) - {*files, "PAGODA_INSECURE"} for name, each in overlay["services"].items()}
    assert own["frontend"] == {"PAGODA_SSL_CERTFILE", "PAGODA_SSL_KEYFILE"}
    frontend = overlay["services"]["frontend"]["environment"]
    assert (frontend["PAGODA_SSL_CERTFILE"], frontend["PAGODA_SSL_KEYFILE"]) == (
        "/run/secrets/tls.crt",
        "/run/secrets/tls.key",
    )
    assert overlay["services"]["scheduler"]["environment"]["PAGODA_TLS_SERVER_NAME"] == "worker"
    for source, where in overlay["secrets"].items():
        stem, _, kind = source.partition("_")
        file = "ca.crt" if source == "ca" else f"{stem}.{ {'cert': 'crt', 'key': 'key'}[kind] }"
        assert where == {"file": f"${{TLS_DIR:-certs}}/{file}"}


def test_a_second_model_has_an_engine_of_its_own_and_the_same_frontends() -> None:
    services = load("compose.models.yaml")["services"]
    for name in ("scheduler", "worker"):
        second = services[f"second-{name}"]
        assert second["extends"] == {"file": "compose.yaml", "service": name}
        assert second["environment"]["PAGODA_MODEL"] == "${SECOND_MODEL:-pagoda-tiny}"
    assert services["second-worker"]["environment"]["PAGODA_SCHEDULER"] == "second-scheduler:50052"
    assert services["second-worker"]["depends_on"] == {"second-scheduler": {"condition": "service_started"}}
    asked = STACK["frontend"]["environment"] | services["frontend"]["environment"]
    parser = ServiceParser()
    add_frontend_flags(parser)
    environment = {key: re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", value or "") for key, value in asked.items()}
    environment["PAGODA_API_KEY_FILE"] = ""
    config = frontend_config_from_args(parse_service_args(parser, [], environment))
    assert {one.served_model_name: one.scheduler for one in config.of_models} == {
        ("first",): "scheduler:50052",
        ("second",): "second-scheduler:50052",
    }


def test_observers_see_every_service_and_are_on_the_right_networks() -> None:
    overlay = load("compose.observability.yaml")
    services = overlay["services"]
    for name in ("frontend", "scheduler", "worker"):
        assert services[name]["environment"] == {"PAGODA_OTLP_TRACES_ENDPOINT": "http://otel-collector:4317"}
    observers = {name: services[name] for name in services if name not in SERVICES}
    assert {name: each["networks"] for name, each in observers.items()} == {
        "prometheus": ["edge", "engine"],
        "grafana": ["edge"],
        "otel-collector": ["edge", "engine"],
    }
    (rules,) = yaml.safe_load((ROOT / "deploy/observability/prometheus.yaml").read_text())["rule_files"]
    assert f"./deploy/helm/pagoda/files/alerts.yaml:{rules}:ro" in services["prometheus"]["volumes"]
    for name, each in observers.items():
        assert each["restart"] == "unless-stopped"
        assert (each["cap_drop"], each["security_opt"]) == (["ALL"], ["no-new-privileges:true"])
        ports = {"prometheus": "${PROMETHEUS_PORT:-9090}:9090", "grafana": "${GRAFANA_PORT:-3000}:3000"}
        wanted = [f"${{LISTEN_HOST:-127.0.0.1}}:{ports[name]}"] if name in ports else []
        assert each.get("ports", []) == wanted
        for mount in each["volumes"]:
            source, target, *mode = mount.split(":")
            if source.startswith("./"):
                assert (ROOT / source).exists()
                assert mode == ["ro"]
            else:
                assert source in overlay["volumes"]
            options = [word for word in each.get("command", []) if word.startswith(("--config", "--storage.tsdb.path"))]
            named = target == rules or source.endswith(("grafana", "prometheus"))
            assert not options or named or f"={target}" in options[0]
    assert services["prometheus"]["command"][0] == "--config.file=/etc/prometheus/prometheus.yaml"
    assert "--storage.tsdb.path=/prometheus" in services["prometheus"]["command"]
    assert services["grafana"]["environment"]["GF_SECURITY_ADMIN_PASSWORD"] == "${GRAFANA_PASSWORD:-admin}"


def test_prometheus_scrapes_the_ports_that_services_serve_metrics_on() -> None:
    config = yaml.safe_load((ROOT / "deploy/observability/prometheus.yaml").read_text())
    assert config["global"]["scrape_interval"] == "5s"
    found = {}
    for job in config["scrape_configs"]:
        for each in job.get("dns_sd_configs", []):
            assert (each["type"], each["refresh_interval"]) == ("A", "5s")
            found[job["job_name"]] = f"{each['names'][0]}:{each['port']}"
        for each in job.get("static_configs", []):
            found[job["job_name"]] = each["targets"][0]
    assert found == {
        "pagoda-frontend": "frontend:8000",
        "pagoda-scheduler": "scheduler:9090",
        "pagoda-worker": "worker:9090",
        "pagoda-balancer": "balancer:8404",
        "otel-collector": "otel-collector:8889",
    }


def test_the_collector_takes_traces_where_services_send_them_and_gives_metrics() -> None:
    config = yaml.safe_load((ROOT / "deploy/observability/collector.yaml").read_text())
    assert config["receivers"]["otlp"]["protocols"] == {
        "grpc": {"endpoint": "0.0.0.0:4317"},
        "http": {"endpoint": "0.0.0.0:4318"},
    }
    assert config["exporters"]["prometheus"]["endpoint"] == "0.0.0.0:8889"
    assert config["processors"]["memory_limiter"] == {"check_interval": "1s", "limit_mib": 256}
    pipelines = config["service"]["pipelines"]
    assert pipelines["traces"] == {
        "receivers": ["otlp"],
        "processors": ["memory_limiter", "batch"],  # the limiter first, or it limits nothing
        "exporters": ["spanmetrics", "debug"],
    }
    assert pipelines["metrics"] == {"receivers": ["spanmetrics"], "exporters": ["prometheus"]}


def test_grafana_is_given_the_dashboard_and_its_source() -> None:
    folder = ROOT / "deploy/observability/grafana"
    (source,) = yaml.safe_load((folder / "datasources/prometheus.yaml").read_text())["datasources"]
    assert (source["type"], source["url"]) == ("prometheus", "http://prometheus:9090")
    assert (source["isDefault"], source["jsonData"]) == (True, {"timeInterval": "5s"})
    used = re.findall(r'"uid": "(prometheus[^"]*)"', DASHBOARD.read_text())
    assert set(used) <= {source["uid"]}
    (provider,) = yaml.safe_load((folder / "dashboards/provider.yaml").read_text())["providers"]
    assert provider["type"] == "file"
    mounts = [mount.split(":") for mount in load("compose.observability.yaml")["services"]["grafana"]["volumes"]]
    shown = {target: source for source, target, *_ in mounts if target.startswith(provider["options"]["path"] + "/")}
    dashboards = {source for target, source in shown.items() if target.endswith(".json")}
    assert dashboards == {f"./{DASHBOARD.relative_to(ROOT)}"}
    assert f"./{(folder / 'dashboards/provider.yaml').relative_to(ROOT)}" in shown.values()
