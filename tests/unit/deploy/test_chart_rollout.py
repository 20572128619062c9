"""How the chart's services roll: as docs/upgrading.md says and tests/container/test_upgrade_chart.py does."""

from typing import Any

import pytest

from tests.container.cluster import workload
from tests.unit.deploy import charts

pytest.importorskip("helm_python.chart", reason="needs helm-python-sdk")


@pytest.mark.parametrize("name", ["defaults", "two-models", "two-models-tls", "shared"])
def test_frontends_surge_and_the_others_are_replaced_one_by_one(name: str) -> None:
    objects = charts.render(charts.MATRIX[name])
    rolls: dict[str, set[Any]] = {}
    for made in objects:
        if made["kind"] in ("Deployment", "StatefulSet"):
            spec = {"replicas": 2, **made["spec"]}  # an autoscaler's have no number
            one = workload({**made, "spec": spec})
            rolls.setdefault(one.service, set()).add((one.has_numbers, one.max_surge, one.max_unavailable))
    one_by_one = {(True, 0, 1)}
    assert rolls == {"frontend": {(False, 1, 0)}, "scheduler": one_by_one, "worker": one_by_one}
