"""Grafana's dashboard asks for metrics that the services have, under the names of jobs that Prometheus gives them."""

import json
import re

from tests.container.stack import ROOT, ComposeStack
from tests.process.stack import ask

DASHBOARD = ROOT / "deploy/helm/pagoda/files/dashboard.json"
PROMETHEUS = ROOT / "deploy/observability/prometheus.yaml"
PORTS = {"frontend": 8000, "scheduler": 9090, "worker": 9090}
READ = "import sys; from urllib.request import urlopen; print(urlopen(sys.argv[1]).read().decode())"
QUERY = re.compile(r"((?:vllm|pagoda):\w+|\bprocess_\w+)\{job=~?\"(pagoda-[\w.*]+)\"")


def queries() -> set[tuple[str, str]]:
    """Metric and job of every query of the dashboard."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    expressions = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    assert all(QUERY.search(expression) or "up{" in expression for expression in expressions)
    return {found for expression in expressions for found in QUERY.findall(expression)}


def test_every_query_of_the_dashboard_finds_its_metric(stack: ComposeStack) -> None:
    ask(stack.url)
    names: dict[str, set[str]] = {}
    for service, port in PORTS.items():
        text = stack.execute(stack.containers(service)[0], "python", "-c", READ, f"http://127.0.0.1:{port}/metrics")
        # A metric without samples yet (a label has not occurred) still has its line of type.
        typed = {name for line in re.findall(r"^# TYPE (\S+) ", text, re.MULTILINE) for name in (line, f"{line}_total")}
        names[f"pagoda-{service}"] = typed | set(re.findall(r"^([\w:]+)[{ ]", text, re.MULTILINE))
    missing = [
        (metric, job)
        for metric, job in queries()
        if not any(metric in found for name, found in names.items() if re.fullmatch(job, name))
    ]
    assert not missing
    assert names.keys() <= set(re.findall(r"job_name: (\S+)", PROMETHEUS.read_text()))
