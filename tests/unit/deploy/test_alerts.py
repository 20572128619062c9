"""The chart's alerts and its dashboard: where they go, and that they ask for metrics and times that there are."""

import json
import re

import pytest
import yaml

from tests.unit.deploy.charts import CHART, TWO_MODELS, named, render
from tests.unit.deploy.test_images import ROOT, SERVICES
from tests.unit.deploy.test_pods import once

helm = pytest.importorskip("helm_python.chart", reason="needs helm-python-sdk")


def test_alerts_and_dashboard_are_the_chart_s_files() -> None:
    objects = render(TWO_MODELS)
    alerts = yaml.safe_load((CHART / "files/alerts.yaml").read_text())
    (rule,) = named(objects, "PrometheusRule").values()
    assert rule["spec"] == alerts
    assert rule["metadata"]["labels"]["release"] == "prometheus"
    dashboard = named(objects, "ConfigMap")["chat-pagoda-dashboard"]
    assert dashboard["metadata"]["labels"]["grafana_dashboard"] == "1"
    source = CHART / "files/dashboard.json"
    assert json.loads(dashboard["data"]["pagoda.json"]) == json.loads(source.read_text())
    assert not named(render({}), "PrometheusRule")
    assert {each["name"] for each in helm.Chart.load(CHART).files} >= {"files/alerts.yaml", "files/dashboard.json"}


def test_alerts_ask_for_metrics_that_there_are() -> None:
    page = (ROOT / "docs/metrics.md").read_text()
    rules = yaml.safe_load((CHART / "files/alerts.yaml").read_text())["groups"][0]["rules"]
    assert once(rule["alert"] for rule in rules)
    for rule in rules:
        found = re.findall(r'((?:vllm|pagoda):\w+|\bup)\{job=~?"(pagoda-[\w.*]+)"', rule["expr"])
        assert found, rule
        for metric, job in found:
            metric = metric.removesuffix("_bucket")
            assert metric == "up" or f"| `{metric}` |" in page, metric
            assert any(re.fullmatch(job, f"pagoda-{service}") for service in SERVICES)
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["summary"]


UNITS = {"minutes": "{}m", "%": "0.{:0>2}", "th percentile": "0.{}"}
"""How an expression writes what a summary says."""


def test_an_alert_says_the_times_and_parts_that_it_asks_for() -> None:
    rules = yaml.safe_load((CHART / "files/alerts.yaml").read_text())["groups"][0]["rules"]
    told = []
    for rule in rules:
        for number, unit in re.findall(r"(\d+) ?(minutes|%|th percentile)", rule["annotations"]["summary"]):
            told.append(rule["alert"])
            assert UNITS[unit].format(number) in rule["expr"], rule["alert"]
        assert len(set(re.findall(r"\[(\d+m)\]", rule["expr"]))) <= 1, "both sides of a ratio are of the same time"
        is_of_minutes = "_over_time(" in rule["expr"] or "increase(" in rule["expr"]
        assert is_of_minutes != ("for" in rule), "one look is no alarm"
    assert set(told) == {"PagodaWorkersDie", "PagodaQueueGrows", "PagodaFirstTokensLate", "PagodaRequestsFail"}


def test_what_stops_all_requests_is_critical() -> None:
    rules = yaml.safe_load((CHART / "files/alerts.yaml").read_text())["groups"][0]["rules"]
    critical = {rule["alert"] for rule in rules if rule["labels"]["severity"] == "critical"}
    assert critical == {"PagodaNoWorkers", "PagodaSchedulerLost", "PagodaRequestsFail"}
